"""Whether a placement is possible: what it names exists, and its bytes fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from moesim.core.units import format_memory, slots_of
from moesim.errors import CapacityError, PolicyError, unknown_name, unknown_width
from moesim.hardware import HardwareProfile
from moesim.model import ModelSpec
from moesim.policy import CACHE, KV, LAYER_PARTS, STEP_PARTS, Placement
from moesim.trace.workload import KvPlace


def check_placement(model: ModelSpec, hardware: HardwareProfile, placement: Placement, policy_name: str) -> None:
    """Raise PolicyError at the first impossible thing of a placement."""
    if not isinstance(placement, Placement):
        got = f"expected a moesim.policy.Placement, got {placement!r}; return one, Placement() if nothing is cached"
        raise PolicyError(f"place(): {got} [policy={policy_name}]")
    problem = next(_problems(model, hardware, placement), None)
    if problem is not None:
        raise PolicyError(f"place(): {problem} [policy={policy_name}]")


def _problems(model: ModelSpec, hardware: HardwareProfile, placement: Placement) -> Iterator[str]:
    n_layers, devices = model.n_layers, hardware.devices
    for (part, layer), device in placement.parts.items():
        if part not in ((*LAYER_PARTS, KV) if layer >= 0 else STEP_PARTS) or not -1 <= layer < n_layers:
            yield f"no part ({part!r}, {layer}); layers 0..{n_layers - 1} have {(*LAYER_PARTS, KV)}, -1 has {STEP_PARTS}"
        if device not in devices:
            yield unknown_name("device", device, devices)
    for name, parts in (("streamed", placement.streamed), ("offloaded", placement.offloaded)):
        yield from _stream_problems(model, hardware, placement, name, parts)
    if not isinstance(placement.stream_depth, int) or placement.stream_depth < 0:
        yield f"stream_depth: expected an integer of at least 0, got {placement.stream_depth!r}"
    if not isinstance(placement.offload_from, int) or placement.offload_from < 1:
        yield f"offload_from: expected a number of rows, at least 1, got {placement.offload_from!r}"
    for what, held in (("reserved", placement.reserved), ("workspace", placement.workspace)):
        for name, n_bytes in held.items():
            if name not in devices:
                yield unknown_name("device", name, devices)
            if n_bytes < 0:
                yield f"{what} on {name}: expected at least 0 bytes, got {n_bytes}"
    for name in placement.backing:
        if name not in devices or devices[name].role == "accelerator":
            yield f"backing: expected a host or a disk of {hardware.name}, got {name!r}"
    names, backing = set(), backing_devices(hardware, placement)
    for pool in placement.pools:
        if pool.device not in devices:
            yield unknown_name("device", pool.device, devices)
        sizes = pool.sizes(n_layers)
        if (pool.device, pool.name) in names or min(pool.landing, min(sizes, default=0)) < 0 or pool.device in backing:
            yield f"Pool{tuple(pool)}: expected one pool of that name, at least 0 bytes, on a device that backs no weights"
        if isinstance(pool.n_bytes, Sequence) and (not pool.per_layer or len(sizes) != n_layers):
            expected = f"expected per_layer=True and one number of bytes for each of {n_layers} layers"
            yield f"Pool('{pool.device}', '{pool.name}'): {expected}, got per_layer={pool.per_layer} and {len(sizes)}"
        names.add((pool.device, pool.name))
    for copy in placement.copies:
        if (copy.device, copy.pool) not in names:
            yield f"copies of layer {copy.layer} in pool '{copy.pool}' of {copy.device}: declare that pool"
        if copy.bits is not None and copy.bits not in model.widths:
            yield f"copies of layer {copy.layer}: {'; '.join(unknown_width(copy.bits, model.widths))}"
        if not 0 <= copy.layer < n_layers or any(not 0 <= e < model.n_experts for e in copy.experts):
            yield f"copies of layer {copy.layer}, experts {list(copy.experts)[:8]}: no such units in {model.name}"


def _stream_problems(
    model: ModelSpec, hardware: HardwareProfile, placement: Placement, name: str, parts: Mapping[tuple[str, int], str]
) -> Iterator[str]:  # fmt: skip
    """Describe what of the streamed or offloaded parts does not exist."""
    known = (*LAYER_PARTS, KV) if name == "streamed" else LAYER_PARTS
    for (part, layer), device in parts.items():
        if part not in (known if layer >= 0 else STEP_PARTS) or not -1 <= layer < model.n_layers:
            yield f"{name}: no part ({part!r}, {layer}); layers 0..{model.n_layers - 1} have {known}, -1 has {STEP_PARTS}"
        if device not in hardware.devices:
            yield unknown_name("device", device, hardware.devices)
        runs_on = placement.parts.get(("attention" if part == KV else part, layer), hardware.compute)
        if device == runs_on:
            yield f"{name} ({part!r}, {layer}): expected it on another device than {runs_on}, which runs it; leave it out"
        if part == KV and (KV, layer) in placement.parts:
            yield f"(KV, {layer}): expected it in parts or in streamed, got it in both; leave one out"


def by_rows(hardware: HardwareProfile, placement: Placement) -> list[Placement]:
    """Return the placement of all steps, or that of small steps and that of large ones."""
    small = replace(placement, offloaded={})
    if not placement.offloaded:
        return [small]
    parts, streamed = {**placement.parts, **placement.offloaded}, dict(placement.streamed)
    for (part, layer), device in placement.offloaded.items():
        lies = streamed.pop((part, layer), None) or placement.parts.get((part, layer), hardware.compute)
        if lies != device:
            streamed[part, layer] = lies
        if part == "attention":
            lies = kv_device(hardware, placement, layer)
            if streamed.pop((KV, layer), None) is None:
                parts[KV, layer] = lies
            elif lies != device:
                streamed[KV, layer] = lies
    return [small, replace(small, parts=parts, streamed=streamed)]


class StreamUse(NamedTuple):
    """Parts that a step copies together, for the tasks that read them."""

    device: str  # that runs the parts
    layer: int  # -1 outside the MoE layers
    parts: tuple[str, ...]  # those that are streamed


def stream_uses(model: ModelSpec, hardware: HardwareProfile, placement: Placement) -> list[StreamUse]:
    """List the uses of streamed parts in a step, in order; a task of the dense part is one."""
    streamed, found = {*placement.streamed, *kept_apart(hardware, placement)}, []

    def at(part: str, layer: int) -> str:
        return placement.parts.get((part, layer), hardware.compute)

    def add(device: str, layer: int, *parts: str) -> None:
        there = tuple(part for part in parts if (part, layer) in streamed and (part == KV or model.part_bytes(part, layer)))
        if there:
            found.append(StreamUse(device, layer, there))

    add(at("embedding", -1), -1, "embedding")
    add(at("leading", -1), -1, "leading")
    for layer in range(model.n_layers if streamed else 0):
        attention, dense = at("attention", layer), at("dense", layer)
        if attention == dense:
            add(dense, layer, KV, "attention", "dense")
        else:
            add(attention, layer, KV, "attention")
            add(dense, layer, "dense")
        add(at("shared", layer), layer, "shared")
    add(at("head", -1), -1, "head")
    return found


def kept_apart(hardware: HardwareProfile, placement: Placement) -> dict[tuple[str, int], str]:
    """Return the KV caches that `Placement.parts` keeps on another device than attention's."""
    return {
        (part, layer): device for (part, layer), device in placement.parts.items()
        if part == KV and device != placement.parts.get(("attention", layer), hardware.compute)
    }  # fmt: skip


