"""Answer printed rows three ways: by the derived profile, by what the other tables of the paper give, or inconsistent.

Writes ``results.csv`` and ``constants.csv`` of the page of results.
"""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import pandas as pd

from experiments.research.tables.command import PAPERS, begin_papers, parser, run, write
from experiments.research.tables.platform import NAME, Answer, Identified, Plan, Point, identify_paper, read_plans
from moesim.core.table import Format, render, render_records
from moesim.core.text import cell, say, uncell
from moesim.errors import ConfigError
from moesim.experiment import run_experiment
from moesim.experiment.config import Config, load_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.sweep import RunSpec
from moesim.experiment.workers import Workers
from moesim.hardware import HardwareProfile, override, read_profile
from moesim.plots.style import pictures
from moesim.plots.validation import printed
from moesim.studies.identify.fit import Machine
from moesim.studies.papers.compare import Compared, check_answers, choose, compare, figures, select, sides
from moesim.studies.papers.published import PUBLISHED, Published, paper_folder, read_published
from moesim.trace import Trace

Row = Mapping[str, Any]


@dataclass
class Evaluator:
    """Runs what the rows of a paper need, shortened, on machines with other constants."""

    plan: Plan  # what is identified
    machine: Machine  # with its free constants
    rows: Sequence[Published]  # that take part
    configs: Mapping[str, Config]  # their experiments, whole
    workers: Workers
    folder: Path  # what has been run there is not run again
    traces: dict[str, Trace] = field(default_factory=dict)
    _experiments: dict[str, Experiment] = field(default_factory=dict, init=False)

    def __call__(self, points: Sequence[Point | None], which: Sequence[int]) -> list[list[Compared]]:
        """Compare rows on each machine; see `experiments.research.tables.platform.Evaluate`."""
        rows = [self.rows[index] for index in which]
        results: list[dict[str, list[Row]]] = [{} for _ in points]
        for name in dict.fromkeys(one for row in rows for one in (row.experiment, row.baseline_experiment) if one):
            for found, mine in zip(results, self._run(name, rows, points), strict=True):
                found[name] = mine
        return [[compare(row, found) for row in rows] for found in results]

    def whole(self, kept: Path | None) -> list[Compared]:
        """Compare all rows by whole runs on the profile as it is, those in a folder of `moesim papers` not run again."""
        results = {}
        for name, config in self.configs.items():
            if any(name in (row.experiment, row.baseline_experiment) for row in self.rows if row.source == "runs"):
                experiment = Experiment(config, f"{name}.yaml", known=self.traces)
                folder = None if kept is None else kept / name
                results[name] = run_experiment(experiment, workers=self.workers, progress=True, folder=folder).rows
        return [compare(row, results) if row.source == "runs" else Compared(row) for row in self.rows]

    def _run(self, name: str, rows: Sequence[Published], points: Sequence[Point | None]) -> list[list[Row]]:
        """Run all points of an experiment that rows ask for, on all machines together."""
        experiment = self._experiment(name)
        wanted = self._wanted(name, rows)
        specs = [self._at(spec, point) for point in points for spec in wanted]
        found = run_experiment(experiment.of(specs), workers=self.workers, progress=True, folder=self.folder)
        if found.failures:
            raise ConfigError(f"{name}.yaml: {found.failures[0]}")
        whole = self.configs[name].workload
        done: list[Row] = [stretched(o.row, whole.decode_tokens) for o in found.outcomes]
        return [done[i : i + len(wanted)] for i in range(0, len(done), len(wanted))]

    def _experiment(self, name: str) -> Experiment:
        if name not in self._experiments:
            config = self.configs[name]
            changes: dict[str, Any] = {
                "plots": [],
                "timeline": None,
                "workload": config.workload.model_copy(update=self._shorter(name, config)),
            }
            self._experiments[name] = Experiment(config.model_copy(update=changes), f"{name}.yaml", known=self.traces)
        return self._experiments[name]

    def _shorter(self, name: str, config: Config) -> dict[str, int]:
        short, asked = self.plan.lengths.get(name.rpartition("/")[2], self.plan.decode_tokens), config.workload.decode_tokens
        return {"decode_tokens": short} if short and isinstance(asked, int) and short < asked else {}

    def _wanted(self, name: str, rows: Sequence[Published]) -> list[RunSpec]:
        experiment = self._experiment(name)
        known = [
            {
                "policy": spec.policy_name, "model": spec.model.name, **spec.point.row(), "spec": spec}
            for spec in experiment.specs
        ]  # fmt: skip
        whole = {key: getattr(self.configs[name].workload, key) for key in self._shorter(name, self.configs[name])}
        chosen: dict[int, RunSpec] = {}
        for row in rows:
            mine, theirs, _ = sides(row.where)
            for one, policy, where in ((row.experiment, row.policy, mine), (row.baseline_experiment, row.baseline, theirs)):
                if one == name:
                    for run in select([{**entry, **whole} for entry in known], policy, where):
                        chosen[run["spec"].index] = run["spec"]
        return [chosen[index] for index in sorted(chosen)]

    def _at(self, spec: RunSpec, point: Point | None) -> RunSpec:
        if point is None:
            return spec
        bits = dict(point.bits).get(spec.model.name)
        model = spec.model if bits is None else replace(spec.model, expert_bits=bits)
        return replace(spec, hardware=self._machine(point, spec), model=model)

    def _machine(self, point: Point, spec: RunSpec) -> HardwareProfile:
        """Return the machine; rows of another one than the plan's stay on theirs."""
        if spec.hardware.name != self.machine.base.name:
            return spec.hardware
        return self.machine.with_factors(point.logs)


