"""Results of `moesim.calibrate`."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moesim.api.arguments import checked
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

    @checked("text", form="text")
    def text(self, form: str = "table") -> str:
        """Write it as ``moesim calibrate`` prints it.

        Parameters
        ----------
        form : str
            ``table`` or ``md``; ``csv``, ``json`` or ``jsonl``: the constants alone.

        Returns
        -------
        str

        Raises
        ------
        ConfigError
            If it is none of these.
        """
        return report.text(self, self.next_lines, Format.named(form))

    @checked("save", folder="path")
    def save(self, folder: str | Path) -> Path:
        """Write the folder of ``moesim calibrate --out``: profile, page, figure, tables.

        Parameters
        ----------
        folder : str or Path
            A new one, or one of an earlier calibration, which is replaced.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        ConfigError
            If the folder holds something else.
        """
        report.write(self, self.next_lines, Path(folder))
        return Path(folder)

    def __repr__(self) -> str:
        n_told = sum(one.identified for one in self.constants)
        return f"<Identified: {self.profile.name}, {n_told} of {len(self.constants)} constants identified>"
