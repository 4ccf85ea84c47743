"""Golden results of options: the records of small runs with each option of each policy at other values than its default.

Parts that replace others are tried together, two by two, and so is leaving the predictor out. ``--regenerate`` writes
``tests/policies/golden_options.json`` anew; with ``-k dali`` only those of the selected policies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest

from tests.policies.options_kit import ALL_PARTS, BESIDE, GOLDEN, POLICY_SUBJECTS, Options, Subject, results

REMEDY = "if the change is meant, run this test with --regenerate and say why"


def variants(subject: Subject) -> Iterator[Options]:
    """Give options that the policy accepts: each value of each option with what it needs, pairs that choose parts or sources."""
    values = subject.values(every=False)
    choices = {name: tried for name, tried in values.items() if name in (*ALL_PARTS, "scheduler") or None in tried}
    found = [{**BESIDE.get((subject.name, name), {}), name: value} for name, tried in values.items() for value in tried]
    for a, b in combinations(choices, 2):
        found += [{a: one, b: other} for one, other in product(choices[a], choices[b])]
    yield from (options for options in found if not subject.refusal(options))


@pytest.mark.parametrize("subject", POLICY_SUBJECTS, ids=lambda subject: subject.name)
def test_golden_options(subject: Subject, regenerate: bool) -> None:
    kept: dict[str, dict[str, Any]] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if regenerate:
        found = results(subject, variants(subject))
        policies = {one.name for one in POLICY_SUBJECTS}
        kept = {name: of for name, of in kept.items() if name in policies} | ({subject.name: found} if found else {})
        GOLDEN.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")
        return
    of = kept.get(subject.name, {})
    found = results(subject, map(json.loads, of))
    moved = [options for options in of | found if of.get(options) != found.get(options)]
    assert not moved, "\n  ".join([f"{subject.name} moved with these options; {REMEDY}:", *moved])
