"""Studies of experiments from Python: what-if, the difference of two runs, the worth of each decision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from moesim.api.arguments import checked
from moesim.api.result import Answer
from moesim.api.run import read_experiment
from moesim.core.table import Format
from moesim.core.text import say
from moesim.experiment.resolve import Experiment
from moesim.experiment.rows import describe_run

if TYPE_CHECKING:
    from pandas import DataFrame

    from moesim.studies.diff import Diff
    from moesim.studies.regret import Regret
    from moesim.studies.whatif.study import Line


class WhatIf(Answer):
    """Varied settings of an experiment, as `moesim.whatif` returns them."""

    _shown: ClassVar = ["policy", "knob", "setting", "decode_tokens_per_s", "decode_change", "effect", "limit", "next_limit"]
    _command: ClassVar = "whatif"

    def __init__(self, lines: Sequence[Line], *, quick: bool = False) -> None:
        self.lines, self.quick = lines, quick

    @property
    def table(self) -> DataFrame:
        """One row a varied setting."""
        import pandas as pd  # takes half a second to import

        from moesim.studies.whatif.show import records_of

        return pd.DataFrame(records_of(self.lines, self.quick))

    @property
    def failures(self) -> list[str]:
        """One line for each variation that failed."""
        return [f"{line.policy}, {line.name}: {line.shot.error}" for line in self.lines if line.shot.error is not None]

    def _text(self, form: Format) -> str:
        from moesim.studies.whatif.show import table

        return table(self.lines, form, self.quick)

    def files(self) -> dict[str, bytes]:
        from moesim.studies.whatif.show import files_of

        return files_of(self.lines, self.quick)

    def __repr__(self) -> str:
        return f"<WhatIf: {sum(bool(line.settings) for line in self.lines)} varied settings>"


@checked(
    "whatif", experiment="experiment", vary="names", overrides="overrides", quick="flag", look="flag", jobs="count",
    progress="flag",
)  # fmt: skip
def whatif(
    experiment: str | Path | Mapping[str, Any],
    vary: Sequence[str] = (),
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    quick: bool = False,
    look: bool = True,
    jobs: int | None = None,
    progress: bool = True,
) -> WhatIf:
    """Vary one thing of an experiment at a time.

    Parameters
    ----------
    experiment, overrides, quick, jobs, progress
        As of `moesim.run`; the experiment has one setting.
    vary : sequence of str
        As ``moesim whatif --vary``, such as ``"link.bytes_per_s x0.5,x2"``. Default: half and twice the rates of link, CPU
        and GPU.
    look : bool
        Look where along each knob the limit changes.

    Returns
    -------
    WhatIf
        ``table``, ``text()`` and ``save(folder)``; ``failures`` names variations that cannot run.

    Raises
    ------
    InputError
        If a knob or a value is unknown, or the machine's profile cannot express it.
    """
    from moesim.studies.whatif.settings import parse_vary, single
    from moesim.studies.whatif.study import RATES, variations_of
    from moesim.studies.whatif.study import whatif as vary_experiment

    config, place, _ = read_experiment("whatif", experiment, overrides, quick=quick)
    base = single(config, place)
    if vary:
        variations = [together for text in vary for together in parse_vary(text)]
    else:
        variations, left_out = variations_of(base, RATES)
        for reason in left_out:
            say(f"moesim: left out: {reason}")
    return WhatIf(vary_experiment(base, variations, look=look, jobs=jobs, progress=progress), quick=quick)


class Difference(Answer):
    """Two runs compared, as `moesim.diff` returns them."""

    _shown: ClassVar = ["section", "key", "a", "b", "unit"]
    _command: ClassVar = "diff"

    def __init__(self, found: Diff, run_a: str, run_b: str) -> None:
        self.found, self.run_a, self.run_b = found, run_a, run_b

    @property
    def table(self) -> DataFrame:
        """One row a compared figure."""
        import pandas as pd  # takes half a second to import

        return pd.DataFrame([entry.record() for entry in self.found.entries()])

    def _text(self, form: Format) -> str:
        from moesim.studies.diff import text_of

        return text_of(self.found, self.run_a, self.run_b, form)

    def files(self) -> dict[str, bytes]:
        return {"diff.csv": self._text(Format.CSV).encode()}

    def __repr__(self) -> str:
        return f"<Difference: {self.run_a} and {self.run_b}>"


@checked("diff", run_a="path", run_b="path", trust="flag", inputs="path")
def diff(run_a: str | Path, run_b: str | Path, *, trust: bool = False, inputs: str | Path | None = None) -> Difference:
    """Compare two runs of result folders.

    Parameters
    ----------
    run_a, run_b : str or Path
        A folder with one run, or ``"FOLDER:NUMBER"``, or ``"FOLDER:POLICY"``.
    trust, inputs
        As of `moesim.load`.

    Returns
    -------
    Difference
        ``table``, ``text()`` and ``save(folder)``; differences are B less A.

    Raises
    ------
    ConfigError
        If there is no such run, or it cannot be simulated again where the folder has no records of it.
    """
    from moesim.experiment.folder import outcome_of
    from moesim.studies.diff import Diff, find_run

    read = partial(outcome_of, trust=trust, inputs=None if inputs is None else Path(inputs))
    return Difference(Diff.of(find_run(str(run_a), read), find_run(str(run_b), read)), str(run_a), str(run_b))


class Regrets(Answer):
    """The worth of each decision of some runs, as `moesim.regret` returns it."""

    _shown: ClassVar = ["policy", "order", "decision", "base_ns", "saved_ns", "source_label"]
    _command: ClassVar = "regret"

    def __init__(self, runs: Sequence[Regret]) -> None:
        self.runs = runs

    @property
    def table(self) -> DataFrame:
        """One row a run, order and decision."""
        import pandas as pd  # takes half a second to import

        return pd.DataFrame([record for one in self.runs for record in one.records()])

    @property
    def failures(self) -> list[str]:
        """One line for each run that failed."""
        return [f"{describe_run(one.row)}: {error}" for one in self.runs for error in one.errors]

    def _text(self, form: Format) -> str:
        from moesim.studies.regret import table

        return table(self.runs, form)

    def files(self) -> dict[str, bytes]:
        from moesim.studies.regret import files_of

        return files_of(self.runs)

    def __repr__(self) -> str:
        return f"<Regrets: {len(self.runs)} runs>"


@checked(
    "regret", experiment="experiment", policies="names", overrides="overrides", quick="flag", jobs="count", progress="flag"
)  # fmt: skip
def regret(
    experiment: str | Path | Mapping[str, Any],
    policies: Sequence[str] = (),
    *,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    quick: bool = False,
    jobs: int | None = None,
    progress: bool = True,
) -> Regrets:
    """Find what each decision of a policy would be worth if an oracle made it.

    Parameters
    ----------
    experiment, overrides, quick, jobs, progress
        As of `moesim.run`.
    policies : sequence of str
        Names, with or without options; default: all of the experiment.

    Returns
    -------
    Regrets
        ``table``, ``text()`` and ``save(folder)``; ``failures`` names runs that failed.

    Raises
    ------
    InputError
        If what was asked for is wrong.
    """
    from moesim.studies.regret import regrets

    config, place, given = read_experiment("regret", experiment, overrides, quick=quick)
    return Regrets(regrets(Experiment(config, place, known=given), policies, jobs=jobs, progress=progress))
