"""One rule for a number wherever it is printed: shares computed as routed, and no zero with a minus."""

from __future__ import annotations

import ast
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moesim.core.table import Format
from moesim.core.units import format_ns
from moesim.experiment.report import result_table
from moesim.metrics.fidelity import fresh_cell, fresh_percent, is_exact
from moesim.plots.captions import meaning
from moesim.plots.result_rows import inexact, star
from moesim.plots.studies import _percent
from moesim.reporting.tables import _fresh
from moesim.studies.diff import _value
from moesim.studies.regret import Step, _saved

PACKAGE = Path(__file__).resolve().parents[2] / "moesim"


@pytest.mark.parametrize(("share", "percent"), [(0.9567, 95.6), (0.99999, 99.9), (0.568, 56.8), (0.29, 29.0), (0.0, 0.0)])
def test_tables_figures_captions_and_pages_round_the_share_as_routed_down(share: float, percent: float) -> None:
    row: dict[str, Any] = {"policy": "daop", "batch_size": 1, "cache_ratio": 0.25, "notes": "", "fidelity_fresh_decode": share}
    table = result_table([row], Format.CSV), result_table([row], Format.MD, wide=True)
    assert fresh_percent(share) == _fresh(row) == percent
    assert f"| {percent:.1f}* |" in table[1]
    assert fresh_cell(share) == f"{percent:.1f}*"
    assert f"computed as routed: daop {percent:g} %;" in meaning(inexact(pd.DataFrame([row])))
    assert f"{share}" in table[0]  # programs get it unrounded


def test_what_is_exact_but_for_the_rounding_of_sums_is_100() -> None:
    assert is_exact(1 - 1e-12) and not is_exact(1 - 1e-6)
    assert fresh_cell(1 - 1e-12) == "100" and star(1 - 1e-12) == ""
    assert star(0.99999) == "*" and "a 99.9 %;" in meaning({"a": (0.99999, 0.99999)})
    assert star(1.0) == star(math.nan) == "" == meaning({})


class _Run:
    row = {"makespan_ns": 10_000_000}  # noqa: RUF012


def test_a_change_that_rounds_to_nothing_has_no_minus() -> None:
    step = Step("forward", "links", True, before_ns=10_000_000, after_ns=10_000_001)
    run: Any = _Run()
    assert _saved(step, run) == "10 ms (+0.0 %)"
    assert _saved(replace(step, after_ns=10_100_000), run) == "10.1 ms (+1.0 %)"
    assert _value(-0.0, "ns", sign=True) == "+0 ns"
    assert _value(-3, "count", sign=True) == "-3"
    assert _percent(-0.01) == "±0%"
    assert format_ns(-0.2) == "0 ns"


@pytest.mark.long
def test_every_signed_number_is_written_without_negative_zero() -> None:
    """A format with a sign is one of a difference, which may round to nothing from below: ``z`` takes the minus off."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                spec = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.format_spec.values)
                if re.fullmatch(r"(\+|\{\}).*\.\d[efg%]", spec) and "z" not in spec:
                    found.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {spec}")
    assert not found
