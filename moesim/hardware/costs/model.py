"""Map (part, device, rows) to whole nanoseconds, for one model on one machine.

Answers are exact and remembered. A curve of the profile for the model's shape is the cost; else a roofline of the device's
rates, labelled ``derived``. The numbers used are noted, so that a result carries their weakest label.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from moesim.core.copies import Copies
from moesim.core.limits import CHUNKS
from moesim.core.units import NS_PER_S, ceil_div, format_bytes
from moesim.errors import HardwareError, unknown_name
from moesim.hardware.costs.curves import (
    Roofline,
    copy_ns,
    covers,
    curve_ns,
    linear_ns,
    nearest,
    points_ns,
    range_text,
    within_a_day,
)
from moesim.hardware.costs.operations import attention_of, operations, uncounted
from moesim.hardware.costs.provenance import Ledger, Unfitting, expert_curves, part_curves
from moesim.hardware.types import (
    OPERATIONS,
    TRANSFERS,
    CostCurve,
    Device,
    ExpertCost,
    HardwareProfile,
    Link,
    Pair,
    Transfer,
    weakest,
)
from moesim.model import ModelSpec
from moesim.model.parts import Block, Mixer, bits_to_bytes
from moesim.model.spec import SHADOW_BITS


def most_chunks(model: ModelSpec, chunk_bytes: int | None) -> int:
    """Count the chunks of a transfer of the model's largest expert."""
    return 1 if chunk_bytes is None else ceil_div(_largest(model), max(1, chunk_bytes))


def check_chunk(model: ModelSpec, chunk_bytes: int, place: str) -> None:
    """Refuse chunks of which a transfer would have more than `moesim.core.limits.CHUNKS`."""
    least = ceil_div(_largest(model), CHUNKS)
    if chunk_bytes < least:
        raise HardwareError(
            f"{place}: expected at least {least} bytes, as an expert of {model.name} ({format_bytes(_largest(model))}) goes in "
            f"at most {CHUNKS} chunks, or nothing for one piece, got {chunk_bytes}"
        )


def _largest(model: ModelSpec) -> int:
    return max(model.expert_bytes_by_layer or (model.expert_bytes(0),))


_REMEMBERED = 4096  # times of attention: most steps have their own
FULL_PPM = 1_000_000
FREE_PREDICTORS = ("oracle", "frequency", "coactivation", "statistical")
"""Predictors that cost nothing: table look-ups on an idle host thread, and bounds that stand for no computation."""


