"""Options that several commands have."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.core.limits import PROCESSES
from moesim.core.table import Format


def name_or_mapping(text: str, place: str) -> Any:
    """Read a mapping in braces; everything else is a name or a path."""
    from moesim.core.yaml_reader import read_yaml_value  # YAML takes a while to import, and few commands read it

    return read_yaml_value(text, place) if text.lstrip().startswith("{") else text


def with_engine(hardware: Any, engine: str | None) -> Any:
    """Return a machine with the engine of an option, as ``{base: NAME, engine: NAME}``."""
    if engine in (None, "own"):
        return hardware
    return {**(hardware if isinstance(hardware, dict) else {"base": hardware}), "engine": engine}


def policy_list(text: str, place: str) -> Any:
    """Read policies separated by commas: names, mappings in braces, labels of tables."""
    from moesim.core.yaml_reader import read_yaml_value

    quoted = re.sub(r"(?:^|(?<=,))\s*[\w.:-]+\([^()]*\)", lambda found: json.dumps(found[0].strip()), text)
    return read_yaml_value(f"[{quoted}]", place)


_SIMULATORS = ("simpy", "native")


def _force(simulator: str | None) -> str | None:
    from moesim.engine.entry import force  # the engine takes a while to import, and few commands have one

    return force(simulator)


def _engine(name: str | None) -> str | None:
    """Return the engine whose costs count; the simulator's engines were chosen by this name before."""
    if name in _SIMULATORS:
        _force(name)
        return None
    return name


def _verify(share: float | None) -> float | None:
    from moesim.engine.entry import verify_share

    return verify_share(share)


HitRate = Annotated[
    str | None,
    typer.Option(metavar="RATE@SLOTS", help="LRU hit rate that an engine counted: 61%@16."),
]
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the YAML: cache.ratio=0.5."),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", min=1, max=PROCESSES.most, help="Processes.", show_default="all cores if faster"),
]
Quick = Annotated[bool, typer.Option("--quick", help="First value of each sweep, at most 4 decode tokens.")]
Trust = Annotated[bool, typer.Option("--trust", help="Import policies and schedulers that are not moesim's.")]
Inputs = Annotated[
    Path | None,
    typer.Option("--inputs", metavar="DIR", help="Folder of traces and, with --trust, of modules."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")]
Printed = Annotated[Format, typer.Option("-o", "--output-format", help="How to print it.")]
Simulator = Annotated[
    str | None,
    typer.Option(metavar="simpy|native", callback=_force, help="Default: native if it is built."),
]
Engine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", callback=_engine, help="Whose costs count (moesim list engines), or machine.",
    ),
]  # fmt: skip
Verify = Annotated[
    float | None,
    typer.Option(
        "--verify", min=0, max=1, metavar="SHARE", callback=_verify,
        help="Share of the runs to check on both simulators.",
    ),
]  # fmt: skip
