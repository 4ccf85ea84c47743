"""What a command does, a function does: every verb has one, and every option of the verb is an argument of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pkgutil import resolve_name
from typing import Any

import pytest
import typer

from moesim.cli.main import _app

PUBLIC = {  # verbs whose function is in `moesim`
    **{verb: verb for verb in (
        "run", "compare", "capacity", "whatif", "recommend", "calibrate", "diff", "plot", "report", "replay", "papers",
        "league", "regret", "validate",
    )},
    "trace import": "trace.import_", "trace stats": "stats",
    **{verb: verb for verb in (
        "trace caches", "trace calibrate", "trace catalogue", "trace export", "trace fit", "trace learn", "trace lookahead",
        "trace record", "trace split", "trace synthesize", "profile check", "profile compare", "profile detect",
        "profile measure", "profile new", "profile show",
    )},
}  # fmt: skip
BELOW = {  # verbs whose command prints or writes what another function returns
    "demo": "moesim:compare",
    "explore": "moesim.explore.server:serve",
    "check": "moesim.testing:examine_policy",
    "list": "moesim.policies.registry:policy_info",
    "model": "moesim.model:Card",
    "schema": "moesim.experiment.config:json_schema",
    "bench": "moesim.studies.bench:run_case",
}
SAME = {  # options -> arguments, where these have another name
    "file": "experiment", "small": "quick", "arguments": "kinds", "names": "figures", "column": "columns",
    "base": "from_", "paste": "from_", "system": "os", "of": "for_", "trace": "for_", "setting": "options",
}  # fmt: skip
TERMINAL = {  # options that are about what is printed, or that another function of Python answers
    "*": {"form", "wide", "notes", "sort", "long", "shown", "listed", "knobs", "dry"},
    "run": {"engine"},  # overrides={'engine': ...}
    "plot": {"baseline", "x", "y", "metric", "panel", "more"},  # `**options`
    "whatif": {"engine", "out"},  # overrides={'engine': ...}; Study.save
    "recommend": {"out"}, "capacity": {"out"}, "regret": {"out"},  # save
    "calibrate": {"file", "model", "hardware", "engine"},  # observations, models, base, and the engine of the base
    "trace stats": {"plot"},  # save
    "trace lookahead": {"out"},  # save
    "trace import": {"form"}, "trace export": {"form"},  # format
}  # fmt: skip


def verbs(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    for name, inside in getattr(command, "commands", {}).items():
        if hasattr(inside, "commands"):
            yield from verbs(inside, (*path, name))
        else:
            yield " ".join((*path, name)), inside


VERBS = dict(verbs(typer.main.get_command(_app)))


def test_every_verb_has_a_function() -> None:
    assert set(PUBLIC) | set(BELOW) == set(VERBS) and not set(PUBLIC) & set(BELOW)


@pytest.mark.parametrize("verb", BELOW)
def test_the_function_that_a_command_calls_is_there(verb: str) -> None:
    if verb == "explore":
        pytest.importorskip("nicegui", reason="the page needs nicegui")
    assert callable(resolve_name(BELOW[verb]))


@pytest.mark.parametrize("verb", PUBLIC)
def test_every_option_is_an_argument(verb: str) -> None:
    function = resolve_name(f"moesim:{PUBLIC[verb].replace(' ', '.')}")
    arguments = set(inspect.signature(function).parameters)
    options = {str(one.name) for one in VERBS[verb].params if one.name != "help"} - TERMINAL["*"] - TERMINAL.get(verb, set())
    assert not {name for name in options if name not in arguments and SAME.get(name) not in arguments}
    assert inspect.getdoc(function)