class CostModel:
    """Costs of one model on one machine.

    Parameters
    ----------
    model : ModelSpec
        Shapes and precisions.
    hardware : HardwareProfile
        Devices, links, curves.
    transfer : {"pinned", "pageable", "chunked"}
        Which curve of the links weights travel by: a property of the software, not of the link.
    chunk_bytes : int or None, bytes
        Largest piece of a transfer; every piece pays the link's latency. None: one piece.
    syncs : int
        Times that the host waits for the GPU during the copy of an expert; each after the first, which the link's latency has,
        takes its operation ``sync``.
    each_layer : sequence of str
        Operations of the host in each layer, between the router's result and the decision.
    extrapolate : bool
        Continue curves outside the range they hold for, and label that ``extrapolated``, instead of an error.

    Raises
    ------
    HardwareError
        If ``transfer`` or ``chunk_bytes`` is impossible. Costs raise it where the profile lacks what they need.
    """

    def __init__(
        self,
        model: ModelSpec,
        hardware: HardwareProfile,
        *,
        transfer: str = "pinned",
        chunk_bytes: int | None = None,
        syncs: int = 0,
        each_layer: Sequence[str] = (),
        extrapolate: bool = False,
    ) -> None:
        self.extrapolate = extrapolate
        if transfer not in TRANSFERS:
            raise HardwareError(f"transfer: {unknown_name('kind of transfer', transfer, TRANSFERS)}")
        if chunk_bytes is not None:
            check_chunk(model, chunk_bytes, "chunk_bytes")
        self.model = model
        self.hardware = hardware
        self.transfer = transfer
        self.chunk_bytes = chunk_bytes
        self.syncs, self.each_layer = syncs, each_layer
        self._ledger = Ledger(self.hardware)
        self._transfers: dict[tuple[str, int], int] = {}
        self._fetches: dict[tuple[str, str, int, int | None], int] = {}
        self._activations: dict[tuple[str, int], int] = {}
        self._paths: dict[tuple[str, str], tuple[Link, ...]] = {}
        self._parts: dict[tuple[str, str, int, int], int] = {}
        self._curves: dict[tuple[str, str], list[CostCurve]] = {}
        self._rooflines: dict[tuple[str, str, str], Roofline] = {}
        self._unfitting = Unfitting(self.model)
        self._memo: dict[tuple[Any, ...], int] = {}
        self._expert: dict[str, dict[int, int]] = {name: {0: 0} for name in self.hardware.devices}
        self._tables: dict[str, list[int]] = {name: [0] for name in self.hardware.devices}
        self._more_rows: dict[str, list[int]] = {}
        self._attention: dict[tuple[Any, ...], int] = {}
        self._alike = self.model.alike
        self._shared = [self.model.part_bytes("shared", layer) for layer in range(self.model.n_layers)]
        self._narrower: dict[float, CostModel] = {}
        self._outside: dict[str, None] = {}  # notes of experts whose size no point of a rate covers

    @classmethod
    def of(cls, policy: Any, model: ModelSpec, hardware: HardwareProfile, copies: Copies, extrapolate: bool = False) -> CostModel:
        """Return the costs of a policy's runs: its copies, and what its code does on the host in each layer."""
        return cls(
            model, hardware, transfer=copies.kind, chunk_bytes=copies.piece, syncs=copies.syncs,
            each_layer=getattr(policy, "each_layer", ()), extrapolate=extrapolate,
        )  # fmt: skip

    # ---- links

    def path(self, src: str, dst: str) -> tuple[Link, ...]:
        """Links from one device to another, fewest hops, then by name."""
        key = (src, dst)
        if key not in self._paths:
            self._paths[key] = self.hardware.path_between(src, dst)
        return self._paths[key]

    def transfer_ns(self, link: Link, n_bytes: int) -> int:
        """Time of one piece of weights over one link: latency + bytes / rate, rounded up."""
        key = (link.name, n_bytes)
        if key not in self._transfers:
            curve = link.curves.get(self.transfer)
            if curve is None:
                have = ", ".join(link.curves)
                raise HardwareError(
                    f"{self.hardware.path}: links.{link.name}: expected a curve '{self.transfer}', got only {have}; "
                    f"add it or choose transfer: {next(iter(link.curves))}"
                )
            waiting = self._waiting_ns(link)
            self._transfers[key] = waiting + self._over(curve, n_bytes, f"transfer {self.transfer} {link.name}")
        return self._transfers[key]

    @property
    def contention(self) -> tuple[Pair, ...]:
        """What slows down what: while a copy is waited for, it reads nothing."""
        if self.syncs < 2:
            return self.hardware.contention
        return tuple(self._for_copies(pair) for pair in self.hardware.contention)

    def _for_copies(self, pair: Pair) -> Pair:
        for link in self.hardware.links:
            ends_at_gpu = self.hardware.devices[link.dst].kind == "gpu"
            if link.name in (pair.a, pair.b) and self.transfer in link.curves and ends_at_gpu:
                return self._with_link(pair, link)
        return pair

    def _with_link(self, pair: Pair, link: Link) -> Pair:
        ns = copy_ns(link.curves[self.transfer], self.model.expert_bytes(0))
        reading = Fraction(ns, max(1, ns + self._waiting_ns(link)))
        a, b = pair.a_rate_ppm, pair.b_rate_ppm
        if link.name == pair.a:
            return replace(pair, b_rate_ppm=FULL_PPM - round((FULL_PPM - b) * reading))
        return replace(pair, a_rate_ppm=FULL_PPM - round((FULL_PPM - a) * reading))

    def _waiting_ns(self, link: Link) -> int:
        """Return how long the host waits during a copy over a link."""
        if self.syncs < 2 or self.hardware.devices[link.dst].kind != "gpu":
            return 0
        return (self.syncs - 1) * self.operation_ns("sync_pageable" if self.transfer == "pageable" else "sync")

    def latency_ns(self, link: Link, of_activations: bool = False) -> int:
        """Time of a copy before its first byte moves; 0 of measured points, which do not have it."""
        if of_activations:
            curve = link.activation or next(iter(link.curves.values()))
        else:
            curve = link.curves[self.transfer]
        return 0 if curve.points else round(curve.latency_us * 1000)

    def fetch_ns(self, src: str, dst: str, n_bytes: int | None = None, layer: int = 0) -> int:
        """Time to copy one expert between two devices when nothing else moves."""
        key = (src, dst, layer if n_bytes is None else -1, n_bytes)
        if key not in self._fetches:
            size = self.model.expert_bytes(layer) if n_bytes is None else n_bytes
            self._fetches[key] = sum(self.hop_ns(link, size) for link in self.path(src, dst))
        return self._fetches[key]

    def next_bytes(self, n_bytes: int) -> int:
        """Bytes of the next chunk of a transfer that has so many left."""
        return n_bytes if self.chunk_bytes is None else min(n_bytes, self.chunk_bytes)

    def hop_ns(self, link: Link, n_bytes: int) -> int:
        """Time of a transfer over one link, chunk by chunk."""
        full, rest = (0, n_bytes) if self.chunk_bytes is None else divmod(n_bytes, self.chunk_bytes)
        ns = full * self.transfer_ns(link, self.chunk_bytes or 0) if full else 0
        return ns + (self.transfer_ns(link, rest) if rest or not full else 0)

    def activation_ns(self, link: Link, n_rows: int) -> int:
        """Time of rows' hidden states over one link."""
        key = (link.name, n_rows)
        if key not in self._activations:
            curve = link.activation or next(iter(link.curves.values()))
            self._activations[key] = self._over(curve, self.model.activation_bytes(n_rows), f"activation {link.name}")
        return self._activations[key]

    def _over(self, curve: Transfer, n_bytes: int, what: str) -> int:
        if not curve.points:
            self._ledger.note(what, "latency + bytes / rate", f"{curve.key}.latency_us", f"{curve.key}.bytes_per_s")
            return self._copied(curve, n_bytes)
        first, last = curve.points[0][0], curve.points[-1][0]
        inside = first <= n_bytes <= last
        if not inside and not self.extrapolate:
            raise HardwareError(
                f"{self.hardware.path}: {curve.key}: expected copies of {first}..{last} bytes, as measured, got {n_bytes}; "
                "measure it or set extrapolate: true"
            )
        self._ledger.note(what if inside else f"{what} outside its range",
                          "points" if inside else "points, extrapolated", f"{curve.key}.points")  # fmt: skip
        return self._copied(curve, n_bytes)

    def _copied(self, curve: Transfer, n_bytes: int) -> int:
        return within_a_day(copy_ns(curve, n_bytes), f"{self.hardware.path}: {curve.key} ({n_bytes} bytes)")

    # ---- curves and rooflines

    def _roofline(self, device: Device, part: str, mixer: Mixer | None = None) -> Roofline:
        key = (device.name, part, attention_of(self.model, mixer))
        if key not in self._rooflines:
            self._note_rates(device, part, part)
            chain = device.operation_us * self._operations(device, part, mixer) if device.operations else None
            self._rooflines[key] = Roofline(device, device.launches.get(part, 1), self._place(device, part), chain)
        return self._rooflines[key]

    def _note_rates(self, device: Device, cost: str, *parts: str) -> None:
        """Note the numbers of a roofline of some parts together; refuse that of a disk."""
        if device.role == "storage":
            raise HardwareError(
                f"{self.hardware.path}: {device.name} is a disk and computes nothing (asked for its {cost}); choose a policy "
                "that runs all experts where the dense part runs"
            )
        names = ("memory_bytes_per_s", "flops", "launch_us", *(f"launches.{part}" for part in parts), "operation_us")
        self._ledger.note(f"{cost} @{device.name}", "roofline", *(f"devices.{device.name}.{name}" for name in names))

    def _operations(self, device: Device, part: str, mixer: Mixer | None = None) -> int:
        """Count the operations of a part by the engine of a device; "experts" are all of a layer."""
        return operations(device.operations, device.kind, self.model, mixer).get(part, int(part == "predict"))

    def _place(self, device: Device, part: str) -> str:
        return f"{self.hardware.path}: devices.{device.name} ({part} of {self.model.name})"

    def _part_curves(self, device: str, part: str) -> list[CostCurve]:
        curves = self._curves.get((device, part))
        if curves is None:
            found = self.hardware.devices[device]
            curves = self._curves[device, part] = part_curves(self.model, found, part)
            if not curves:
                self._unfitting.part(found, part)
        return curves

    def _part_ns(self, device: str, part: str, n_rows: int, n_bytes: int, operations: int) -> int:
        key = (part, device, n_rows, n_bytes)
        ns = self._parts.get(key)
        if ns is None:
            found = self.hardware.devices[device]
            if n_rows == 0:
                ns = 0
            elif curves := self._part_curves(device, part):
                ns = self._from_curves(found, part, curves, n_rows, f"{part} curve for {self.model.name}")
            else:
                ns = self._roofline(found, part).ns(n_bytes, operations)
            self._parts[key] = ns
        return ns

    def _from_curves(self, device: Device, part: str, curves: list[CostCurve], n_rows: int, what: str) -> int:
        if n_rows == 0:
            return 0
        cost = f"{part} @{device.name}"
        curve = next((curve for curve in curves if covers(curve, n_rows)), None)
        if curve is None:
            if not self.extrapolate:
                chunks = ", split prompts with workload.prefill_chunk," if n_rows > max(curve.last for curve in curves) else ""
                raise HardwareError(
                    f"{self.hardware.path} has no {what} on {device.name} at {n_rows} tokens "
                    f"(measured {range_text(curves)}); measure it{chunks} or set extrapolate: true"
                )
            curve = nearest(curves, n_rows)
            cost += " outside its range"
        names = ("base_us", "per_token_us", "flat_us", "knee_tokens", "points")
        form = curve.form if covers(curve, n_rows) else f"{curve.form}, extrapolated"
        self._ledger.note(cost, form, *(f"{curve.key}.{name}" for name in names))
        return within_a_day(curve_ns(curve, n_rows), f"{self.hardware.path}: {curve.key} ({what} at {n_rows} rows)")

    # ---- experts

    def at_bits(self, bits: float | None) -> CostModel:
        """Return the costs with experts of fewer bits; what they use counts as used here too."""
        if bits is None or bits == self.model.expert_bits:
            return self
        if bits not in self._narrower:
            model = replace(self.model, expert_bits=bits, low_bits=(), expert_bytes_by_layer=None)
            other = CostModel(
                model, self.hardware, transfer=self.transfer, chunk_bytes=self.chunk_bytes, syncs=self.syncs,
                extrapolate=self.extrapolate,
            )  # fmt: skip
            other._ledger = self._ledger.of(f"{bits:g} bits")
            self._narrower[bits] = other
        return self._narrower[bits]

    def expert_ns(self, device: str, n_rows: int) -> int:
        """Time of one routed expert for some rows, ns.

        Raises `HardwareError` for rows outside the range of the profile's curve for this shape.
        """
        known = self._expert[device]
        if n_rows not in known:
            known[n_rows] = self._compute_expert(self.hardware.devices[device], n_rows)
        return known[n_rows]

    def expert_table(self, device: str, max_rows: int) -> list[int]:
        """Times of one expert for 0 to at least ``max_rows`` rows, ns, in a list not to be changed."""
        table = self._tables[device]
        for n_rows in range(len(table), max_rows + 1):
            table.append(self.expert_ns(device, n_rows))
        return table

    def first_extra_ns(self, device: str) -> int:
        """Extra time of the first expert of a group on a device."""
        key = ("first", device)
        if key not in self._memo:
            found = self.hardware.devices[device]
            extra, where = found.first_extra_us, f"devices.{device}.first_extra_us"
            for curve in expert_curves(self.model, found):
                if curve.first_extra_us is not None:
                    extra, where = curve.first_extra_us, f"{curve.key}.first_extra_us"
                    break
            if extra is None and found.operations:
                extra, where = found.operation_us * self._operations(found, "experts"), f"devices.{device}.operation_us"
            self._memo[key] = round((extra or 0) * 1000) + round(found.wake_us * 1000)
            if extra is not None:
                self._ledger.note(f"first extra @{device}", "constant", where)
            if found.wake_us:
                self._ledger.note(f"wake-up @{device}", "constant", f"devices.{device}.wake_us")
        return self._memo[key]

    def more_rows_table(self, device: str) -> list[int]:
        """Extra times of a group of experts with 0, 1, 2, ... rows, ns; with more rows, the last; empty: none."""
        if device not in self._more_rows:
            points = self.hardware.devices[device].more_rows
            if points:
                self._ledger.note(f"more rows @{device}", "points", f"devices.{device}.more_rows")
            last = points[-1][0] if points else -1
            self._more_rows[device] = [points_ns(points, max(n, points[0][0])) if n > 1 else 0 for n in range(last + 1)]
        return self._more_rows[device]

    def _compute_expert(self, device: Device, n_rows: int) -> int:
        if n_rows < 0:
            raise ValueError(f"n_rows: expected at least 0, got {n_rows}")
        model, curves = self.model, expert_curves(self.model, device)
        if not curves:
            self._unfitting.expert(device)
            by_layer = model.expert_bytes_by_layer
            n_bytes = model.expert_bytes(0) if by_layer is None else ceil_div(sum(by_layer), len(by_layer))
            if device.expert_cost is not None:
                return self._linear(device, device.expert_cost, n_bytes, n_rows)
            return self._roofline(device, "expert").ns(n_bytes, 2 * n_rows * model.expert_params)
        what = f"expert curve for {model.hidden}x{model.expert_intermediate} {model.expert_bits:g}-bit"
        return self._from_curves(device, "expert", curves, n_rows, what)

    def _linear(self, device: Device, cost: ExpertCost, n_bytes: int, n_rows: int) -> int:
        if n_rows == 0:
            return 0
        key = f"devices.{device.name}"
        names = {"expert_cost.per_expert_us", "expert_cost.read_bytes_per_s"}
        operations = 2 * self.model.expert_params
        if operations > cost.reading_s(n_bytes) * device.flops:  # unpacking takes longer than reading
            names |= {"flops"}
        names |= {"expert_cost.per_row_us", "expert_cost.few_row_flops"} if n_rows > 1 else set()
        form = "linear in rows"
        if cost.read_rates:
            names |= {f"expert_cost.read_rates.{i}.bytes_per_s" for i in cost.points_of(n_bytes)}
            form += self._beyond_points(device, cost, n_bytes)
        elif f"{key}.expert_cost.read_bytes_per_s" not in self.hardware.numbers:
            names |= {"memory_bytes_per_s", "expert_cost.read_share"}
        if cost.crossover_rows and n_rows > cost.crossover_rows:
            names |= {"expert_cost.many_row_flops", "expert_cost.crossover_rows"}
        self._ledger.add(f"expert @{device.name}", form, *(f"{key}.{name}" for name in sorted(names)))
        return within_a_day(linear_ns(cost, n_bytes, operations, n_rows, device.flops), self._place(device, "expert"))

    def _beyond_points(self, device: Device, cost: ExpertCost, n_bytes: int) -> str:
        """Note a size outside the points of a device's read rate; return what the form is called then besides."""
        first, last = cost.read_rates[0][0], cost.read_rates[-1][0]
        if first <= n_bytes <= last:
            return ""
        near = format_bytes(first if n_bytes < first else last)
        self._outside[f"experts of {format_bytes(n_bytes)} read on {device.name} at the rate of {near} (extrapolated)"] = None
        return ", extrapolated"

    def operation_ns(self, operation: str) -> int:
        """Time of one of the host's operations; 0 where the profile does not have it."""
        if operation not in OPERATIONS:
            raise HardwareError(f"Work: {unknown_name('operation', operation, OPERATIONS)}")
        us = self.hardware.host_us.get(operation)
        if us:
            self._ledger.note(f"host {operation}", "constant", f"host_us.{operation}")
        return round((us or 0) * 1000)

    def layer_host_ns(self, device: str) -> int:
        """Time of the host in each layer before a decision, while a GPU that runs the router waits."""
        if self.hardware.devices[device].kind != "gpu":
            return 0
        return sum(self.operation_ns(one) for one in self.each_layer)

    def host_expert_ns(self) -> int:
        """Time of the submitting thread for each expert."""
        if self.hardware.host_expert_us:
            self._ledger.note("submission", "constant", "host_expert_us")
        return round(self.hardware.host_expert_us * 1000)

    def host_shared(self) -> bool:
        """Whether the thread that submits experts also computes the host's."""
        if self.hardware.host_shared:
            self._ledger.note("host thread", "switch", "host_shared")
        return self.hardware.host_shared

    # ---- everything else on a device

    def attention_ns(self, device: str, n_rows: int, work2: int, n_requests: int | None = None, layer: int = 0) -> int:
        """Time of a layer's attention for a micro-batch's rows, ns, with the dense parts around it.

        ``work2`` is the sum over its sequences of n (2 context + n), twice the pairs of a query and a key under a causal mask.
        Rows of one of the ``n_requests`` sequences share a reading of its keys and values; without it every row reads its own:
        right for decode, an upper bound for prefill. Bytes: weights, and the visible keys and values. Operations: 2 params n,
        and 2 a pair for each element of a key and of a value. With a curve ``attention`` (by rows), keys and values are added:
        by the curve ``context`` (by tokens read) if there is one, else by the memory's rate, and never less than the operations
        take.
        """
        if n_rows == 0:
            return 0
        key = (device, n_rows, work2, n_requests, self._alike[layer])
        ns = self._attention.get(key)
        if ns is None:
            if len(self._attention) > _REMEMBERED:
                self._attention.clear()
            ns = sum(self._block_ns(device, block, n_rows, work2, n_requests) for block in self.model.groups[layer])
            self._attention[key] = ns
        return ns

    def _block_ns(self, device: str, block: Block, n_rows: int, work2: int, n_requests: int | None) -> int:
        found = self.hardware.devices[device]
        ns = self._roofline(found, "leading").ns(block.dense_bytes, 2 * n_rows * block.dense) if block.dense else 0
        if block.mixer is None:
            return ns
        roofline = self._roofline(found, "attention", block.mixer)
        seen2, n_bytes, operations = self._kept(block.mixer, n_rows, work2, n_requests)
        if self._part_curves(device, "attention"):
            computing = ceil_div(operations * NS_PER_S, roofline.flops)
            if self._part_curves(device, "context"):
                context = self._part_ns(device, "context", ceil_div(seen2, 2), 0, 0)
            else:
                context = ceil_div(n_bytes * NS_PER_S, roofline.rate)
            both = self._part_ns(device, "attention", n_rows, 0, 0) + max(context, computing)
            return ns + within_a_day(both, roofline.place)
        ns += roofline.ns(block.mixer_bytes + n_bytes, 2 * block.mixer.params * n_rows + operations)
        return ns + self._left_to_host_ns(device, block.mixer)

    def _kept(self, mixer: Mixer, n_rows: int, work2: int, n_requests: int | None) -> tuple[int, int, int]:
        """Return twice the rows that are read of a mixer, bytes read with its state's, operations."""
        seen2, n_bytes, operations = 0, 0, mixer.operations * n_rows
        if mixer.state_bytes:  # read and written once
            n_bytes += 2 * mixer.state_bytes * (n_rows if n_requests is None else n_requests)
        for store in mixer.stores:
            rows2, pairs2 = store.pairs2(n_rows, work2, n_requests)
            seen2 += rows2
            n_bytes += ceil_div(bits_to_bytes(store.numbers, self.model.kv_bits) * rows2, 2)
            operations += store.operations * pairs2 // 2
        return seen2, n_bytes, operations

    def core_ns(self, device: str, n_rows: int, work2: int, n_requests: int, layer: int = 0) -> int:
        """Time of what reads the KV cache in one layer's attention; arguments as of `attention_ns`."""
        ns = 0
        for mixer in (block.mixer for block in self.model.groups[layer] if block.mixer):
            roofline = self._roofline(self.hardware.devices[device], "attention", mixer)
            seen2, n_bytes, operations = self._kept(mixer, n_rows, work2, n_requests)
            if self._part_curves(device, "context"):
                computing = ceil_div(operations * NS_PER_S, roofline.flops)
                ns += within_a_day(max(self._part_ns(device, "context", ceil_div(seen2, 2), 0, 0), computing), roofline.place)
            else:
                ns += roofline.ns(n_bytes, operations)
        return ns

    def _left_to_host_ns(self, device: str, mixer: Mixer) -> int:
        """Extra time of latent attention where the engine leaves it to the host."""
        found = self.hardware.devices[device]
        if not mixer.kind.startswith("latent") or not found.latent_attention_us:
            return 0
        self._ledger.note(f"latent attention @{device}", "constant", f"devices.{device}.latent_attention_us")
        return round(found.latent_attention_us * 1000)

    def dense_ns(self, device: str, n_rows: int, layer: int = 0) -> int:
        """Time of the rest of a layer's dense part: norms, router, and its result reaching the host."""
        key = ("dense", device, n_rows, self._alike[layer])
        if key not in self._memo:
            model, found = self.model, self.hardware.devices[device]
            roofline = (model.part_bytes("dense", layer), 2 * n_rows * model.around_params(layer))
            ns = self._part_ns(device, "dense", n_rows, *roofline)
            if found.router_us and n_rows:
                ns += round(found.router_us * 1000)
                self._ledger.note(f"router @{device}", "constant", f"devices.{device}.router_us")
            self._memo[key] = ns
        return self._memo[key]

    def shared_ns(self, device: str, n_rows: int, layer: int = 0) -> int:
        """Time of all shared experts of a layer; 0 if the model has none."""
        operations = 2 * n_rows * self.model.shared_params
        return self._part_ns(device, "shared", n_rows, self._shared[layer], operations) if operations else 0

    def embedding_ns(self, device: str, n_rows: int) -> int:
        """Time to look up rows' embeddings, read and written once."""
        n_bytes = 2 * bits_to_bytes(n_rows * self.model.hidden, self.model.other_bits)
        return self._part_ns(device, "embedding", n_rows, n_bytes, 0)

    def leading_ns(self, device: str, n_rows: int, work2: int, n_requests: int | None = None) -> int:
        """Time of all leading dense layers together, attention included; see `attention_ns`."""
        if not n_rows:
            return 0
        ns = 0
        for block in self.model.leading:
            each = self._part_ns(device, "leading", n_rows, block.dense_bytes, 2 * n_rows * block.dense)
            ns += each + self._block_ns(device, replace(block, dense=0), n_rows, work2, n_requests)
        return ns

    def head_ns(self, device: str, n_sequences: int) -> int:
        """Time of the last norm, the LM head and the host's fixed work a step."""
        model, found = self.model, self.hardware.devices[device]
        ns = self._part_ns(device, "head", n_sequences, model.head_bytes, 2 * n_sequences * model.head_params)
        if found.token_us and n_sequences:
            ns += round(found.token_us * 1000)
            self._ledger.note(f"step @{device}", "constant", f"devices.{device}.token_us")
        return ns

    def draft_ns(self, device: str, n_sequences: int, work2: int) -> int:
        """Time of one draft of some sequences by a head of the model: its last layer once more, and the LM head.

        Each sequence runs experts of its own, all on the device.
        """
        last, model = self.model.n_layers - 1, self.model
        experts = n_sequences * model.top_k * self.expert_ns(device, 1)
        mixing = self.attention_ns(device, n_sequences, work2, n_sequences, last) + self.dense_ns(device, n_sequences, last)
        head = self._part_ns(device, "head", n_sequences, model.head_bytes, 2 * n_sequences * model.head_params)
        return mixing + self.shared_ns(device, n_sequences, last) + experts + head

    def predict_ns(self, device: str, n_rows: int, source: str) -> int:
        """Time of a prediction about one layer, ns; ``source``: a predictor, also as ``signal:...``.

        `FREE_PREDICTORS` (by prefix) cost nothing; a name with a ``predict`` curve of the device (longest prefix) costs that;
        ``shadow-int8`` and the like cost one layer of the model at that precision, with all its activated experts; anything
        else one product with a router.
        """
        source = source.removeprefix("signal:")
        key = ("predict", device, n_rows, source)
        if key not in self._memo:
            self._memo[key] = self._compute_predict(self.hardware.devices[device], n_rows, source)
        return self._memo[key]

    def _compute_predict(self, device: Device, n_rows: int, source: str) -> int:
        if n_rows == 0 or source.startswith(FREE_PREDICTORS):
            return 0
        fits = [name for name in device.predict if source.startswith(name)]
        if fits:
            curve = device.predict[max(fits, key=len)]
            return self._from_curves(device, f"predict {source}", [curve], n_rows, f"predictor curve '{source}'")
        model = self.model
        if source.startswith("shadow"):
            name = source.removeprefix("shadow").removeprefix("-").split(":")[0]
            bits = SHADOW_BITS.get(name, model.other_bits)
            active = min(model.n_experts, n_rows * model.top_k)
            fixed = model.attention_params + model.dense_params + model.shared_params
            n_bytes = bits_to_bytes(fixed + active * model.expert_params, bits)
            operations = 2 * n_rows * (fixed + model.top_k * model.expert_params)
            return self._shadow_roofline(device, active).ns(n_bytes, operations)
        params = model.n_experts * model.hidden
        return self._roofline(device, "predict").ns(bits_to_bytes(params, model.other_bits), 2 * n_rows * params)

    def _shadow_roofline(self, device: Device, active: int) -> Roofline:
        """One whole layer: the launches of all its parts, and of each activated expert."""
        parts = ("attention", "dense", "shared") if self.model.shared_params else ("attention", "dense")
        self._note_rates(device, "predict shadow", *parts, "expert")
        if device.operations:
            chain = device.operation_us * sum(self._operations(device, part) for part in (*parts, "experts"))
            return Roofline(device, 0, self._place(device, "shadow"), chain)
        launches = sum(device.launches.get(part, 1) for part in parts)
        return Roofline(device, launches + active * device.launches.get("expert", 1), self._place(device, "shadow"))

    # ---- provenance

    def labels(self, activities: Collection[str] | None = None) -> tuple[str, ...]:
        """Distinct source labels of all numbers used so far, strongest first, contention included.

        With ``activities`` (`moesim.records.activities`), a pair of contention counts only if both of its activities are among
        them; else every pair whose lanes may have been used.
        """
        return self._ledger.labels(activities)

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Intervals of the numbers used so far, by dotted key."""
        return self._ledger.intervals()

    def notes(self) -> list[str]:
        """Name curves of the profile that do not fit the model, sizes beyond points, and operations that are not known."""
        narrower = [note for costs in self._narrower.values() for note in costs.notes()]
        counted = any(self.hardware.devices[key[0]].operations for key in self._rooflines if key[1] == "attention")
        kinds = [kind.replace(",", "") for kind in uncounted(self.model)] if counted else []
        guessed = [f"operations of {' + '.join(kinds)} counted as of grouped or latent attention"] if kinds else []
        return [*self._unfitting.notes(self.hardware.name), *self._outside, *narrower, *guessed]

    def label(self, activities: Collection[str] | None = None) -> str:
        return weakest(self.labels(activities))

    def provenance(self) -> dict[str, dict[str, Any]]:
        """Origin of each cost used so far: form, weakest label ``source``, ``ref``, and ``numbers``."""
        return self._ledger.provenance()
