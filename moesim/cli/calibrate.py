"""``moesim calibrate``: a machine's constants from a few observed speeds."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.core.output_folder import OutputFolder, check_own_folder
from moesim.core.progress import telling
from moesim.core.table import Format
from moesim.core.text import say
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError


def calibrate(
    file: Annotated[Path, typer.Argument(metavar="OBSERVATIONS", help="CSV table, or what llama-bench -o json|jsonl|csv wrote.")],
    hardware: Annotated[str, typer.Option(help="Profile to begin with: a name, a path, or {base: NAME, key: value}.")],
    model: Annotated[
        list[str], typer.Option("--model", help="Model of llama-bench's rows: a name, or PART OF ITS TYPE=NAME.")
    ] = [],  # noqa: B006  (typer copies it)
    free: Annotated[list[str], typer.Option("--free", help="Constant to free; again for more.", show_default="all")] = [],  # noqa: B006
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for profile, page and figure; its name is the machine's.")
    ] = None,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print the constants.")] = Format.TABLE,
) -> int:
    """Identify a machine's rates and fixed costs from observed speeds, with intervals and what to measure next.

    Example: moesim calibrate experiments/calibrate/rtx2070super.csv --hardware rtx2070s-i5-12400f
    """
    from moesim.studies.identify.identify import identify  # SciPy takes most of a second to import
    from moesim.studies.identify.next_line import next_lines
    from moesim.studies.identify.predictor import MEMO, memo_in
    from moesim.studies.identify.reading import read_observations
    from moesim.studies.identify.report import constants_table, files, remarks, rows_table

    name = "identified"
    if out is not None:
        check_own_folder(out, "calibrate")
        name = out.resolve().name
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(
                f"--out {out}: expected a name of letters, digits, dots and dashes, as it names a profile, got '{name}'"
            )
    base: Any = read_yaml_value(hardware, "calibrate: --hardware") if hardware.lstrip().startswith("{") else hardware
    rows = read_observations(file, model)
    with telling() as tell, memo_in(out) as memo:
        found = identify(base, rows, free=free, name=name, memo=memo, tell=tell)
        tell("what to measure next")
        lines = next_lines(found)
    sys.stdout.write(constants_table(found, form))
    if not form.for_programs:
        sys.stdout.write("\n" + rows_table(found, form) + "\n" + "".join(f"{one}\n" for one in remarks(found, lines)))
    if out is not None:
        written = files(found, rows, lines, hardware)
        OutputFolder(out, "calibrate").replace(written, last="summary.json", keep=(MEMO,))
        say(f"wrote {out}")
    return 0