def backing_devices(hardware: HardwareProfile, placement: Placement) -> Sequence[str]:
    """Return the devices that have all experts throughout a run."""
    return placement.backing or hardware.backing


def kv_device(hardware: HardwareProfile, placement: Placement, layer: int) -> str:
    """Return the device in whose memory a layer's KV cache lies."""
    attends = placement.parts.get(("attention", layer), hardware.compute)
    return placement.streamed.get((KV, layer)) or placement.parts.get((KV, layer), attends)


def with_kv(model: ModelSpec, hardware: HardwareProfile, placement: Placement, kv: KvPlace | None) -> Placement:
    """Return a placement with the KV cache of GPUs in host memory, as far as a workload asks for it."""
    host = next((name for name, device in hardware.devices.items() if device.role == "host"), None)
    if kv is None or host is None:
        return placement
    mixers = [[block.mixer for block in blocks if block.mixer] for blocks in model.groups]
    growing = [
        layer for layer, found in enumerate(mixers) if any(store.kept is None for mixer in found for store in mixer.own)
        and hardware.devices[kv_device(hardware, placement, layer)].role == "accelerator"
    ]  # fmt: skip
    moved = {(KV, layer): host for layer in growing[len(growing) - slots_of(kv.host, len(growing)) :]}
    if kv.read == "attended":
        streamed = {key: device for key, device in placement.streamed.items() if key not in moved}
        return replace(placement, parts={**placement.parts, **moved}, streamed=streamed)
    parts = {key: device for key, device in placement.parts.items() if key not in moved}
    depth = max(1, placement.stream_depth)  # the next layer's while this one computes
    streamed = {**placement.streamed, **moved}
    return replace(placement, parts=parts, streamed=streamed, kv_resident=kv.resident, stream_depth=depth)


