"""Order and repeats of probes, and their readings' file, by which a killed run goes on."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any, Final, Protocol

import pandas as pd

from moesim.core.files import Journal, OutputFolder
from moesim.errors import ConfigError, InputError
from moesim.live.profiler.fits import COLUMNS
from moesim.live.profiler.plan import Block, Plan
from moesim.live.profiler.probes import FIELDS, LIMIT_US, Probe, Reading

COMMAND: Final = "profile measure"
FORMAT = 2
PART = "samples.jsonl.part"
_BESIDE: Final = ("samples.csv", "fits.csv", "curves.png", "measurement.json")


class Store:
    """Readings of one measurement, appended to a file line by line."""

    def __init__(self, folder: Path, plan: Plan, machine: Mapping[str, str], *, resume: bool = True) -> None:
        self._journal = Journal(OutputFolder(folder.parent, COMMAND, owned=False), f"{folder.name}/{PART}")
        self.path = self._journal.path
        self.sessions = 1
        self.seconds = 0.0  # measured in earlier sessions
        self._rows: list[list[Any]] = []
        self._done: set[tuple[str, int]] = set()
        self._skipped: dict[str, str] = {}
        self._order = 0
        header = {"format": FORMAT, "plan": plan.digest, "machine": dict(machine)}
        try:
            lines = self._journal.read() if resume and self.path.exists() else []
            if lines:  # else killed before the first line was whole
                self._take_all(lines, header)
                self._journal.resume()
            else:
                self._journal.begin(header)
        except OSError as error:
            raise InputError(
                f"{self.path}: expected a file that can be written, got: {error.strerror}; choose another --out"
            ) from None

    def _take_all(self, lines: list[dict[str, Any] | None], header: Mapping[str, Any]) -> None:
        remedy = "measure under another name, or add --no-resume to begin anew"
        try:
            found, *rest = [line for line in lines if line is not None]
            if len(rest) + 1 < len(lines) or found["format"] != FORMAT:
                raise ValueError
            for key, words in (("machine", "this machine"), ("plan", "the same models, mode, seed, repeats and memory")):
                if found[key] != header[key]:
                    got = _difference(found[key], header[key]) if key == "machine" else "other ones"
                    raise ConfigError(f"{self.path}: expected an unfinished measurement of {words}, got {got}; {remedy}")
            for line in rest:
                self._take(line)
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{self.path}: expected an unfinished measurement, got something else; {remedy}") from None
        self.sessions += 1

    def _take(self, line: Mapping[str, Any]) -> None:
        if "skipped" in line:
            self._skipped[line["skipped"]] = line["why"]
            return
        if "session_s" in line:
            self.seconds = line["session_s"]
            return
        self._done.add((line["probe"], line["repeat"]))
        self._order = max(self._order, line["order"] + 1)
        for *what, value in line["readings"]:
            probe = Probe(*what)
            self._rows.append([*astuple(probe), line["repeat"], line["order"], float(value)])

    def has(self, probe: Probe, repeat: int) -> bool:
        return (probe.id, repeat) in self._done or probe.id in self._skipped

    def append(self, probe: Probe, repeat: int, readings: Iterable[Reading]) -> None:
        told = [[*astuple(reading), value] for reading, value in readings]
        line = {"probe": probe.id, "repeat": repeat, "order": self._order, "readings": told}
        self._journal.append(line)
        self._take(line)

    def skip(self, probe: Probe, why: str) -> None:
        line = {"skipped": probe.id, "why": why}
        self._journal.append(line)
        self._take(line)

    def spent(self, seconds: float) -> None:
        self._journal.append({"session_s": round(seconds, 3)})

    @property
    def skipped(self) -> dict[str, str]:
        return dict(self._skipped)

    def repeats_of(self, probe: Probe) -> int:
        return sum(name == probe.id for name, _ in self._done)

    def frame(self) -> pd.DataFrame:
        frame = pd.DataFrame(self._rows, columns=[*FIELDS, "repeat", "order", "time_us"])[list(COLUMNS)]
        return frame.astype({"bits": "float64", "threads": "Int64"})

    def remove(self) -> None:
        self._journal.remove()


def _difference(found: Mapping[str, str], here: Mapping[str, str]) -> str:
    for key in sorted({*found, *here}):
        if found.get(key) != here.get(key):
            return f"{key} {found.get(key)!r} instead of {here.get(key)!r}"
    return "the same"


def check_free(out: Path, name: str, profiles: Iterable[str]) -> None:
    """Raise `InputError` if a stranger's file stands where a measurement is to write one."""
    names = [*(f"{name}/{file}" for file in _BESIDE), *(f"{which}.yaml" for which in profiles)]
    OutputFolder(out, COMMAND, owned=False).check_free(names)


