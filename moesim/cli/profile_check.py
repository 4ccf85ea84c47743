"""``moesim profile check``: all that is wrong with a profile, or what is only assumed in it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from moesim.core.table import Format, render
from moesim.core.text import shown_lines
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.problems import find_problems, reading_remarks
from moesim.hardware.types import TRANSFERS
from moesim.live.profiler.show import unit_of, value_text
from moesim.model import load_model
from moesim.policies.registry import POLICIES, make_policy

_MODEL = "mixtral-8x7b"  # any: whose experts are copied does not decide how


def check(profile: Annotated[str, typer.Argument(metavar="NAME|FILE.yaml", help="A profile.")]) -> int:
    """Print all that is missing or wrong in a profile, one line each; else what is assumed, and which policies cannot copy.

    Exit code 0: complete; 2: something is missing or wrong.

    Example: moesim profile check rtx3090-epyc7532
    """
    problems = find_problems(profile, "profile check")
    if problems:
        n = len(problems)
        lines = [f"{profile}: {n} problem{'s' if n > 1 else ''}", *(f"  {' '.join(one.split())}" for one in problems)]
        sys.stdout.write(shown_lines("\n".join(lines) + "\n"))
        return 2
    found = load_hardware(profile, "profile check")
    sys.stdout.write(shown_lines("\n".join([*_assumed(found), *reading_remarks(found), *_without_curve(found)]) + "\n"))
    return 0


def _assumed(profile: HardwareProfile) -> Iterator[str]:
    numbers = {key: number for key, number in profile.numbers.items() if number.source == "assumed"}
    yield f"{profile.name} is complete: {len(profile.numbers)} numbers, {len(numbers)} of them assumed"
    if numbers:
        rows = [[key, value_text(number.value, unit_of(key)), " ".join(number.ref.split())] for key, number in numbers.items()]
        yield render(["assumed", "value", "why"], rows, Format.TABLE, ["value"]).rstrip("\n")


def _without_curve(profile: HardwareProfile) -> Iterator[str]:
    """Name the policies that cannot copy experts to the device that computes, for want of a curve of a link."""
    model, own = load_model(_MODEL), dict[str, list[str]]()
    for name in POLICIES:
        transfer = getattr(make_policy(name), "transfer", None)
        chosen = transfer(model) if transfer is not None else None
        if chosen is not None:
            own.setdefault(chosen[0], []).append(name)
    ways = {link.name: link for backing in profile.backing for link in profile.path_between(backing, profile.compute)}
    for name, link in ways.items():
        for kind in TRANSFERS:
            if kind in link.curves:
                continue
            named = f", and so are the policies {', '.join(own[kind])}" if kind in own else ""
            yield f"links.{name}: no curve '{kind}': --transfer {kind} is refused{named}"
