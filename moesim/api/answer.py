"""What an answer is in Python: a table, the text of the command, a folder."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moesim.core.units import digits

if TYPE_CHECKING:
    from pandas import DataFrame


class Answer:
    """Shows itself as the command prints it, and in a notebook as a table."""

    _shown: ClassVar[list[str]]
    """Columns that a notebook shows."""

    @property
    def table(self) -> DataFrame:
        """Give it as a table."""
        raise NotImplementedError

    def text(self, form: str = "table") -> str:
        """Write it as the command prints it."""
        raise NotImplementedError

    def save(self, folder: str | Path) -> Path:
        """Write the folder of the command."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.text().rstrip("\n")

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[1:-1])}</p>" + self.table.to_html(columns=self._shown, index=False, float_format=digits)