_ALWAYS = 2  # sizes of a curve that are measured however long they take: fewer are no curve


class Bench(Protocol):
    """Runs probes; ``disk_mode`` is that of `moesim.live.kernels.memory.FileExperts`, or empty."""

    disk_mode: str

    def prepare(self, probes: Sequence[Probe]) -> None:
        """Allocate memory for some probes, in place of what was prepared before."""

    def warm(self, probe: Probe) -> float:
        """Run a probe once, and return about how long that took, in us."""

    def time(self, probe: Probe, expected_us: float) -> list[Reading]:
        """Measure a probe once: itself, or its parts; it took ``expected_us`` in `warm`."""

    def release(self) -> None:
        """Free the memory."""

    def close(self) -> None:
        """Free everything."""


def sample(
    plan: Plan, bench: Bench, store: Store, tell: Callable[[str, int], None] = lambda text, steps: None, until: float = math.inf
) -> float:  # fmt: skip
    """Measure what a store lacks, up to a time: sentinels first and last, blocks in other orders."""
    began = time.monotonic()
    _sentinels(plan, bench, store, "start", tell)
    for block in plan.blocks:
        pending = [p for p in block.probes if any(not store.has(p, repeat) for repeat in range(plan.repeats))]
        if pending and time.monotonic() < until:
            tell(block.name, 0)
            bench.prepare(block.probes)
            try:
                _block(plan, block, pending, bench, store, tell, until)
            finally:
                bench.release()
            store.spent(store.seconds + time.monotonic() - began)
    _sentinels(plan, bench, store, "end", tell)
    seconds = store.seconds + time.monotonic() - began
    store.spent(seconds)
    return seconds


def _block(
    plan: Plan, block: Block, pending: Sequence[Probe], bench: Bench, store: Store, tell: Callable[[str, int], None], until: float
) -> None:  # fmt: skip
    expected = _warm_up(pending, bench, store, until)
    tell(block.name, plan.repeats * (len(block.probes) - len(expected)))
    for repeat in range(plan.repeats):
        for probe in plan.order(block, repeat):
            if probe in expected and time.monotonic() < until:
                if not store.has(probe, repeat):
                    store.append(probe, repeat, bench.time(probe, expected[probe]))
                tell(block.name, 1)


def _warm_up(pending: Sequence[Probe], bench: Bench, store: Store, until: float) -> dict[Probe, float]:
    """Run everything once, the small before the large, and find what would take too long."""
    found: dict[Probe, float] = {}
    last: dict[tuple[object, ...], tuple[int, float, int]] = {}  # curve -> size, its time, sizes so far
    for probe in sorted(pending, key=lambda probe: probe.size):
        if store.has(probe, -1) or time.monotonic() > until:  # left out in an earlier session; no time is left
            continue
        limit = LIMIT_US.get(probe.unit)
        size, us, n = last.get(probe.curve, (0, 0.0, 0))
        if limit is not None and n >= _ALWAYS and (guess := us * probe.size / size) > limit and us > limit / 4:
            store.skip(probe, f"one run would take about {guess / 1e6:.1f} s")
            continue
        us = bench.warm(probe)
        last[probe.curve] = probe.size, us, n + 1
        if limit is not None and us > limit and n >= _ALWAYS:
            store.skip(probe, f"one run takes {us / 1e6:.1f} s")
            continue
        found[probe] = us
    return found


def _sentinels(plan: Plan, bench: Bench, store: Store, when: str, tell: Callable[[str, int], None]) -> None:
    if not plan.sentinels:
        return
    tell(f"sentinel, {when}", 0)
    probes = [replace(probe, variant=when) for probe in plan.sentinels]
    bench.prepare(probes)
    try:
        for probe in probes:
            expected = bench.warm(probe)
            first = store.repeats_of(probe)
            for repeat in range(first, first + plan.repeats):
                store.append(probe, repeat, bench.time(probe, expected))
    finally:
        bench.release()
