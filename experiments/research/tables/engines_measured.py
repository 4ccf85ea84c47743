"""Predict the measured engines of ``experiments/validation/engines.csv`` and print errors, intervals and order.

``--page`` writes the page of documentation and the table next to it.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pandas as pd

from experiments.research.tables.command import parser, run
from moesim.core.table import Format, render
from moesim.core.text import say
from moesim.studies.validation.engines import engines_file, run_engines, summary, table

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = ROOT / "docs" / "background" / "engines_measured.md"
CSV: Final = PAGE.with_suffix(".csv")
HEAD: Final = """\
# Measured engines: predicted against measured, and their order

Cache engines and hybrids on machines whose parts or profiles are known. [engines_measured.csv](engines_measured.csv) has every
prediction, [engines.csv](../../experiments/validation/engines.csv) each measurement with its source. Routing is a recording, a
model's statistics or assumed. Intervals cover other routing, the machine and the model error.

* The waits of copies from a mapped file were [identified](../guide/engines.md#what-a-cache-of-experts-needs-of-the-host) with two
  rows of PR 27861. Otherwise no number was fitted, but three choices were made with the rows at hand:
    * A cache's speed is that of its median token, since benchmarks leave out what warms up.
    * moe-speed-of-light's cache runs with kappa 1, between the 0.5 and 2 of its authors; the code's default is 0.
    * A pooled cache plans each of an expert's three matrices, which are entries of their own.

```console
moesim validate --engines experiments/validation/engines.csv
python -m experiments.research.tables.engines_measured --page
```

"""


_HEADS: Final = ["rows of", "n", "median error", "nine of ten within", "worst", "inside the interval of 90 %"]


def by_engine(frame: pd.DataFrame) -> str:
    """Write errors of all rows, of those whose hit rate was measured, and by engine; builds of one engine count together."""
    inside = (frame["low"] <= frame["measured"]) & (frame["measured"] <= frame["high"])
    hits = frame[frame["with_hits"].notna()]
    rows = [_row("all", frame["error"], inside), _row("at measured hit rates", hits["with_hits"] / hits["measured"] - 1)]
    rows += [
        _row(str(name), one["error"], inside[one.index]) for name, one in frame.groupby(frame["engine"].map(_engine), sort=False)
    ]
    return render(_HEADS, rows, Format.MD, right=_HEADS[1:])


def _row(name: str, errors: pd.Series, inside: pd.Series | None = None) -> list[str]:
    sizes = errors.astype(float).abs()
    within = "" if inside is None else f"{100 * inside.mean():.0f} %"
    worst = f"{100 * errors.iloc[int(sizes.argmax())]:+.0f} %"
    return [name, str(len(errors)), f"{100 * sizes.median():.0f} %", f"{100 * sizes.quantile(0.9):.0f} %", worst, within]


def _engine(label: str) -> str:
    """Return the engine of a label.

    >>> _engine("llama.cpp b8125"), _engine("llama.cpp --n-cpu-moe"), _engine("llama.cpp PR 27861, copies issued early")
    ('llama.cpp', 'llama.cpp', 'llama.cpp PR 27861')
    """
    name = label.partition(",")[0].partition(" --")[0]
    return "llama.cpp" if name.startswith("llama.cpp b") else name


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write the page."""
    options = parser("experiments.research.tables.engines_measured", __doc__)
    options.add_argument("--page", action="store_true", help="write docs/background/engines_measured.md and .csv")
    return run(_printed, options, arguments)


def _printed(given: Namespace) -> None:
    result = run_engines(engines_file(), progress=True)
    if not given.page:
        sys.stdout.write(table(result, given.form))
        print("\n".join(summary(result)))
        return
    CSV.write_text(table(result, Format.CSV).replace(f"{ROOT}/", ""), encoding="utf-8")
    said = "\n".join(f"* {line}" for line in summary(result) if line.startswith(("order", "skipped")))
    wrong = [[machine, model, f"{right} of {n}", lines] for machine, model, n, right, lines in result.orders if right < n]
    orders = render(["machine", "model", "pairs in order", "wrong: faster over slower line"], wrong, Format.MD)
    PAGE.write_text(f"{HEAD}{by_engine(result.frame)}\n{said}\n\n{orders}", encoding="utf-8")
    say(f"wrote {PAGE} and {CSV}")


if __name__ == "__main__":
    sys.exit(main())
