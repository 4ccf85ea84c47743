"""``moesim regret``: what each decision of a policy would be worth if an oracle made it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moesim.cli.options import Jobs, Printed, Quick, Set
from moesim.cli.outputs import write_own
from moesim.core.files import check_own_folder
from moesim.core.table import Format, render, render_records
from moesim.core.text import say
from moesim.core.units import NS_PER_MS, NS_PER_S
from moesim.experiment.config import load_config
from moesim.experiment.report import cost_notes, split_notes
from moesim.experiment.resolve import Experiment
from moesim.experiment.rows import describe_run
from moesim.experiment.sweep import quick

if TYPE_CHECKING:
    from moesim.studies.regret import Regret, Step


def regret(
    file: Annotated[Path, typer.Argument(metavar="EXPERIMENT.yaml", help="The experiment.")],
    policies: Annotated[str | None, typer.Option(help="Names, separated by commas; default: all of the experiment.")] = None,
    overrides: Set = [],  # noqa: B006  (typer copies it)
    small: Quick = False,
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for a CSV and the figures.")] = None,
    form: Printed = Format.TABLE,
) -> int:
    """Replace predictions, replacement, assignment and bandwidth of each policy by their oracles, one after the other.

    In that order and reversed; then the best hit rate, the oracles one by one, and a lower bound on the makespan. The oracle of
    bandwidth is a machine whose links take no time. Results on it are marked *, and have a lower bound of their own. A negative
    share means that the run takes longer with the oracle.

    Example: moesim regret experiments/quickstart.yaml --policies dali --quick
    """
    from moesim.studies.regret import regrets

    if out is not None:
        check_own_folder(out, "regret")
    config = load_config(file, overrides)
    experiment = Experiment(quick(config, str(file)) if small else config, str(file))
    names = [name.strip() for name in policies.split(",")] if policies else []
    found = regrets(experiment, names, jobs=jobs, progress=True)
    sys.stdout.write(table(found, form))
    if out is not None:
        _write(found, out)
    failures = [f"{describe_run(one.row)}: {error}" for one in found for error in one.errors]
    for line in failures:
        say(f"moesim: {line}")
    return 1 if failures else 0


def table(found: Sequence[Regret], form: Format) -> str:
    """Write the regret of some runs."""
    from moesim.studies.regret import ASKED, DECISIONS

    if form.for_programs:
        return render_records([record for one in found for record in one.records()], form)
    varying = [key for key in ASKED if len({str(one.setting[key]) for one in found}) > 1]
    head = ["policy", *varying]
    orders = [*head, "order", "as it is", *DECISIONS, "all oracles", "bound*", "tok/s"]
    rows = [[*_named(one, varying), *cells] for one in found for cells in _orders(one)]
    alone = [
        *head, "hits %", "Belady %", "as it is", *(f"{name} alone" for name in DECISIONS), "bound*", "lower bound", "time / bound"
    ]  # fmt: skip
    beside = [[*_named(one, varying), *_alone(one)] for one in found]
    between = "\n\n" if form is Format.MD else "\n"
    notes = [
        "makespan with the oracle, and the share of the makespan as it is that it saves; -: no such decision",
        "forward: predictions first; reversed: links first",
        "* on another machine, whose links take no time; bound*: the lower bound there; lower bound: of the machine as it is",
        "Belady %: of a cache that may replace any expert; one that works layer by layer cannot reach it with few slots a layer "
        "(belady-visit of moesim trace stats is the most that it can)",
        "every figure but hits and 'as it is' is an oracle's: nobody need be able to reach it",
    ]
    first, second = render(orders, rows, form, orders[len(head) + 1 :]), render(alone, beside, form, alone[len(head) :])
    return first + "\n" + second + "\n" + between.join([*notes, *_labels(found)]) + "\n"


def _labels(found: Sequence[Regret]) -> list[str]:
    rows = [one.row for one in found if not one.errors]
    said = {f"as it is: weakest source {row.get('source_label')}; {', '.join(split_notes(row)[0])}" for row in rows}
    return [*sorted(said), *cost_notes(rows)]


def _named(one: Regret, varying: Sequence[str]) -> list[str]:
    return [str(one.row["policy"]), *("-" if one.setting[key] is None else str(one.setting[key]) for key in varying)]


def _orders(one: Regret) -> list[list[str]]:
    from moesim.studies.regret import DECISIONS

    lines = []
    for order in ("forward", "reversed"):
        steps = {step.decision: step for step in one.steps if step.order == order}
        speed = _speed(one, order)
        cells = [_saved(steps[name], one) for name in DECISIONS]
        everything = _time(one.all_replaced_ns) + ("" if one.all_replaced_ns is None else "*")
        lines.append([order, _time(one.row.get("makespan_ns")), *cells, everything, _instant_bound(one), speed])
    return lines


def _instant_bound(one: Regret) -> str:
    return _time(None if one.bounds is None else one.bounds.without_link_time_ns)


def _speed(one: Regret, order: str) -> str:
    last = [step.decode_tokens_per_s for step in one.steps if step.order == order and step.replaced][-1]
    speeds = (one.row.get("decode_tokens_per_s"), last)
    return " to ".join("-" if not isinstance(value, int | float) else f"{value:.3g}" for value in speeds)


def _alone(one: Regret) -> list[str]:
    from moesim.studies.regret import DECISIONS

    makespan, bound = one.row.get("makespan_ns"), None if one.bounds is None else one.bounds.makespan_ns
    over = f"{makespan / bound:.2f}" if isinstance(makespan, int) and bound else "-"
    steps = [_saved(one.alone(name), one) for name in DECISIONS]
    hits = [_percent(one.row.get("hit_rate")), _percent(one.best_hit_rate)]
    return [*hits, _time(makespan), *steps, _instant_bound(one), _time(bound), over]


def _saved(step: Step, one: Regret) -> str:
    base = one.row.get("makespan_ns")
    if not step.replaced:
        return "-"
    if step.saved_ns is None or not isinstance(base, int):
        return "failed"
    return f"{_time(step.after_ns)}{'*' if step.instant_links else ''} ({100 * step.saved_ns / base:+z.1f} %)"


def _time(ns: Any) -> str:
    if not isinstance(ns, int):
        return "-"
    return f"{ns / NS_PER_S:.3g} s" if ns >= NS_PER_S else f"{ns / NS_PER_MS:.3g} ms"


def _percent(share: Any) -> str:
    return f"{100 * share:.1f}" if isinstance(share, int | float) else "-"


def _write(found: Sequence[Regret], out: Path) -> None:
    import pandas as pd

    from moesim.plots.studies import regret as waterfall  # Matplotlib takes most of a second to import
    from moesim.plots.style import pictures
    from moesim.studies.regret import ASKED

    records = [record for one in found for record in one.records()]
    files = {"regret.csv": render_records(records, Format.CSV).encode()}
    by_setting: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for record in records:
        if record["base_ns"] is not None:
            by_setting.setdefault(tuple(str(record[key]) for key in ASKED), []).append(record)
    for number, rows in enumerate(by_setting.values()):
        name = "regret" if len(by_setting) == 1 else f"regret-{number}"
        files |= pictures(waterfall(pd.DataFrame(rows)), name)
    write_own(out, files, "regret")
