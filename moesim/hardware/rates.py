"""From the parts of a machine to its rates: the whole form of a profile, each number with its rule and range.

The rules are data, ``parts/rules.csv``: a value, and the factors between which nine of ten machines lie. In the profile a rule's
number is `derived`; `assumed` where the rule rests on no measurement, or a part that it is of was not given.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from moesim.core.units import parse_rate
from moesim.errors import HardwareError, unknown_name
from moesim.hardware.assembly import KEYS, RATIO, Assembly
from moesim.hardware.parts import FOLDER, RATE, Cpu, Gpu
from moesim.hardware.schema import LANE

BY_RULES: Final = "from catalogue and rules; nothing was measured."
"""Ends the description of a machine from its parts."""
_GIB: Final = 2**30
_FIRST_BLOCKED: Final = 32  # rows from which an expert's products are of blocks
_UNSURE: Final = 1.3  # the lower end goes down by this, where modules are not given: one may be alone
_SLOTS_UNSURE: Final = 2.0  # and the lower end of a link, where its slot is not given


@dataclass(frozen=True)
class Rule:
    """A row of ``parts/rules.csv``."""

    value: float
    unit: str
    least: float
    most: float
    cap_GBps: float
    cap_of: str
    cap_MTps: float
    measured: bool
    source: str

    def number(self, value: float, how: str, sure: bool = True, low: float = 1.0, high: float = 1.0) -> dict[str, Any]:
        """Return a number that this rule gives, with its range; ``low`` and ``high`` widen it."""
        return made(value, f"{how} ({self.source})", (self.least / low, self.most * high), sure and self.measured)


@lru_cache
def _rules() -> dict[tuple[str, str], Rule]:
    rows = csv.DictReader(FOLDER.joinpath("rules.csv").read_text(encoding="utf-8").splitlines())
    return {(row["what"], row["of"]): _rule(row) for row in rows}


def _rule(row: Mapping[str, str]) -> Rule:
    value, least, most = (float(row[key] or 1) for key in ("value", "least", "most"))
    cap, slower = (float(row[key] or 0) for key in ("cap_GBps", "cap_MTps"))
    return Rule(value, row["unit"], least, most, cap, row["cap_of"], slower, row["kind"] != "assumed", row["source"])


def made(value: float, how: str, factors: tuple[float, float], sure: bool = True) -> dict[str, Any]:
    """Return a number of a profile whose range is from one factor to the other."""
    ends = [float(f"{value * factor:.4g}") for factor in factors]
    return {
        "value": float(f"{value:.4g}"),
        "source": "derived" if sure else "assumed",
        "how" if sure else "why": how,
        "interval": ends,
    }


def _size(range_gib: Iterable[float], how: str, sure: bool) -> dict[str, Any]:
    """Return a memory; the range is the value in GiB, least and most."""
    gib, least, most = range_gib
    found = made(1, how, (1, 1), sure)
    return found | {"value": round(gib * _GIB), "interval": [round(least * _GIB), round(max(gib, most) * _GIB)]}


def cpu_read(machine: Assembly) -> dict[str, Any]:
    """Return the rate at which all cores read memory: filled channels, and what dies or cores can take."""
    cpu, ram, rule = machine.cpu, machine.ram, _rules()["cpu memory", machine.cpu.platform]
    if machine.cpu_rate:
        return made(machine.cpu_rate, "typed in, taken as what all cores read", (0.9, 1.1), sure=False)
    rate, how = ram.GBps * rule.value, f"{ram.words} = {ram.GBps:.4g} GB/s x {rule.value:g}"
    n = {"die": cpu.compute_dies or 1, "core": cpu.cores}.get(rule.cap_of, 1) * machine.sockets
    cap = rule.cap_GBps * (min(1.0, ram.MTps / rule.cap_MTps) if rule.cap_MTps else 1.0)
    if cap and n * cap < rate:
        rate, how = n * cap, f"{n} x {cap:.4g} GB/s of a {rule.cap_of}, less than {how}"
    two, low, high = _rules()["sockets", "two"], 1.0 if ram.known else _UNSURE, 1.0
    if machine.sockets > 1:
        rate, how = rate * two.value / machine.sockets, f"{how}; two sockets: {two.value:g} times one ({two.source})"
        low, high = low / two.least, two.most
    return rule.number(rate * 1e9, how, ram.known, low, high)


def clock_GHz(cpu: Cpu) -> tuple[float, str]:
    """Return the clock of all cores together, and how it follows from base and boost."""
    base, boost = cpu.base_GHz or 0.5 * cpu.boost_GHz, cpu.boost_GHz
    if share := {"server": 0.6, "laptop": 0.4, "one chip": 1.0}.get(cpu.form):
        return base + share * (boost - base), f"base + {share:g} x (boost - base)"
    less = 0.4 if cpu.vendor == "AMD" else 0.5
    return max(base, boost - less), f"boost - {less:g}"


def cpu_flops(machine: Assembly, rows: str) -> dict[str, Any]:
    """Return the operations a second of all cores in products of quantised weights with ``few`` or ``many`` rows."""
    cpu, rule, (clock, words) = machine.cpu, _rules()["cpu rows", rows], clock_GHz(machine.cpu)
    cores = (cpu.cores_performance + cpu.cores_efficient / 2) * machine.sockets
    share = _rules()["cpu instructions", cpu.isa].value
    how = f"{cores:g} cores x {clock:.3g} GHz ({words}) x {rule.value:g} operations a clock x {share:g} of {cpu.isa}"
    return rule.number(cores * clock * 1e9 * rule.value * share, how, machine.cpu_known)


def _left(machine: Assembly) -> tuple[float, float, float]:
    """Return the memory that the system leaves, in GiB, with its range."""
    keeps = _rules()["system", machine.system]
    value, least, most = (machine.ram.gib - min(machine.ram.gib / 4, keeps.value * x) for x in (1, keeps.most, keeps.least))
    return value, least, most


def gpu_numbers(machine: Assembly, gpu: Gpu) -> dict[str, Any]:
    """Return the memory, memory rate and matrix rate of a GPU."""
    sheet, ram = f"{gpu.name}: {gpu.kind}, {gpu.source}", machine.ram
    found: dict[str, Any] = {"kind": "gpu"}
    if gpu.unified:
        rule, most = _rules()["one memory", machine.system], _left(machine)[0]
        ends = (min(most, ram.gib * rule.value * factor) for factor in (1, rule.least, rule.most))
        found |= {"memory_of": "cpu0", "memory_bytes": _size(ends, f"{ram.gib:g} GiB x {rule.value:g}: {rule.source}", False)}
    else:
        rule = _rules()["desktop", machine.system]
        ends = (gpu.vram_GiB - rule.value * factor for factor in (1, rule.most, rule.least))
        found["memory_bytes"] = _size(ends, f"{gpu.vram_GiB:g} GiB ({sheet}) less {rule.value:g} GiB: {rule.source}", True)
    kept = "1 GiB" if gpu.unified or gpu.vram_GiB > 2 else "512 MiB"
    found["workspace_bytes"] = {"value": kept, "source": "assumed", "why": "the driver's context and libraries' workspaces"}
    if not gpu.platform:
        rate = made(gpu.memory_bandwidth_GBps * 1e9, "typed in, taken as what a stream reaches", (0.85, 1), sure=False)
        flops = made(
            gpu.fp16_dense_TFLOPs * 1e12, f"{RATIO} operations a byte read, as the GPU is not named", (0.3, 2.5), sure=False
        )
        return found | {"memory_bytes_per_s": rate, "flops": flops}
    memory, matrix = (_rules()[what, gpu.platform] for what in ("gpu memory", "gpu matrix"))
    GBps, of = (ram.GBps, ram.words) if gpu.platform == "integrated GPU" else (gpu.memory_bandwidth_GBps, sheet)
    plain = not gpu.fp16_dense_TFLOPs or gpu.platform == "NVIDIA before Volta"
    TFLOPs, kind = (gpu.fp32_TFLOPs, "fp32") if plain else (gpu.fp16_dense_TFLOPs, f"dense fp16, {gpu.matrix_rate_basis}")
    rate = memory.number(GBps * memory.value * 1e9, f"{GBps:.4g} GB/s ({of}) x {memory.value:g}")
    flops = matrix.number(TFLOPs * matrix.value * 1e12, f"{TFLOPs:g} TFLOP/s ({gpu.name}: {kind}) x {matrix.value:g}")
    return found | {"memory_bytes_per_s": rate, "flops": flops}


def cpu_numbers(machine: Assembly) -> dict[str, Any]:
    """Return the memory and rates of the processor."""
    few, share, keeps = cpu_flops(machine, "few"), _rules()["cpu experts", "any"], _rules()["system", machine.system]
    how = f"{machine.ram.gib:g} GiB less {keeps.value:g} GiB: {keeps.source}"
    used, words, low, high = share.value, "of the memory's rate", 1.0, 1.0
    if machine.sockets > 1:
        two, decode = _rules()["sockets", "two"], _rules()["sockets", "two in decode"]
        used, low, high = float(f"{share.value * decode.value / two.value:.4g}"), 1 / decode.least, decode.most
        words = f"of the memory's rate; in decode two sockets are {decode.value:g} times one: {decode.source}"
    blocked = "512 rows of 8 experts over 128 experts, a prompt as rates with many rows are from"
    return {
        "kind": "cpu", "memory_bytes": _size(_left(machine), how, "ram" in machine.parts),
        "memory_bytes_per_s": cpu_read(machine), "flops": few,
        "expert_cost": {
            "read_share": share.number(used, words, True, low, high),
            "few_row_flops": few, "many_row_flops": cpu_flops(machine, "many"),
            "crossover_rows": {"value": _FIRST_BLOCKED, "source": "derived", "how": blocked},
        },
    }  # fmt: skip


_SLOT: Final = re.compile(r"(?:pci-?e?|gen)?\s*([1-5])(?:\.0)?\s*x?\s*(16|8|4|2|1)\b|()\bx\s*(16|8|4|2|1)\b")
_OLD_BOARDS: Final = re.compile(r"\b[ab]3[25]0\b|\b[bx]4[57]0\b|\bx370\b")  # PCIe 3 with any processor


def link_of(machine: Assembly, gpu: Gpu) -> tuple[dict[str, Any], str]:
    """Return the rate of copies to a GPU, and the link in words: the least of card, processor and slot."""
    text, cpu = machine.pcie, machine.cpu
    if gpu.unified:
        rule = _rules()["link", "one memory"]
        rate = gpu_numbers(machine, gpu)["memory_bytes_per_s"]["value"] * rule.value
        return rule.number(rate, f"a copy within the memory, {rule.value:g} of what the GPU reads"), "one memory"
    if RATE.fullmatch(text):
        rate = parse_rate(re.sub(r"([kmgt])(i?)b/s", lambda x: f"{x[1].upper()}{x[2]}B/s", text), f"{machine.place}: parts.pcie")
        return made(rate, "typed in", (0.95, 1.05), sure=False), text
    own = "nvlink-c2c" if not gpu.pcie_gen and gpu.platform == "NVIDIA HBM" else re.sub(r"[^a-z0-9-]", "", text)
    text = re.sub(r"^(?:pci-?e?|gen) ?([1-5])(?:\.0)?$", r"\1x16", text)  # a generation alone
    names = (of for (what, of), rule in _rules().items() if what == "link" and rule.unit == "GB/s")
    named = next((of for of in names if of.replace(" ", "") == own), None)
    if named is not None:
        rule = _rules()["link", named]
        return rule.number(rule.value * 1e9, named), named
    slot = _SLOT.search(text)
    if text and not slot and not _OLD_BOARDS.search(text):
        got = f"expected a link such as 4x16, 'PCIe 3 x8', B450 or OCuLink, got '{text}'; correct it"
        raise HardwareError(f"{machine.place}: parts.pcie: {got}")
    lanes = [
        gpu.pcie_lanes or 16,
        int(slot[2] or slot[4]) if slot else 16,
        16 if cpu.pcie_lanes >= 16 else 8 if cpu.pcie_lanes >= 8 else 4,
    ]
    gens = [
        gpu.pcie_gen or 4,
        int(slot[1]) if slot and slot[1] else 3 if text and not slot else 5,
        cpu.pcie_gen if machine.cpu_known else 5,
    ]
    if not slot and cpu.pcie_lanes < 16 * len(machine.gpus) and len(machine.gpus) > 1:
        lanes.append(8 if len(machine.gpus) == 2 else 4)
    gen, n = min(gens), min(lanes)
    words = f"PCIe {gen}.0 x{n}"
    if not slot or (gen, n) != (int(slot[1] or gen), int(slot[2] or slot[4])):
        machine.assumed.append(f"link: {words}, what card, processor{' and slot' if text else ''} allow")
    rule, nominal = _rules()["link", f"pcie {gen}"], float(LANE[gen] * n) / 1e9
    card = _rules()["link", "radeon"].value if gpu.vendor == "AMD" else 1.0
    how = f"{words} = {nominal:.4g} GB/s x {rule.value:g}" + (f" x {card:g} (Radeon)" if card != 1 else "")
    return rule.number(
        nominal * rule.value * card * 1e9, how, bool(slot) or machine.cpu_known, 1 if slot else _SLOTS_UNSURE
    ), words


def _links(machine: Assembly) -> tuple[dict[str, Any], list[str]]:
    """Return the links of GPUs and drive, and those of GPUs in words."""
    start = _rules()["copy", "windows" if machine.slow_copies else machine.system]
    found, words = dict[str, Any](), list[str]()
    for i, gpu in enumerate(machine.gpus):
        rate, name = link_of(machine, gpu)
        copy = {"latency_us": start.number(start.value, "a copy that is waited for"), "bytes_per_s": rate}
        found |= {f"cpu0->gpu{i}": {"pinned": copy}, f"gpu{i}->cpu0": {"pinned": dict(copy)}}
        words.append(name)
    if machine.disk:
        text, kinds = (
            re.sub(r"[^a-z0-9]|pcie|gen|ssd", "", machine.disk) or "sata",
            [of for what, of in _rules() if what == "disk"],
        )
        if text not in kinds:
            raise HardwareError(f"{machine.place}: parts.disk: {unknown_name('kind of disk', machine.disk, kinds)}")
        rule = _rules()["disk", text]
        rate = rule.number(rule.value * 1e9, f"{text}, reads of an expert's size at depth 8")
        copy = {"latency_us": {"value": 100, "source": "assumed", "why": "one read of a drive"}, "bytes_per_s": rate}
        found |= {name: {"any": copy, "medium": "disk0"} for name in ("disk0->cpu0", "cpu0->disk0")}
    return found, words


def _contention(machine: Assembly, devices: Mapping[str, Any], links: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what CPU experts lose to a copy, or to the GPU of one memory: together they read what the memory gives."""
    read = devices["cpu0"]["memory_bytes_per_s"]["value"]
    if machine.one_memory:
        gpu = devices["gpu0"]["memory_bytes_per_s"]["value"]
        both = max(read, gpu) / (read + gpu)
        share = made(both, "what the faster one reads alone, over what both do", (1, min(1.08, 1 / both)))
        yield from ({"a": "cpu0.experts", "b": f"gpu0.{what}", "a_rate": share, "b_rate": share} for what in ("experts", "dense"))
        return
    cost, rule = devices["cpu0"].get("expert_cost") or {}, _rules()["contention", "any"]
    experts = (
        cost["read_bytes_per_s"]["value"] if "read_bytes_per_s" in cost else read * cost.get("read_share", {"value": 1})["value"]
    )
    for i, _ in enumerate(machine.gpus):
        link = links[f"cpu0->gpu{i}"].get("pinned", {}).get("bytes_per_s", {}).get("value")
        if link is None:  # measured points
            continue
        share = rule.value * read / (experts + link)
        how = f"{rule.value:g} x {read / 1e9:.4g} GB/s that the cores read / ({experts / 1e9:.4g} + {link / 1e9:.4g} GB/s)"
        number = rule.number(share, how)
        number |= {"value": min(1.0, number["value"]), "interval": [min(1.0, end) for end in number["interval"]]}
        yield {"a": "cpu0.experts", "b": f"cpu0->gpu{i}", "a_rate": number, "b_rate": number}