def kv_bytes_at(
    model: ModelSpec, hardware: HardwareProfile, placement: Placement, layer: int, tokens: int, requests: int
) -> dict[str, int]:  # fmt: skip
    """Return the bytes of a layer's (-1: leading layers') KV cache by device."""
    whole = model.kv_bytes(layer, tokens, requests)
    if layer < 0:
        return {placement.parts.get(("leading", -1), hardware.compute): whole}
    far = kv_device(hardware, placement, layer)
    if not placement.kv_resident or (KV, layer) not in placement.streamed:
        return {far: whole}
    near = model.kv_bytes(layer, min(tokens, placement.kv_resident * requests), requests)
    return {placement.parts.get(("attention", layer), hardware.compute): near, far: whole - near}


def required_bytes(
    model: ModelSpec, hardware: HardwareProfile, peak_kv_tokens: int, placement: Placement, n_requests: int = 1,
    *, draft_head: bool = False,
) -> dict[str, dict[str, int]]:  # fmt: skip
    """Compute the bytes that each device must have, by purpose; pools count as a whole."""
    # Purposes: "weights", "kv", "streams", "workspace", "reserved", "experts", "drafts", "pool:<name>".
    # `peak_kv_tokens` is the largest sum of final lengths of requests that are active together, of
    # which there are `n_requests`.
    need: dict[str, dict[str, int]] = {name: {} for name in hardware.devices}

    def add(device: str, purpose: str, n_bytes: int) -> None:
        if n_bytes:
            need[device][purpose] = need[device].get(purpose, 0) + n_bytes

    def at(part: str, layer: int) -> str:
        """Where a part lies: if it is streamed, not where it runs."""
        return placement.streamed.get((part, layer)) or placement.parts.get((part, layer), hardware.compute)

    for layer in range(model.n_layers):
        for part in LAYER_PARTS:
            add(at(part, layer), "weights", model.part_bytes(part, layer))
    for layer in range(-1, model.n_layers):
        for where, n_bytes in kv_bytes_at(model, hardware, placement, layer, peak_kv_tokens, n_requests).items():
            add(where, "kv", n_bytes)
    add(at("leading", -1), "weights", model.leading_bytes)
    add(at("embedding", -1), "weights", model.embedding_bytes)
    tied = model.tie_embeddings and at("head", -1) == at("embedding", -1)
    add(at("head", -1), "weights", model.head_bytes - (model.embedding_bytes if tied else 0))
    if draft_head:  # one more layer, whose experts are all where it runs
        last = model.n_layers - 1
        layer_bytes = sum(model.part_bytes(part, last) for part in LAYER_PARTS) + model.n_experts * model.expert_bytes(last)
        there = placement.parts.get(("head", -1), hardware.compute)
        add(there, "drafts", layer_bytes + model.kv_bytes(last, peak_kv_tokens, n_requests))
    for pool in placement.pools:
        lent = placement.lent.get(pool.device, 0) if pool.name == CACHE else 0
        add(pool.device, f"pool:{pool.name}", sum(pool.sizes(model.n_layers)) + pool.landing - lent)
    for name, n_bytes in placement.reserved.items():
        add(name, "reserved", n_bytes)
    buffers: dict[str, int] = {}
    for use in (use for one in by_rows(hardware, placement) for use in stream_uses(model, hardware, one)):
        size = sum(model.part_bytes(part, use.layer) for part in use.parts if part != KV)
        if KV in use.parts:
            there = kv_device(hardware, placement, use.layer)
            size += kv_bytes_at(model, hardware, placement, use.layer, peak_kv_tokens, n_requests)[there]
        buffers[use.device] = max(buffers.get(use.device, 0), size)
    for name, n_bytes in buffers.items():
        add(name, "streams", (placement.stream_depth + 1) * n_bytes)
    for name, device in hardware.devices.items():
        add(name, "workspace", max(device.workspace_bytes, placement.workspace.get(name, 0)))
        if name in backing_devices(hardware, placement):
            add(
                name,
                "experts",
                model.experts_bytes_total - (0 if device.role == "storage" else _elsewhere(model, hardware, placement)),
            )
    return need


