"""Results of an experiment in Python: table, records, figures, timeline and folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.api.arguments import checked
from moesim.core.files import write_bytes
from moesim.core.own_code import reading
from moesim.core.table import Format
from moesim.core.units import digits
from moesim.errors import ConfigError, MoesimError, unknown_name
from moesim.experiment.folder import MAKE_FRAME, Output, outcome_of
from moesim.experiment.report import describe_run, result_html, result_table
from moesim.experiment.run import Results
from moesim.experiment.runner import Kept, run_one
from moesim.experiment.store import Store
from moesim.metrics.frames import request_table
from moesim.metrics.machine import Machine
from moesim.metrics.outcome import Outcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from moesim.experiment.resolve import Experiment
    from moesim.metrics import Value
    from moesim.metrics.timeline import Timeline
    from moesim.plots.style import Drawing, Medium
    from moesim.records import Records
    from moesim.serving.steps import Served


class Result:
    """Results of an experiment, as `moesim.compare`, `moesim.run` and `moesim.load` return them.

    Attributes
    ----------
    rows : list of dict
        One a run: settings, labels and metrics by name, in the experiment's order. ``error`` is None if it succeeded.
    experiment : Experiment or None
        What was run; None for a result that was loaded.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], experiment: Experiment | None, folder: Path | None = None, *, trust: bool = True,
        inputs: Path | None = None, requests: Mapping[int, Records] | None = None,
        outcomes: Mapping[int, Outcome] | None = None,
    ) -> None:  # fmt: skip
        self.rows: list[dict[str, Value]] = [dict(row) for row in rows]
        self.experiment = experiment
        self._folder, self._trust, self._inputs = folder, trust, inputs
        self._outcomes = dict(outcomes or {})
        self._requests = dict(requests or {})  # records of served runs as far as these are kept: what became of requests

    @property
    def table(self) -> DataFrame:
        """One row a run, one column a setting, label or metric; names end in the unit, as ``_ns``."""
        import pandas as pd  # takes half a second to import

        return pd.DataFrame(self.rows)

    @property
    def failures(self) -> list[str]:
        """One line for each run that failed."""
        return [f"{describe_run(row)}: {row['error']}" for row in self.rows if row.get("error")]

    def __str__(self) -> str:
        return result_table(self.rows, Format.TABLE).rstrip("\n")

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        policies = ", ".join(dict.fromkeys(str(row["policy"]) for row in self.rows))
        return f"<moesim.Result: {len(self.rows)} runs of {policies}{failed}>"

    def _repr_html_(self) -> str:
        return result_html(self.rows)

    def records(self, run: int | None = None, **settings: Any) -> Records:
        """Return everything that happened in a run, to the nanosecond.

        It is simulated once more, unless its folder kept it: memory holds no records that nobody asked for.

        Parameters
        ----------
        run : int, optional
            Its number, the column ``run`` of the table.
        **settings
            Or columns and their values, of which one run has all: ``policy="lru", cache_ratio=0.5``.

        Returns
        -------
        Records

        Raises
        ------
        ConfigError
            If no run, or more than one, is meant, or it failed.
        """
        records = self._outcome(self._index(run, settings)).records
        assert records is not None
        return records

    def requests(self, run: int | None = None, **settings: Any) -> DataFrame:
        """Return a row for each request of served workloads.

        Parameters
        ----------
        run, **settings
            As of `records`; default: the requests of all runs.

        Returns
        -------
        pandas.DataFrame
            ``run``, ``policy``, ``request``, times such as ``arrival_ns`` and ``ttft_ns``, tokens: the columns of
            ``requests.parquet`` in `docs/reference/metrics.md`. What a request was not so far to have is missing.

        Raises
        ------
        ConfigError
            If no run, or more than one, is meant, or none has a served workload.
        """
        import pandas as pd
        import pyarrow as pa

        asked = run is not None or bool(settings)
        meant = [self._index(run, settings)] if asked else [i for i, row in enumerate(self.rows) if not row.get("error")]
        tables = [request_table(self.rows[i], served) for i in meant if (served := self._served(i)) is not None]
        if not tables:
            raise ConfigError("requests: expected a run of a served workload, got none; give it arrivals or closed")
        frame: DataFrame = pa.concat_tables(tables).to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
        return frame

    def _served(self, index: int) -> Served | None:
        """Return what became of the requests of a run: from here, its folder, or another simulation."""
        row = self.rows[index]
        if not row.get("n_requests_arrived"):
            return None
        if index not in self._requests:
            kept = None if self._folder is None else Store(self._folder, read_only=True).records(str(row.get("key")), 0)
            self._requests[index] = kept or _records(self._outcome(index, keep=False, wanted=0))
        return self._requests[index].served

    def _served_runs(self, rows: DataFrame, what: str) -> dict[str, Served]:
        found = {str(row["policy"]): self._served(int(row["run"])) for _, row in rows.iterrows()}
        if None in found.values():
            raise ConfigError(f"plot {what}: expected served workloads, got others; give arrivals or closed")
        return {policy: served for policy, served in found.items() if served is not None}

    def timeline(self, *policies: str, steps: int = 3) -> Timeline:
        """Return the first steps at the first setting as trace events.

        Parameters
        ----------
        *policies : str
            Which; default: all.
        steps : int
            How many steps.

        Returns
        -------
        Timeline
            Its ``events``; ``save(path)`` writes a file for https://ui.perfetto.dev.

        Raises
        ------
        ConfigError
            If a policy did not run at the first setting.
        """
        from moesim.metrics.timeline import Timeline

        first = [index for index in self._first_setting() if not self.rows[index].get("error")]
        known = {str(self.rows[index]["policy"]): index for index in first}
        for name in policies:
            if name not in known:
                raise ConfigError(f"timeline: {unknown_name('policy of the first setting', name, known)}")
        shown = [self._outcome(known[name], wanted=steps) for name in policies or known]
        return Timeline.of({str(one.row["policy"]): (_records(one), one.machine) for one in shown}, steps)

    @checked("plot", medium="text")
    def plot(
        self, kind: str, *, policies: Sequence[str] = (), where: Mapping[str, Any] | None = None,
        width: str | float | None = None, medium: Medium = "screen", **options: Any,
    ) -> Figure:  # fmt: skip
        """Draw one figure.

        Parameters
        ----------
        kind : str
            As ``moesim plot list`` names them, such as ``"speedup"``.
        policies : sequence of str
            Which, in their order; default: all.
        where : mapping, optional
            Only runs with these values in columns of the table.
        width : str or float, optional
            ``"column"``, ``"page"``, ``"slide"``, or inches; default: as wide as the kind needs.
        medium : {"screen", "paper"}
            On paper, title and sources stand in the caption only.
        **options
            Of the kind.

        Returns
        -------
        matplotlib.figure.Figure
            It has three attributes more: ``caption``, a text for a paper; ``data``, a frame of exactly what is drawn; and
            ``write(path)``, which writes ``path.png``, ``.pdf``, ``.csv`` and ``.txt`` as ``moesim plot`` does.

        Raises
        ------
        ConfigError
            If the kind or an option is unknown, or several figures would be needed: settings that a figure does not show are
            never averaged away. `plots` gives them all.
        """
        found = self.plots(kind, policies=policies, where=where, width=width, medium=medium, **options)
        if len(found) > 1:
            from moesim.plots.catalogue import kind_of, options_of  # there by now

            panel = ", divide panels with panel='column'" if "panel" in options_of(kind_of(kind)) else ""
            raise ConfigError(
                f"plot {kind}: expected settings of one figure, got those of {len(found)}: {', '.join(found)}; "
                f"choose with where={{'column': value}}{panel}, or take all with plots"
            )
        return next(iter(found.values()))

    @checked("plots", medium="text")
    def plots(
        self, kind: str, *, policies: Sequence[str] = (), where: Mapping[str, Any] | None = None,
        width: str | float | None = None, medium: Medium = "screen", **options: Any,
    ) -> dict[str, Figure]:  # fmt: skip
        """Draw all figures of a kind, one for each combination of settings that one does not show.

        Parameters
        ----------
        kind, policies, where, width, medium, **options
            As of `plot`.

        Returns
        -------
        dict of str to matplotlib.figure.Figure
            By name, which says the combination.
        """
        from moesim.plots.captions import setting_label
        from moesim.plots.catalogue import figures_of, kind_of, options_of
        from moesim.plots.drawing import chosen
        from moesim.plots.result_rows import column_of, shared_setting
        from moesim.plots.style import MEDIA, drawn_among, drawn_for, drawn_wide, parse_width

        drawn, known = kind_of(kind), options_of(kind_of(kind))
        for name in options:
            if name not in known:
                raise ConfigError(f"plot {kind}: {unknown_name('option', name, known)}")
        if medium not in MEDIA:
            raise ConfigError(f"plot {kind}: medium: {unknown_name('medium', medium, MEDIA)}")
        inches = None if width is None else parse_width(width, f"plot {kind}: width")
        wanted, table = [(k, str(v)) for k, v in (where or {}).items()], self.table
        of_runs = [one for one in wanted if column_of(table, one[0]) in table]  # what is left out is not simulated again
        rows = chosen(table, policies, of_runs, kind)
        frame = chosen(self._frame(kind, drawn.source, rows), policies, [one for one in wanted if one not in of_runs], kind)
        among = list(dict.fromkeys(str(row["policy"]) for row in self.rows))
        with reading(trust=self._trust), drawn_for(medium), drawn_wide(inches), drawn_among(among):
            if drawn.source == "records":
                shared, missing = shared_setting(frame, kind)
                outcomes = [self._outcome(int(run)) for run in shared["run"]]
                runs = {str(one.row["policy"]): _records(one) for one in outcomes}
                asked = {kind: ([runs, outcomes[0].machine], {**options, "label": setting_label(shared, missing)})}
            elif drawn.source == "requests":
                shared, missing = shared_setting(frame, kind)
                asked = {kind: ([self._served_runs(shared, kind)], {**options, "label": setting_label(shared, missing)})}
            else:
                asked = {name: ([part], options) for name, part in figures_of(kind, frame, options)}
            return {name: _showable(drawn.drawing(*given, **more), medium) for name, (given, more) in asked.items()}

    def _frame(self, kind: str, source: str, rows: DataFrame) -> DataFrame:
        from moesim.plots.catalogue import IN_EXPERIMENTS, SOURCES

        if source not in IN_EXPERIMENTS:
            raise ConfigError(f"plot {kind}: expected a figure of runs, got one that draws {SOURCES[source]}")
        if source in ("rows", "records", "requests"):
            return rows
        import pandas as pd

        done = [index for index in rows.index if not self.rows[index].get("error")]
        return pd.DataFrame([row for index in done for row in MAKE_FRAME[source](self._outcome(index, keep=False))])

    @checked("save")
    def save(self, folder: str | Path) -> Path:
        """Write the result into a folder, as ``moesim run --out`` does.

        Parameters
        ----------
        folder : str or Path
            New, or of an earlier result.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        ConfigError
            If the folder holds something else, or the result was loaded: then copy its folder.
        """
        if self.experiment is None:
            raise ConfigError(f"{folder}: expected a result that was run here, got one of {self._folder}; copy that folder")
        output = Output(self.experiment, Path(folder))
        wanted = [output.kept.get(i) if not row.get("error") else None for i, row in enumerate(self.rows)]
        outcomes = [self._told(i) if kept is None else self._again(i, kept) for i, kept in enumerate(wanted)]
        store = Store(Path(folder))
        for outcome in outcomes:
            if not outcome.row.get("error"):
                store.add(str(outcome.row["key"]), outcome.row)
                if outcome.records is not None:
                    store.add_records(str(outcome.row["key"]), outcome.records)
        store.merge()
        return output.write(Results(self.experiment, outcomes))

    def _index(self, run: int | None, settings: Mapping[str, Any]) -> int:
        if run is not None and settings:
            raise ConfigError("records: expected the number of a run or settings, got both; leave one out")
        for name in settings:
            if not any(name in row for row in self.rows):
                raise ConfigError(f"records: {unknown_name('column', name, list(self.rows[0]))}")
        found = [
            index for index, row in enumerate(self.rows)
            if (run is None or row["run"] == run) and all(row.get(name) == value for name, value in settings.items())
        ]  # fmt: skip
        if len(found) != 1:
            got = ", ".join(describe_run(self.rows[index]) for index in found[:5]) or "none"
            raise ConfigError(f"records: expected one run, got {got}; give its number, or settings that only one run has")
        return found[0]

    def _first_setting(self) -> list[int]:
        if self.experiment is not None:
            first = self.experiment.specs[0].point.setting
            return [spec.index for spec in self.experiment.specs if spec.point.setting == first]
        from moesim.plots.result_rows import first_setting

        return [int(run) for run in first_setting(self.table, "timeline")["run"]]

    def _told(self, index: int) -> Outcome:
        """Return an outcome as far as its row has it."""
        assert self.experiment is not None
        failure = MoesimError(str(self.rows[index]["error"])) if self.rows[index].get("error") else None
        return Outcome(self.rows[index], Machine.of(self.experiment.specs[index].hardware), failure=failure)

    def _outcome(self, index: int, *, keep: bool = True, wanted: Kept = True) -> Outcome:
        """Return a run with its records, or those of so many first steps; simulate it if need be."""
        row = self.rows[index]
        if row.get("error"):
            raise ConfigError(f"{describe_run(row)}: expected a run that succeeded, got: {row['error']}")
        if index in self._outcomes:
            return self._outcomes[index]
        if self.experiment is None:
            assert self._folder is not None
            outcome = outcome_of(self._folder, index, wanted=wanted, trust=self._trust, inputs=self._inputs)
        else:
            outcome = self._again(index, True if wanted else 0)
        if keep and _records(outcome).first_steps is None:
            self._outcomes[index] = outcome
        return outcome

    def _again(self, index: int, kept: Kept) -> Outcome:
        """Simulate a run again, which leaves the same records."""
        assert self.experiment is not None
        if not kept and index in self._requests:
            return replace(self._told(index), records=self._requests[index])
        found = run_one(self.experiment, self.experiment.specs[index], keep=kept)
        if found.failure is not None:
            raise found.failure
        return replace(found, row=self.rows[index])


