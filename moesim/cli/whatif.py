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
from moesim.errors import ConfigError


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
    """Vary one thing at a time: the new speed, what limits it, what limited it before, and where the next bottleneck begins.

    Example: moesim whatif experiments/fiddler-a6000.yaml --quick --vary "link.bytes_per_s x0.5,x2" --vary "cpu.memory 4->8"
    """
    if knobs:
        from moesim.studies.whatif.show import knob_table

        sys.stdout.write(knob_table(form))
        return 0
    if model is not None or hardware is not None:
        if file is not None or model is None or hardware is None:
            raise ConfigError("whatif: expected --model with --hardware, or an experiment file, got another; give one of them")
        return _of_a_machine(model, hardware, context, vary, form)
    if file is None:
        raise ConfigError("whatif: expected an experiment file, got none; name one, give --model and --hardware, or see --knobs")
    if out is not None:
        check_own_folder(out, "whatif")
    from moesim.api.studies import whatif as vary_experiment

    costed = [] if engine is None else [f"engine={json.dumps(engine)}"]
    return print_answer(
        vary_experiment(file, vary, overrides=[*overrides, *costed], quick=small, look=look, jobs=jobs), form, out, "whatif"
    )


def _of_a_machine(model: str, hardware: str, context: int | None, vary: list[str], form: Format) -> int:
    """Print llama.cpp's best setting on a machine, and on the machine with each change."""
    from moesim.api.studies import of_drafts
    from moesim.studies.advice.question import Asked
    from moesim.studies.advice.vary import USUAL, drafts_of, table
    from moesim.studies.advice.vary import vary as each_of
    from moesim.studies.whatif.drafts import drafts_alone
    from moesim.studies.whatif.settings import parse_vary

    names = name_or_mapping(model, "whatif: --model"), name_or_mapping(hardware, "whatif: --hardware")
    variations = [together for text in vary or USUAL for together in parse_vary(text)]
    if (setting := drafts_alone(variations)) is not None:
        return print_answer(of_drafts(drafts_of(Asked(*names, context=context), setting)), form, None, "whatif")
    sys.stdout.write(table(each_of(Asked(*names, context=context), variations), form))
    return 0