def stretched(row: Row, decode_tokens: Any) -> dict[str, Any]:
    """Extrapolate a run to the whole length: totals grow with decoded tokens; prefill, shares and steps stay."""
    found = dict(row)
    decode = decode_tokens / row["decode_tokens"] if isinstance(decode_tokens, int) else 1.0
    if decode == 1:
        return found
    prefill = row["ttft_mean_ns"] * row["n_batches"]
    found["makespan_ns"] = prefill + (row["makespan_ns"] - prefill) * decode
    later = row["decode_time_dense_ns"]
    found["time_dense_ns"] = row["time_dense_ns"] - later + later * decode
    found["n_generated_tokens"] = row["n_generated_tokens"] * (decode_tokens + 1) / (row["decode_tokens"] + 1)
    joules = row["energy_j"] * found["makespan_ns"] / row["makespan_ns"] if row.get("energy_j") is not None else None
    found["energy_j_per_token"] = None if joules is None else joules / found["n_generated_tokens"]
    return found


# ----- tables

COLUMNS = ("identified", "ratio_identified", "with_all", "consistent")
_DERIVED = ("simulated", "low", "high", "ratio", "n_runs", "costs", "routing", "label")
_PUBLISHED = [one.name for one in fields(Published)]


def three_ways(papers: pd.DataFrame, found: Mapping[str, Identified]) -> pd.DataFrame:
    """Add identified answers to derived ones.

    Its figures with ``identified`` (the row's table left out), its ratio to the printed number, ``with_all`` (all tables tell)
    and ``consistent``: whether those constants meet the row.
    """
    answers = {answer.published: answer for one in found.values() for answer in one.answers}
    rows = papers[papers["table"] == "figure"].reset_index(drop=True)
    mine = [answers.get(published(row)) for _, row in rows.iterrows()]
    numbers = {
        "identified": [None if one is None else one.left_out for one in mine],
        "ratio_identified": [None if one is None else one.ratio(one.left_out) for one in mine],
        "with_all": [None if one is None else one.everything for one in mine],
    }
    words = ["" if one is None or one.consistent is None else "yes" if one.consistent else "no" for one in mine]
    return rows.assign(**{name: pd.Series(values, dtype=float) for name, values in numbers.items()}, consistent=words)


