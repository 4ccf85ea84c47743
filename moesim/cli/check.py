"""``moesim check``: the common checks of policies."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from moesim.cli.options import policy_list
from moesim.cli.outputs import show
from moesim.core.progress import telling
from moesim.core.text import complain, shown_lines
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
    """Check policies on tiny workloads. Separate several by commas.

    Where a policy states a rule, its decisions in small runs are compared with that rule, written down anew from its source.

    A class of your own is named my_module:MyClass; the module lies in the current folder or is installed. Nothing is written.
    Exit code 0: all pass; 1: one fails a check; 2: a name, an option or what a class declares is wrong.

    Example: moesim check 'lru,{name: dali, w_size: 2}'
    """
    from moesim.testing import examine_policy
    from moesim.testing.rules import examine_rules

    machine = load_hardware(hardware) if hardware is not None else None
    specs = _specs(policies)
    failed = []
    for spec in specs:
        make = partial(policy_class(spec["name"]), **{key: value for key, value in spec.items() if key != "name"})
        with telling() as tell:
            report = examine_policy(make, hardware=machine, tell=tell)
            tell(f"comparing {report.policy} with its rule")
            rules = [] if report.failures else examine_rules(make, hardware=machine)
        show(shown_lines("\n".join([str(report), *map(str, rules)]) + "\n"))
        if report.failures:
            of = f"{len(report.failures)} of {len(report.checks)} checks"
            failed.append(f"moesim: {report.policy} fails {of}; the first: {report.failures[0].what}")
        failed += [f"moesim: {report.policy} {one.kind}s: not what its rule says" for one in rules if one.verdict == "failed"]
    for line in failed:
        complain(line)
    return 1 if failed else 0


def _specs(policies: str) -> list[dict[str, Any]]:
    specs = []
    for i, written in enumerate(policy_list(policies, "check: POLICIES")):
        place = f"check: POLICIES[{i}]"
        for spec in policies_of(written, place):
            make_policy(spec, place)
            specs.append(spec)
    if not specs:
        raise ConfigError("check: POLICIES: expected at least one policy, got none; moesim list policies has the names")
    return specs
