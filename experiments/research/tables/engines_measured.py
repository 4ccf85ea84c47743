"""Predict the measured engines of ``experiments/validation/engines.csv`` and print errors, intervals and order.

``--page`` writes the page of documentation.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from experiments.research.tables.command import parser, run
from moesim.core.table import Format
from moesim.core.text import say
from moesim.studies.validation.engines import engines_file, run_engines, summary, table

ROOT: Final = Path(__file__).resolve().parents[3]
PAGE: Final = ROOT / "docs" / "background" / "engines_measured.md"
HEAD: Final = """\
# Measured engines: predicted against measured, and their order

Cache engines and hybrids on machines whose parts or profiles are known, each row with its source in
[engines.csv](../../experiments/validation/engines.csv). Routing is a recording, a model's statistics or assumed. The
interval covers other routing, the machine and the model error. *At these hits* is the speed at the hit rate that the source
measured, on the line through the runs with other routing.

The waits of copies from a mapped file were [identified](../guide/engines.md#what-a-cache-of-experts-needs-of-the-host) with two
rows of PR 27861. Otherwise no number was fitted to a row, but three choices were made with the rows at hand. A cache's speed is
that of its median token, since benchmarks leave out what warms up. moe-speed-of-light's cache runs with kappa 1, between the
0.5 and 2 of its authors; the code's default is 0. A pooled cache plans each of an expert's three matrices, which are entries of
their own.

```console
moesim validate --engines experiments/validation/engines.csv
python -m experiments.research.tables.engines_measured --page
```

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write the page."""
    options = parser("experiments.research.tables.engines_measured", __doc__)
    options.add_argument("--page", action="store_true", help="write docs/background/engines_measured.md")
    return run(_printed, options, arguments)


def _printed(given: Namespace) -> None:
    result = run_engines(engines_file(), progress=True)
    if not given.page:
        sys.stdout.write(table(result, given.form))
        print("\n".join(summary(result)))
        return
    said = "\n".join(f"* {line}" for line in summary(result))
    PAGE.write_text(f"{HEAD}{said}\n\n{table(result, Format.MD)}", encoding="utf-8")
    say(f"wrote {PAGE}")


if __name__ == "__main__":
    sys.exit(main())