def read_results(source: Path | IO[str]) -> pd.DataFrame:
    """Read ``papers.csv`` or ``results.csv``: words as they are, numbers that are missing as such."""
    numbers = (*_DERIVED[:4], *COLUMNS[:3])
    return pd.read_csv(source, keep_default_na=False, na_values={name: [""] for name in numbers}).map(uncell)


def write_results(frame: pd.DataFrame) -> str:
    """Write what `three_ways` gave as CSV."""
    return str(frame[[*_PUBLISHED, *_DERIVED, *COLUMNS]].map(cell).to_csv(index=False, lineterminator="\n", float_format="%.5g"))


def write_constants(found: Mapping[str, Identified]) -> str:
    """Write the constants as CSV: by plan, and by the block that was left out (empty: none), in SI units and microseconds."""
    records = [
        {
            "plan": plan, "block": out, "constant": name, "value": value, "derived": one.base[name],
            "prior_below": one.prior[name][0], "prior_above": one.prior[name][1], "sigma": None if out else one.sigma[name],
        }
        for plan, one in found.items() for out, constants in one.constants.items() for name, value in constants.items()
    ]  # fmt: skip
    return str(pd.DataFrame(records).to_csv(index=False, lineterminator="\n", float_format="%.4g"))


def published(row: Mapping[str, object] | pd.Series) -> Published:
    """Read the printed number of a row of a table."""
    told = {name: str(row.get(name, "")) for name in _PUBLISHED}
    return Published(**{**told, "published": float(told["published"])})  # type: ignore[arg-type]


def identified(found: Mapping[str, Identified], form: Format) -> str:
    """Write rows with the answers of derived and identified constants, and those constants."""
    if form not in (Format.TABLE, Format.MD):
        records: list[dict[str, Any]] = []
        for paper, one in found.items():
            for answer in one.answers:
                values = {"derived": answer.derived, "left_out": answer.left_out, "everything": answer.everything}
                ratios = {f"ratio_{name}": answer.ratio(value) for name, value in values.items()}
                record = {"table": "row", "plan": paper, **asdict(answer.published), "block": answer.block, **values, **ratios}
                records.append(record | {"consistent": answer.consistent})
            for out, constants in one.constants.items():
                for key, value in constants.items():
                    record = {"table": "constant", "plan": paper, "block": out, "key": key, "value": value}
                    record |= {"base": one.base[key], "prior_below": one.prior[key][0], "prior_above": one.prior[key][1]}
                    records.append(record | {"sigma": None if out else one.sigma[key]})
                for model, bits in one.bits[out].items():
                    records.append({"table": "bits", "plan": paper, "block": out, "key": model, "value": bits})
        return render_records(records, form)
    heads = ["block left out", "what", "printed", "derived", "ratio", "identified", "ratio", "with all", "ratio"]
    cells = [
        [f"{paper}/{answer.block}", answer.published.what, _amount(answer.published, answer.published.published)]
        + [text for value in (answer.derived, answer.left_out, answer.everything) for text in _with_ratio(answer, value)]
        for paper, one in found.items()
        for answer in one.answers
    ]
    parts = [render(heads, cells, form, heads[2:])]
    for paper, one in found.items():
        keys = list(one.constants[""])
        models = list(one.bits[""])
        rows = [["base", *(f"{one.base[key]:.3g}" for key in keys), *("" for _ in models)]]
        for out, constants in one.constants.items():
            told = [f"{constants[key]:.3g}" for key in keys] + [f"{one.bits[out][model]:g}" for model in models]
            rows.append([out or "none", *told])
        below, above = ({key: one.prior[key][side] for key in keys} for side in (0, 1))
        before = (("one standard deviation before, below", below), ("and above", above))
        for words, sigma in (*before, ("and after", one.sigma)):
            rows.append([words, *(f"x {math.exp(sigma[key]):.2f}" for key in keys), *("" for _ in models)])
        heads = [*keys, *(f"bits of {model}" for model in models)]
        parts.append(render([f"{paper}: block left out", *heads], rows, form, heads))
    return "\n".join(parts)


