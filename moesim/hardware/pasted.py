"""Make a machine of what people paste: parts are looked up by the names that programs print, measured rates are taken."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import yaml

from moesim.errors import HardwareError
from moesim.hardware.outputs import SOURCES, Fact, Source, Text
from moesim.hardware.parts import find_cpu, find_gpu

_TEXT: Final = 2**22  # characters
_GIB: Final = 2**30
_SIZES: Final = sorted(n * 2**k for k in range(12) for n in (1, 1.25, 1.5))  # GiB that are built in
_CLOSE: Final = 0.1  # two measurements that differ by more are a contradiction
_SYSTEMS: Final = {
    "wsl2": r"microsoft-standard-WSL2",
    "windows": r"\bWDDM\b|Microsoft Windows|Windows[ -]1[01]|^(?:PS )?[A-Z]:\\.*>|Physical Memory|^ *Card name:",
    "macos": r"\bmacOS\b|Darwin|^ *Chip: Apple|Chipset Model:|ggml_metal",
    "linux": r"^Linux-\d|^ *Model name:|^MemTotal:|^Mem: |^Memory Device|/home/|^[\w.-]{1,40}@[\w.-]{1,60}:[^\s$#]{0,99}[$#]",
}

TRIAD: Final = 4 / 3
"""Bytes that STREAM's Triad moves for each that it counts: without streaming stores a written line is read first."""
COPIES: Final = 0.88 / 0.79
"""Reads against copies inside a GPU, shares of the nominal rates of A10, A100 and H100 (chsasank/device-benchmarks)."""
LEAST_SHARE: Final = 0.7
"""Of a GPU's nominal rate: copies below it are limited by something else than memory; above the nominal one a cache answers."""


class Taken(NamedTuple):
    """A value of the form, and the line that it is from, counted from 1."""

    what: str
    value: str
    line: int
    text: str


@dataclass(frozen=True)
class Pasted:
    """A machine as read from a text."""

    form: dict[str, Any]  # a profile by its parts, and dotted keys with rates that replace what these imply
    taken: list[Taken] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # what no line says, and what would say it
    remarks: list[str] = field(default_factory=list)  # contradictions, and what was read and not used
    sources: list[Source] = field(default_factory=list)  # programs whose outputs were found


def read_pasted(text: str, place: str = "pasted text", given: Mapping[str, Any] | None = None) -> Pasted:
    """Read a machine from outputs of system tools and bandwidth tests in one text; parts that are given win."""
    if len(text) > _TEXT:
        raise HardwareError(
            f"{place}: expected at most {_TEXT} characters, got {len(text)}; leave out what is not of the machine"
        )
    read = Text(text)
    facts = [fact._replace(by=one.name) for one in SOURCES if next(read.find(one.seen), None) for fact in one.read(read)]
    if not facts:
        raise HardwareError(
            f"{place}: expected outputs of {', '.join(one.name for one in SOURCES)}, got {len(read.lines)} other lines; paste one"
        )
    choice = _Choice(read, sorted(facts, key=lambda fact: fact.line), place, given or {})
    choice.take_rates(choice.take_parts())
    return choice.pasted


