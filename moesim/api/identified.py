"""Results of `moesim.calibrate`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moesim.api.result import Answer
from moesim.core.table import Format
from moesim.studies.identify import identify as results
from moesim.studies.identify import report
from moesim.studies.identify.report import NextLine, next_lines

if TYPE_CHECKING:
    from pandas import DataFrame


class Identified(Answer, results.Identified):
    """A machine identified from observed speeds, as `moesim.calibrate` gives it."""

    _shown: ClassVar = ["constant", "value", "low", "high", "unit", "base", "base_label", "verdict"]

    @cached_property
    def next_lines(self) -> list[NextLine]:
        """The next measurements, if something is not identified."""
        return next_lines(self)

    @property
    def table(self) -> DataFrame:
        """One row a constant, with its interval, what it was before, and a verdict; `unit` is that of its numbers."""
        import pandas as pd  # takes half a second to import

        return pd.DataFrame(report.constant_records(self))

    def _text(self, form: Format) -> str:
        return report.text(self, self.next_lines, form)

    def save(self, folder: str | Path) -> Path:
        """Write the folder of ``moesim calibrate --out``: profile, page, figure, tables; see `Answer.save`."""
        report.write(self, self.next_lines, Path(folder))
        return Path(folder)

    def __repr__(self) -> str:
        n_told = sum(one.identified for one in self.constants)
        return f"<Identified: {self.profile.name}, {n_told} of {len(self.constants)} constants identified>"
