"""What `moesim.recommend` gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from moesim.api.answer import Answer
from moesim.api.checked import checked
from moesim.core.table import Format
from moesim.core.units import digits
from moesim.studies.advice import recommend as advice

if TYPE_CHECKING:
    from pandas import DataFrame


class Advice(Answer, advice.Advice):
    """The best placement of a model's experts on a machine, with runners-up, as `moesim.recommend` gives it."""

    _shown: ClassVar = ["placement", "runnable", "decode_tokens_per_s", "low", "high", "ttft_s", "ratio_to_best", "label"]

    @property
    def table(self) -> DataFrame:
        """One row a finalist, those that can be run first; names end in the unit, `low` and `high` are tokens/s."""
        import pandas as pd  # takes half a second to import

        from moesim.studies.advice.show import flat

        return pd.DataFrame([flat(self, one) for one in (*self.runnable, *self.papers)])

    @checked("text", form="text")
    def text(self, form: str = "table") -> str:
        """Write it as ``moesim recommend`` prints it.

        Parameters
        ----------
        form : str
            ``table``, ``md``, ``csv``, ``json`` or ``jsonl``.

        Returns
        -------
        str

        Raises
        ------
        ConfigError
            If it is none of these.
        """
        from moesim.studies.advice.show import output

        return output(self, Format.named(form))

    @checked("save", folder="path")
    def save(self, folder: str | Path) -> Path:
        """Write the folder of ``moesim recommend --out``.

        Parameters
        ----------
        folder : str or Path
            A new one, or one of an earlier advice, which is replaced.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        ConfigError
            If the folder holds something else.
        """
        from moesim.studies.advice.show import write_folder

        write_folder(self, Path(folder))
        return Path(folder)

    def __repr__(self) -> str:
        setting, best = self.setting, self.best
        where = f"{setting.model.name} on {setting.hardware.name}"
        return f"<Advice: {best.candidate.title} for {where}, {digits(best.speed.value)} tokens/s>"
