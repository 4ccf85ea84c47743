"""``moesim profile detect``: a start of a profile, from what this machine says of itself."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Overwrite
from moesim.cli.outputs import all_or_none, check_out, note_written
from moesim.core.files import write_bytes
from moesim.core.text import say, shown_lines
from moesim.errors import ConfigError
from moesim.live.profiler.detect import detect as ask
from moesim.live.profiler.detect import detected_text


def detect(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Where to write it, named like the machine.", show_default="printed"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write what can be asked of this machine without measuring, as a profile of a few numbers to be filled in.

    Example: moesim profile detect --out mybox.yaml
    """
    name = "this-machine"
    if out is not None:
        check_out(out, suffix=".yaml", overwrite=overwrite)
        name = out.stem
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"--out {out}: expected a name of letters, digits, dots and dashes, got '{name}'; choose another")
    found = ask()
    text = detected_text(found, name)
    if out is None:
        sys.stdout.write(shown_lines(text))
    else:
        with all_or_none(out):
            write_bytes(out, text.encode())
            note_written([out], "profile detect")
        say(f"wrote {out}")
    for remark in found.remarks:
        say(remark)
    for key, words in found.missing.items():
        say(f"missing: {key}, {words}")
    say("papers print them; moesim profile measure measures them, and moesim calibrate corrects rough ones by observed speeds")
