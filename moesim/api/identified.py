"""Results of `moesim.calibrate`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from moesim.api.result import Answer
from moesim.core.table import Format
from moesim.studies.identify import identify as results
from moesim.studies.identify import report
from moesim.studies.identify.report import NextLine, next_lines


class Identified(Answer, results.Identified):
    """A machine identified from observed speeds, as `moesim.calibrate` gives it."""

    _shown = ("constant", "value", "low", "high", "unit", "base", "base_label", "verdict")

    @cached_property
    def next_lines(self) -> list[NextLine]:
        """The next measurements, if something is not identified."""
        return next_lines(self)

    def _rows(self) -> list[dict[str, Any]]:
        return report.constant_records(self)

    def _text(self, form: Format) -> str:
        return report.text(self, self.next_lines, form)

    def _save(self, folder: Path) -> None:
        report.write(self, self.next_lines, folder)

    def __repr__(self) -> str:
        n_told = sum(one.identified for one in self.constants)
        return f"<Identified: {self.profile.name}, {n_told} of {len(self.constants)} constants identified>"