def _elsewhere(model: ModelSpec, hardware: HardwareProfile, placement: Placement) -> int:
    """Count the bytes of experts that backing devices need not keep, since a copy is elsewhere."""
    if placement.host_experts == "all":
        return 0
    backing = backing_devices(hardware, placement)
    full = [copy for copy in placement.copies if copy.bits in (None, model.expert_bits) and copy.device not in backing]
    units: dict[int, set[int]] = {}
    for copy in full:
        units.setdefault(copy.layer, set()).update(copy.experts)
    return sum(len(experts) * model.expert_bytes(layer) for layer, experts in units.items())


PAGED: Final = 0.1
"""Share of what a host must hold that it may lack where experts are pages of a file: beyond it, a speed without reading them is
no prediction (an assumption)."""


def lacking(needed: Mapping[str, int], capacity: int, placement: Placement) -> int:
    """Return the bytes of mapped experts that a host has no room for; 0 if all fits, or if too much is lacking."""
    total = sum(needed.values())
    few = placement.host_experts == "mapped" and "experts" in needed and total - capacity <= PAGED * total
    return max(0, total - capacity) if few else 0


def paging_note(model: ModelSpec, name: str, needed: Mapping[str, int], lacks: int) -> str:
    """Describe a host that lacks some bytes of mapped experts: what a token reads again if experts are used alike."""
    whole, a_token = sum(needed.values()), lacks * model.top_k // model.n_experts
    return (
        f"{name} lacks {format_memory(lacks)} of {format_memory(whole)}: the system drops pages of the model's file and reads "
        f"about {format_memory(a_token)} a token again; this speed leaves that out"
    )


def check_capacity(
    needed: Mapping[str, Mapping[str, int]], hardware: HardwareProfile, placement: Placement, policy_name: str,
    lower: str = "the batch or the context",
) -> None:  # fmt: skip
    """Raise CapacityError if a device is too small for what it must hold; `lower` is what its message advises to."""
    for name, purposes in needed.items():
        total = sum(purposes.values())
        capacity = hardware.devices[name].memory_bytes
        if total > capacity and not lacking(purposes, capacity, placement):
            windows = hardware.machine.get("system") == "windows"
            beyond = "Windows would page to host memory, several times slower; " if windows else "loading would fail; "
            beyond *= hardware.devices[name].kind == "gpu"
            raise CapacityError(
                f"{name} of {hardware.name}: needs {format_memory(total)}, has {format_memory(capacity)}: {sum_of(purposes)}; "
                f"{beyond}lower the cache ratio, {lower}, or choose fewer bits (expert_bits of the model) "
                f"[policy={policy_name}]"
            )
    check_one_memory(needed, hardware, policy_name, lower)


def check_one_memory(needed: Mapping[str, Mapping[str, int]], hardware: HardwareProfile, policy_name: str, lower: str) -> None:
    """Raise CapacityError if a memory that devices share is too small for what they hold together."""
    for host in {device.memory_of: None for device in hardware.devices.values() if device.memory_of}:
        sharing = [host, *(name for name, device in hardware.devices.items() if device.memory_of == host)]
        total, capacity = sum(sum(needed[name].values()) for name in sharing), hardware.devices[host].memory_bytes
        if total > capacity:
            parts = "; ".join(f"{name}: {sum_of(needed[name])}" for name in sharing)
            raise CapacityError(
                f"{' and '.join(sharing)} of {hardware.name} share one memory: need {format_memory(total)}, has "
                f"{format_memory(capacity)}: {parts}; choose fewer copies or fewer bits, or lower {lower} [policy={policy_name}]"
            )


def sum_of(purposes: Mapping[str, int]) -> str:
    """Write what a device must hold, by purpose, the largest first.

    >>> sum_of({"kv": 2**29, "pool:cache": 11 * 2**30})
    'pool:cache 11 GiB, kv 512 MiB'
    """
    return ", ".join(f"{name} {format_memory(n_bytes)}" for name, n_bytes in sorted(purposes.items(), key=lambda p: -p[1]))