def name_of(parts: Mapping[str, Any]) -> str:
    """Return a name for a machine that has none."""
    texts = [text for key in KEYS for text in ([parts[key]] if isinstance(parts.get(key), str) else parts.get(key) or [])]
    return "+".join(dict.fromkeys(re.sub(r"[^a-z0-9.]+", "-", str(text).lower()).strip("-") for text in texts))


def assembled(
    parts: Any, place: str, change: Callable[[dict[str, Any]], dict[str, Any]] = dict, contends: bool = True
) -> dict[str, Any]:
    """Return the whole form of a machine with these parts; ``change`` replaces numbers before their contention follows."""
    if not isinstance(parts, Mapping):
        raise HardwareError(f"{place}: parts: expected a mapping with {', '.join(KEYS)}, got {parts!r}")
    machine = Assembly(parts, place)
    devices = {f"gpu{i}": gpu_numbers(machine, gpu) for i, gpu in enumerate(machine.gpus)} | {"cpu0": cpu_numbers(machine)}
    if machine.disk:
        devices["disk0"] = {"kind": "disk", "memory_bytes": {"value": "1 TB", "source": "assumed", "why": "not given"}}
    links, words = _links(machine)
    found = change(_head(machine, words) | {"devices": devices, "links": links, "contention": []})
    return found | ({"contention": list(_contention(machine, found["devices"], found["links"]))} if contends else {})


def _head(machine: Assembly, links: Sequence[str]) -> dict[str, Any]:
    """Return what the profile says in words, and what computes."""
    names = [gpu.name for gpu in machine.gpus]
    cpu = f"{machine.cpu_rate / 1e9:g} GB/s" if machine.cpu_rate else machine.cpu.name
    said = {
        "gpu": " + ".join(names), "cpu": f"{machine.sockets} x {cpu}" if machine.sockets > 1 else cpu,
        "memory": "" if machine.cpu_rate else machine.ram.words, "link": ", ".join(dict.fromkeys(links)),
        "threads": str((machine.cpu.cores_performance or machine.cpu.cores_efficient) * machine.sockets),
        "backend": machine.backend, "system": machine.system,
        "compute": min((gpu.compute for gpu in machine.gpus if gpu.compute), key=float, default=""),
        "assumed": "; ".join(dict.fromkeys(machine.assumed)),
    }  # fmt: skip
    return {
        "description": f"{' and '.join([*dict.fromkeys(names), said['cpu']])}, {BY_RULES}",
        "engine": "llama.cpp", "machine": {key: value for key, value in said.items() if value},
        "compute": "gpu0" if machine.gpus else "cpu0", "backing": ["cpu0"],
    }  # fmt: skip
