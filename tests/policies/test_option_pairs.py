"""No option is accepted that changes nothing beside the others: all pairs of options of all policies and parts.

Nor is one offered that never can.

Of policies with the same options one is tried here. `tests/long/campaign_options.py` tries all of them, more values, and every
setting where an option is refused.
"""

from __future__ import annotations

import pytest

from moesim.policies.declare import option_parameters
from tests.policies.option_pairs_kit import PART_SUBJECTS, POLICY_SUBJECTS, Pairs, Subject

DIFFERENT = list({tuple(sorted(option_parameters(subject.cls))): subject for subject in POLICY_SUBJECTS}.values())


@pytest.mark.long
@pytest.mark.parametrize("subject", DIFFERENT, ids=lambda subject: subject.name)
def test_pairs_of_options_of_a_policy(subject: Subject) -> None:
    assert Pairs(subject).problems() == []


@pytest.mark.parametrize("subject", POLICY_SUBJECTS, ids=lambda subject: subject.name)
def test_an_option_of_a_policy_can_matter(subject: Subject) -> None:
    """What never does is to be fixed, so that `moesim list policies` does not offer it; that includes all presets."""
    assert Pairs(subject).dead() == []


@pytest.mark.long
@pytest.mark.parametrize("subject", PART_SUBJECTS, ids=lambda subject: f"{subject.kind} {subject.name}")
def test_pairs_of_options_of_a_part(subject: Subject) -> None:
    assert Pairs(subject).problems() == []
