"""The measurements of a validation on disk: JSON lines, each there as soon as it was taken, so that nothing is measured twice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

from moesim.core.files import Journal, OutputFolder
from moesim.errors import ConfigError
from moesim.studies.validation.facts import Facts

FILE: Final = "measurements.jsonl"
OWNER: Final = "validate"
_MUST_MATCH: Final = ("key", "how")


class Measurements:
    """Measurements of one experiment in a folder.

    The first line says what was measured; then one line for the decision time of each run, and one for each replay. Those of a
    new object replace what is there with the first measurement.
    """

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        self._journal = Journal(OutputFolder(folder, OWNER), FILE, durable=True)
        self.path = self._journal.path
        self.header = dict(header)
        self.decision_ns: dict[int, int] = {}  # median time of a decision, by run
        self.replays: dict[tuple[int, int], Facts] = {}  # by run and repeat
        self._lines: list[dict[str, Any]] = []
        self._begun = False  # whether the file holds the header and these lines

    @classmethod
    def resume(cls, folder: Path, header: Mapping[str, Any]) -> Measurements:
        """Go on with what is there, if anything."""
        if not (folder / FILE).exists():
            return cls(folder, header)
        found = cls.read(folder)
        for name in _MUST_MATCH:
            if found.header.get(name) != header[name]:
                raise ConfigError(
                    f"{found.path}: expected measurements of this experiment ({name} {header[name]}), got others "
                    f"({found.header.get(name)}); choose another --out, or measure anew with --no-resume"
                )
        return found

    @classmethod
    def read(cls, folder: Path) -> Measurements:
        """Read what was measured."""
        path = folder / FILE
        try:
            lines = Journal(OutputFolder(folder, OWNER), FILE).read()
        except OSError as error:
            raise ConfigError(f"{path}: expected measurements, got: {error.strerror}; measure without --only-compare") from None
        found: Measurements | None = None
        for number, content in enumerate(lines, start=1):
            try:
                if content is None:
                    raise ValueError("a damaged line")
                if found is None:
                    found = cls(folder, content["header"])
                    found._begun = True
                else:
                    found._take(content)
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}: line {number}: expected a measurement, got {_describe(error)}; remove it") from None
        if found is None:
            raise ConfigError(f"{path}: expected a header and measurements, got nothing; measure anew with --no-resume")
        return found

    def add_decisions(self, run: int, label: str, digest: str, took_ns: list[int]) -> None:
        """Keep how long the policy of a run took to decide: the median, and what it is the median of."""
        ordered = sorted(took_ns) or [0]
        at = [ordered[round(share * (len(ordered) - 1))] for share in (0.1, 0.5, 0.9)]
        self._append(
            {"run": run, "label": label, "digest": digest, "decision_ns": at[1], "decision_p10_p90_ns": [at[0], at[2]],
             "n_decisions": len(took_ns)}
        )  # fmt: skip

    def add_replay(self, run: int, repeat: int, facts: Facts) -> None:
        """Keep what came of a replay."""
        self._append({"run": run, "repeat": repeat, "facts": asdict(facts)})

    def label(self, run: int) -> tuple[str, str]:
        """Name a run as it was measured, with the digest of its workload."""
        return next(((line["label"], line["digest"]) for line in self._lines if line.get("run") == run), ("", ""))

    def of_run(self, run: int) -> list[Facts]:
        """Give the replays of a run, in the order of their repeats."""
        return [facts for (index, _), facts in sorted(self.replays.items(), key=lambda item: item[0]) if index == run]

    def _take(self, line: dict[str, Any]) -> None:
        run = int(line["run"])
        if "repeat" in line:
            known = {f.name for f in fields(Facts)}
            if set(line["facts"]) != known:
                raise ValueError(f"facts {', '.join(sorted(set(line['facts']) ^ known))}")
            self.replays[run, int(line["repeat"])] = Facts(**line["facts"])
        else:
            _ = (line["label"], line["digest"])
            self.decision_ns[run] = int(line["decision_ns"])
        self._lines.append(line)

    def _append(self, line: dict[str, Any]) -> None:
        self._take(line)
        if not self._begun:
            self._journal.begin({"header": self.header})
            self._begun = True
        self._journal.append(line)


def _describe(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
