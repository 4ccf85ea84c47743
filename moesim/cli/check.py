"""``moesim check``: the common checks of policies."""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated, Any

import typer

from moesim.cli.options import policy_list
from moesim.core.progress import telling
from moesim.core.text import say, shown_lines
from moesim.errors import ConfigError
from moesim.experiment.sweep import policies_of
from moesim.hardware import load_hardware
from moesim.policies.registry import make_policy, policy_class


def check(
    policies: Annotated[
        str, typer.Argument(metavar="POLICIES", help="Names, module:Class, name(option=value) or {name: ..., option: ...}.")
    ],
    hardware: Annotated[
        str | None, typer.Option(help="Profile to run on; default: the one that the policy names, else a tiny machine.")
    ] = None,
) -> int:
    """Check policies on tiny workloads, and print what was checked; separate several by commas.

    A class of your own is named my_module:MyClass; the module lies in the current folder or is installed. Nothing is written.
    Exit code 0: all pass; 1: one fails a check; 2: a name, an option or what a class declares is wrong.

    Example: moesim check 'lru,{name: dali, w_size: 2}'
    """
    from moesim.testing import examine_policy

    machine = load_hardware(hardware) if hardware is not None else None
    specs = _specs(policies)
    reports = []
    for spec in specs:
        options = {key: value for key, value in spec.items() if key != "name"}
        with telling() as tell:
            reports.append(examine_policy(partial(policy_class(spec["name"]), **options), hardware=machine, tell=tell))
        sys.stdout.write(shown_lines(f"{reports[-1]}\n"))
    failed = [report for report in reports if report.failures]
    for report in failed:
        of = f"{len(report.failures)} of {len(report.checks)} checks"
        say(f"moesim: {report.policy} fails {of}; the first: {report.failures[0].what}")
    return 1 if failed else 0


def _specs(policies: str) -> list[dict[str, Any]]:
    """Read policies as ``compare`` does, and see that each can be built."""
    specs = []
    for i, written in enumerate(policy_list(policies, "check: POLICIES")):
        place = f"check: POLICIES[{i}]"
        for spec in policies_of(written, place):
            make_policy(spec, place)
            specs.append(spec)
    if not specs:
        raise ConfigError("check: POLICIES: expected at least one policy, got none; moesim list policies has the names")
    return specs