class _Choice:
    """Chooses between the facts of a text."""

    def __init__(self, text: Text, facts: list[Fact], place: str, given: Mapping[str, Any]) -> None:
        self._text, self._facts, self._place, self._given = text, facts, place, given
        by = {fact.by for fact in facts}
        self._parts = dict(given)
        self._chosen: list[str] = []  # names of GPUs
        self.pasted = Pasted({"parts": self._parts}, sources=[one for one in SOURCES if one.name in by])

    def _of(self, what: str, **where: Any) -> list[Fact]:
        return [
            fact for fact in self._facts if fact.what == what and all(getattr(fact, key) == one for key, one in where.items())
        ]

    def _take(self, what: str, value: str, *facts: Fact) -> None:
        for n in dict.fromkeys(fact.line for fact in facts):
            line = " ".join(self._text.lines[n].split())
            start = max(0, line.find(value) - 30) if len(line) > 90 else 0  # of an object on one line, the place
            self.pasted.taken.append(Taken(what, value, n + 1, line[start : start + 90]))

    def _part(self, what: str, value: str | list[str], *facts: Fact) -> None:
        if what in self._given:
            return
        self._parts[what] = value
        self._take(what, value if isinstance(value, str) else ", ".join(value), *facts)

    def _miss(self, what: str, words: str) -> None:
        if what not in self._given and (said := f"{what}: {words}") not in self.pasted.missing:
            self.pasted.missing.append(said)

    def _contradict(self, what: str, value: str, fact: Fact, first: Fact) -> None:
        said = f"{what}: line {fact.line + 1} ({fact.by}) has {value}; line {first.line + 1} ({first.by}) is taken"
        if said not in self.pasted.remarks:
            self.pasted.remarks.append(said)

    def _sizes(self, fact: Fact) -> list[Fact]:
        return self._of("vram", by=fact.by, which=fact.which) or self._of("vram", which=fact.which)

    def _look_up(self, find: Callable[[str], Any], fact: Fact) -> Any:
        """Return a part of the catalogue; None if it has none; the name that was printed if it is that of several."""
        if fact.value.endswith("..."):  # cut by nvidia-smi: might be another
            return None
        sizes, cores = self._sizes(fact), self._of("cores", by=fact.by, which=fact.which)
        try:
            if fact.what == "cpu" or not (sizes or cores):
                return find(fact.value)
            size = sizes[0].value / _GIB if sizes else None
            texts = [fact.value, *(f"{fact.value} {size:.0f}GB" for size in [size] if size)]
            texts = [*(f"{fact.value} ({one.value})" for one in cores[:1]), *texts]  # of Apple's chips
            part = next((part for text in texts if (part := find_gpu(text, size))), None)
            namesakes = [part, find_gpu(part.twin)] if size and part and part.twin else [part]
            return min(filter(None, namesakes), key=lambda one: abs(one.vram_GiB - (size or 0)), default=None)
        except HardwareError as several:
            self._miss(fact.what, str(several))
            return fact.value

    def take_parts(self) -> list[Any]:
        """Take parts; return the GPUs, those of the first output that names some: others name the same, fewer or more."""
        lists: list[list[Fact]] = []
        for fact in self._of("gpu"):
            if lists and lists[-1][-1].by == fact.by and lists[-1][-1].which < fact.which:
                lists[-1].append(fact)
            else:
                lists.append([fact])
        found, chosen = dict[Fact, Any](), list[Fact]()
        for facts in lists:
            for fact in facts:
                found[fact] = self._look_up(find_gpu, fact)
            known = [fact for fact in facts if found[fact] is not None]
            names, before = (Counter(_name(found[fact]) for fact in one) for one in (known, chosen))
            if names > before:
                chosen = known
            elif not names <= before:
                self._contradict("gpu", ", ".join(names.elements()), known[0], chosen[0])
        unknown = ", ".join(dict.fromkeys(fact.value for fact, part in found.items() if part is None))
        if chosen:
            self._chosen = [] if "gpu" in self._given else [_name(found[fact]) for fact in chosen]
            twins = [getattr(found[fact], "twin", "") and not self._sizes(fact) for fact in chosen]  # the profile says which
            texts = [fact.value if twin else _name(found[fact]) for fact, twin in zip(chosen, twins)]
            self._part("gpu", texts if len(texts) > 1 else texts[0], *chosen)
        else:
            words = f"{unknown} is not in the catalogue" if unknown else "no line names one"
            self._miss("gpu", f"{words}; --gpu names one")
        if chosen and unknown:
            self.pasted.remarks.append(f"gpu: not in the catalogue, and passed over: {unknown}")
        self._take_cpu()
        self._take_memory()
        self._take_link()
        for name, pattern in _SYSTEMS.items():
            if match := next(self._text.find(pattern), None):
                self._part("os", name, Fact("os", name, self._text.line_of(match.end())))
                break
        else:
            self._miss("os", "no line shows the system; --os gives it")
        return [found[fact] for fact in chosen]

    def _take_cpu(self) -> None:
        facts = self._of("cpu")
        known = [(fact, part) for fact in facts if (part := self._look_up(find_cpu, fact)) is not None]
        if not known:
            words = f"{facts[0].value} is not in the catalogue" if facts else "no line names one (lscpu)"
            self._miss("cpu", f"{words}; --cpu names one, or gives its read rate, such as 60GB/s")
            return
        (first, part), sockets = known[0], [fact for fact in self._of("sockets") if fact.value > 1][:1]
        self._part("cpu", f"{sockets[0].value}x {_name(part)}" if sockets else _name(part), first, *sockets)
        for fact, other in known[1:]:
            if _name(other) != _name(part):
                self._contradict("cpu", fact.value, fact, first)

    def _take_memory(self) -> None:
        modules, sizes = self._of("module"), self._of("ram")
        modules = [fact for fact in modules if fact.by == modules[0].by]
        if modules:
            first, total = modules[0].value, sum(fact.value.n_bytes for fact in modules) / _GIB
            speed = min((fact.value.speed for fact in modules if fact.value.speed), default=0)
            alike = all(fact.value[:1] == first[:1] and fact.value.bits >= 64 for fact in modules)  # each is a channel wide
            amount = f"{len(modules)}x{first.n_bytes / _GIB:g}" if alike else f"{total:g}GB"
            kind = "-".join(filter(None, (first.kind.lower(), f"{speed or ''}")))
            self._part("ram", f"{amount} {kind}".strip(), *modules)
            if sizes and not 0.75 < sizes[0].value / _GIB / total < 1.05:
                self._contradict("ram", f"{sizes[0].value / _GIB:.1f} GiB", sizes[0], modules[0])
            return
        if sizes:
            there = sizes[0].value / _GIB
            built_in = next((size for size in _SIZES if there <= size), there)  # the system keeps some of it
            self._part("ram", f"{built_in if there > 0.88 * built_in else round(there):g}GB", sizes[0])
        words = "type, speed and number of modules" if sizes else "how much, and which"
        self._miss("ram", f"{words} (dmidecode -t memory; wmic memorychip); --ram gives them, such as 2x32 ddr4-3200")

    def _take_link(self) -> None:
        gens, widths = self._of("gen", which=0), self._of("width", which=0)
        if not gens or not widths:
            self._miss("pcie", "generation and lanes (nvidia-smi -q); --pcie gives them, such as 4x16")
            return
        least, most = min(fact.value for fact in widths), max(fact.value for fact in widths)
        self._part("pcie", f"{gens[0].value}x{least}", gens[0], next(fact for fact in widths if fact.value == least))
        if least < most:
            self.pasted.remarks.append(f"pcie: {least} of {most} lanes are in use; a GPU at rest may use fewer than at work")

    def take_rates(self, gpus: list[Any]) -> None:
        """Take measured rates."""
        for index in range(max(1, len(gpus))):
            for what, link in (("down", f"cpu0->gpu{index}"), ("up", f"gpu{index}->cpu0")):
                for kind, words in (("pinned", what), ("pageable", f"{what} pageable")):
                    if fact := self._first(words, index):
                        self._rate(f"links.{link}.{kind}.bytes_per_s", self._measured(fact, f"copies in {kind} memory"), fact)
            if fact := self._first("local", index):
                self._take_local(fact, index, gpus[index] if gpus else None)
        if "gpu" in self._parts and not self._of("down"):
            self.pasted.missing.append("a measured rate of copies to the GPU (nvbandwidth -t host_to_device_memcpy_ce)")
        self._take_reads()
        if "cpu" not in self._parts and (reads := self.pasted.form.get("devices.cpu0.memory_bytes_per_s")):
            self._parts["cpu"] = f"{reads['value'] / 1e9:.4g}GB/s"

    def _first(self, what: str, index: int = 0) -> Fact | None:
        """Return the first rate of a kind that is possible; others that differ are contradictions."""
        facts = [fact for fact in self._of(what, which=index) if 1e8 < fact.value < 1e14 and not self._of_another(fact)]
        for fact in facts[1:]:
            if abs(fact.value / facts[0].value - 1) > _CLOSE:
                self._contradict(what, f"{fact.value / 1e9:.4g} GB/s", fact, facts[0])
        return facts[0] if facts else None

    def _of_another(self, fact: Fact) -> bool:
        """Whether a rate is of another GPU than was taken: the test names it above."""
        named = [one for one in self._of("gpu", by="device lines", which=fact.which) if one.line < fact.line]
        if fact.what in ("read", "triad") or not named or fact.which >= len(self._chosen):
            return False
        if _name(self._look_up(find_gpu, named[-1])) == self._chosen[fact.which]:
            return False
        self.pasted.remarks.append(f"{self._at(fact)} ({fact.by}) is of {named[-1].value}: not used")
        return True

    def _rate(self, key: str, number: dict[str, Any], *facts: Fact) -> None:
        words = f"{number['value'] / 1e9:.4g} GB/s, {number['source']}"
        if "gpu" in key and "gpu" not in self._parts:
            self.pasted.remarks.append(f"{key}: {words} ({self._at(facts[0])}): not used without a GPU")
            return
        self.pasted.form[key] = number
        self._take(key, words, *facts)

    def _measured(self, fact: Fact, test: str) -> dict[str, Any]:
        proof = {"method": f"{fact.by}: {test}; {self._at(fact)}, read on this date", "repeats": 1, "spread": "not printed"}
        return {"value": round(fact.value), "source": "measured", "date": time.strftime("%Y-%m-%d", time.gmtime()), **proof}

    def _at(self, fact: Fact) -> str:
        return f"line {fact.line + 1} of {self._place}"

    def _take_local(self, fact: Fact, index: int, gpu: Any) -> None:
        """Take copies inside a GPU for reads, if memory limited them."""
        nominal = 1e9 * getattr(gpu, "memory_bandwidth_GBps", 0)
        said = f"{fact.by}: copies inside the GPU read and write {fact.value / 1e9:.4g} GB/s ({self._at(fact)})"
        if nominal and not LEAST_SHARE <= fact.value / nominal <= 1:
            self.pasted.remarks.append(
                f"{said}, {fact.value / nominal:.0%} of its nominal rate: not that of memory, and not used"
            )
            return
        value = max(fact.value, min(fact.value * COPIES, 0.95 * nominal or fact.value * COPIES))
        how = (
            f"{said}; reads reach {COPIES:.2f} times that (A10, A100, H100: chsasank/device-benchmarks), at most 0.95 of nominal"
        )
        number = {"value": round(value), "source": "derived", "how": how, "interval": [fact.value, max(value, 1.2 * fact.value)]}
        self._rate(f"devices.gpu{index}.memory_bytes_per_s", number, fact)

    def _take_reads(self) -> None:
        key, nodes = "devices.cpu0.memory_bytes_per_s", {fact.which: fact for fact in reversed(self._of("node"))}
        if fact := self._first("read"):
            self._rate(key, self._measured(fact, "ALL Reads"), fact)
        elif nodes:
            how = f"Intel MLC: sum of the reads of {len(nodes)} nodes, each of its own memory, measured one after another"
            self._rate(
                key, {"value": round(sum(one.value for one in nodes.values())), "source": "derived", "how": how}, *nodes.values()
            )
        elif triads := self._of("triad"):
            fact = max(triads, key=lambda one: one.value)  # of several numbers of threads
            how = (
                f"STREAM: Triad x 4/3, as a line is read before it is written ({self._at(fact)}); with streaming stores x 1, "
                "and up to x 2.1 was measured (ggml-org/llama.cpp#26484)"
            )
            interval = [fact.value, 2.1 * fact.value]
            self._rate(key, {"value": round(fact.value * TRIAD), "source": "derived", "how": how, "interval": interval}, fact)
        else:
            self.pasted.missing.append("a measured rate of the processor's reads (Intel MLC, or STREAM)")


def _name(part: Any) -> str:
    return part if isinstance(part, str) else str(getattr(part, "name", ""))


def pasted_text(name: str, pasted: Pasted, place: str) -> str:
    """Write a machine by its parts as a file, with what is from which line, and what is missing."""
    parts = pasted.form["parts"]
    comments = {key: words for key, _, words in (said.partition(": ") for said in pasted.missing)}
    comments |= {one.what: f"line {one.line}: {one.text}" for one in reversed(pasted.taken)}
    lines = [f"# Read from {place}. `moesim profile check` lists what is assumed.", f"name: {name}", "parts:"]
    for key in dict.fromkeys(("gpu", "cpu", "ram", "pcie", "os", *parts)):
        comment = f"  # {comments[key]}" if key in comments else ""
        if key in parts:
            lines.append(
                f"  {key}: " + yaml.safe_dump(parts[key], default_flow_style=True, width=400).partition("\n")[0] + comment
            )
        else:
            lines.append(f"  # {key}:{comment}")
    rates = {key: value for key, value in pasted.form.items() if key != "parts"}
    return "\n".join(lines) + "\n" + (yaml.safe_dump(rates, sort_keys=False, width=120) if rates else "")
