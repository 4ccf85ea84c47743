"""``moesim whatif``: what another machine, model or setting would change."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Engine, Jobs, Printed, Quick, Set, name_or_mapping
from moesim.cli.outputs import print_answer
from moesim.core.files import check_own_folder
from moesim.core.limits import TOKENS
from moesim.core.table import Format


def whatif(
    file: Annotated[Path | None, typer.Argument(metavar="BASE.yaml", help="The experiment as it is: one setting.")] = None,
    vary: Annotated[
        list[str],
        typer.Option(
            metavar="'KNOB VALUES'", help="Such as 'link.bytes_per_s x0.5,x2'; & joins knobs.", show_default="link, CPU, GPU"
        ),
    ] = [],  # noqa: B006  (typer copies it)
    overrides: Set = [],  # noqa: B006
    model: Annotated[str | None, typer.Option(help="Instead of an experiment: a model, with --hardware, on llama.cpp.")] = None,
    hardware: Annotated[str | None, typer.Option(help="Its machine: parts joined by +, a name or path of a profile.")] = None,
    context: Annotated[
        int | None, typer.Option(min=1, max=TOKENS.most, help="Room for so many tokens, with --model.", show_default="16384")
    ] = None,
    engine: Engine = None,
    small: Quick = False,
    knobs: Annotated[bool, typer.Option("--knobs", help="List what can be varied, and stop.")] = False,
    look: Annotated[bool, typer.Option("--next/--no-next", help="Look where along each knob the limit changes.")] = True,
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for whatif.parquet and whatif.csv.")] = None,
    form: Printed = Format.TABLE,
) -> int:
    """Vary one thing at a time: speed, limit and next bottleneck.

    Example: moesim whatif experiments/fiddler-a6000.yaml --quick --vary "link.bytes_per_s x0.5,x2" --vary "cpu.memory 4->8"
    """
    if knobs:
        from moesim.studies.whatif.show import knob_table

        sys.stdout.write(knob_table(form))
        return 0
    if out is not None:
        check_own_folder(out, "whatif")
    from moesim.api.studies import whatif as vary_experiment

    spec, machine = (
        None if text is None else name_or_mapping(text, f"whatif: --{key}")
        for key, text in (("model", model), ("hardware", hardware))
    )
    costed = [] if engine is None else [f"engine={json.dumps(engine)}"]
    found = vary_experiment(
        file, vary, model=spec, hardware=machine, context=context, overrides=[*overrides, *costed], quick=small, look=look,
        jobs=jobs,
    )  # fmt: skip
    return print_answer(found, form, out, "whatif")