class Answer:
    """The answer of a study, shown as its command prints it, in a notebook as a table."""

    _shown: Sequence[str] = ()  # columns that a notebook shows; none: all
    _rows: Callable[[], list[dict[str, Any]]]
    _text: Callable[[Format], str]
    _save: Callable[[Path], None]

    @property
    def table(self) -> DataFrame:
        """One row a result of the command, such as a placement; names end in the unit."""
        import pandas as pd  # takes half a second to import

        return pd.DataFrame(self._rows())

    @checked("text")
    def text(self, form: str = "table") -> str:
        """Write it as the command prints it.

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
        return self._text(Format.named(form))

    @checked("save")
    def save(self, folder: str | Path) -> Path:
        """Write the folder of the command with ``--out``.

        Parameters
        ----------
        folder : str or Path
            A new one, or one that the command wrote, which is replaced.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        ConfigError
            If the folder holds something else.
        """
        self._save(Path(folder))
        return Path(folder)

    def __str__(self) -> str:
        return self.text().rstrip("\n")

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self)[1:-1])}</p>" + (
            self.table.to_html(columns=list(self._shown) or None, index=False, float_format=digits)
        )


def _showable(drawing: Drawing, medium: Medium) -> Figure:
    """Let a notebook show a figure with its caption, and let it be written."""
    from moesim.plots.style import drawn_for, rendered, written

    def write(path_base: str | Path) -> list[Path]:
        base = Path(path_base)
        with drawn_for(medium):
            files = written(drawing, base.name)
        return [write_bytes(base.parent / name, data) for name, data in files.items()]

    figure: Any = drawing.figure
    figure.write = write
    figure._repr_png_ = lambda: rendered(figure, ["png"])["png"]
    figure.caption, figure.data = drawing.caption.strip(), drawing.data
    return drawing.figure


def _records(outcome: Outcome) -> Records:
    assert outcome.records is not None
    return outcome.records
