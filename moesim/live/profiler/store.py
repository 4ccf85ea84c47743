"""Readings on their way: a file that grows by whole lines, so that a killed measurement goes on where it was."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, Final

import pandas as pd

from moesim.core.journal import Journal
from moesim.core.output_folder import OutputFolder
from moesim.errors import ConfigError, InputError
from moesim.live.profiler.fits import COLUMNS
from moesim.live.profiler.plan import Plan
from moesim.live.profiler.probes import FIELDS, Probe, Reading

COMMAND: Final = "profile measure"
FORMAT = 2
PART = "samples.jsonl.part"


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
        """Take in what is there, if it is of the same measurement."""
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
        """Tell whether a repeat of a probe has been measured, or is not to be."""
        return (probe.id, repeat) in self._done or probe.id in self._skipped

    def append(self, probe: Probe, repeat: int, readings: Iterable[Reading]) -> None:
        """Keep the readings that one repeat of a probe gave."""
        told = [[*astuple(reading), value] for reading, value in readings]
        line = {"probe": probe.id, "repeat": repeat, "order": self._order, "readings": told}
        self._journal.append(line)
        self._take(line)

    def skip(self, probe: Probe, why: str) -> None:
        """Note that a probe is left out, and why."""
        line = {"skipped": probe.id, "why": why}
        self._journal.append(line)
        self._take(line)

    def spent(self, seconds: float) -> None:
        """Note the seconds that the measurement has taken in all its sessions."""
        self._journal.append({"session_s": round(seconds, 3)})

    @property
    def skipped(self) -> dict[str, str]:
        """Probes that were left out by id, with the reason."""
        return dict(self._skipped)

    def repeats_of(self, probe: Probe) -> int:
        """Repeats of one probe that are there."""
        return sum(name == probe.id for name, _ in self._done)

    def frame(self) -> pd.DataFrame:
        """All readings, with the columns of `moesim.live.profiler.fits.COLUMNS`, in the order in which they were taken."""
        frame = pd.DataFrame(self._rows, columns=[*FIELDS, "repeat", "order", "time_us"])[list(COLUMNS)]
        return frame.astype({"bits": "float64", "threads": "Int64"})

    def remove(self) -> None:
        """Delete the file: everything is written elsewhere."""
        self._journal.remove()


def _difference(found: Mapping[str, str], here: Mapping[str, str]) -> str:
    """Name the first thing that differs between two machines."""
    for key in sorted({*found, *here}):
        if found.get(key) != here.get(key):
            return f"{key} {found.get(key)!r} instead of {here.get(key)!r}"
    return "the same"