def _amount(row: Published, value: float) -> str:
    return f"{value:.4g} {row.unit}".strip()


def _with_ratio(answer: Answer, value: float | None) -> tuple[str, str]:
    ratio = answer.ratio(value)
    return ("-", "-") if value is None or ratio is None else (f"{value:.3g}", f"{ratio:.2f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Answer each block of printed rows by constants of the paper's other rows; takes half an hour.

    The rows of papers in experiments/papers/_identify.yaml are answered three ways: by the profile to which nothing was fitted,
    by constants that all other tables of the paper give, and by those that all tables give. A row that even those miss is
    inconsistent with the rest of its paper. With --out it takes the whole runs of moesim papers from that folder, keeps its own
    there, and leaves identified.csv, constants.csv, results.csv (with papers.csv there) and their picture.
    """
    options = parser("experiments.research.tables.identify_papers", main.__doc__, jobs=True)
    options.add_argument("names", nargs="*", metavar="PAPER", help="papers; default: all")
    return run(_identify, options, arguments)


def _identify(given: Namespace) -> None:
    folder, out = paper_folder(), given.out
    chosen = choose(figures(read_published(folder / PUBLISHED), folder), given.names)
    configs = {name: load_config(folder / f"{name}.yaml") for one in chosen for name in one.experiments}
    check_answers((row for one in chosen for row in one.rows), configs, str(folder / PUBLISHED))
    plans = read_plans(folder)
    papers_chosen = {one.paper for one in chosen}
    asked = {name: plan for name, plan in plans.items() if plan.paper in papers_chosen}
    if not asked:
        known = ", ".join(dict.fromkeys(plan.paper for plan in plans.values()))
        raise ConfigError(f"identify_papers: expected a paper of {known}, got none; name one")
    begin_papers(out)
    found = {}
    traces: dict[str, Trace] = {}
    with TemporaryDirectory() as temporary, Workers(given.jobs) as workers:
        for name, plan in asked.items():
            rows = [row for one in chosen if one.paper == plan.paper for row in one.rows]
            if len({plan.block_of(row) for row in rows} - {None}) < len(plan.blocks):
                raise ConfigError(f"identify_papers: {name}: expected rows of all its blocks, got fewer; name the whole paper")
            raw, path, _ = read_profile(plan.hardware, f"{NAME}: {name}: hardware")
            place = path or plan.hardware
            machine = Machine(override(raw, plan.start, place), place, plan.free, plan.more)
            evaluate = Evaluator(plan, machine, rows, configs, workers, (out or Path(temporary)) / "identify" / name, traces)
            say(f"{name}: constants from {len(plan.blocks)} blocks of rows")
            found[name] = identify_paper(plan, machine.constants, rows, evaluate.whole(out), evaluate)
    if out is not None:
        write(out, _answered(out, found), PAPERS, owned=True)
    sys.stdout.write(identified(found, given.form))


def _answered(out: Path, found: dict[str, Identified]) -> dict[str, bytes]:
    """Return files of the answers, next to the derived ones if `moesim papers` has left them in this folder."""
    files = {"identified.csv": identified(found, Format.CSV).encode(), "constants.csv": write_constants(found).encode()}
    if (out / "papers.csv").is_file():
        frame = three_ways(read_results(out / "papers.csv"), found)
        files["results.csv"] = write_results(frame).encode()
        files |= pictures(printed(frame, "derived, and identified with the row's table left out"), "results")
    return files


if __name__ == "__main__":
    sys.exit(main())
