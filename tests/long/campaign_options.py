"""All pairs of options of policies and parts, with more values, settings and policies around parts than `test_option_pairs`."""

from __future__ import annotations

import pytest

from tests.long.kit import Tally
from tests.policies.option_pairs_kit import OTHER_PART_SUBJECTS, PART_SUBJECTS, POLICY_SUBJECTS, Pairs


def test_pairs_of_options(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    only = request.config.getoption("--only-kinds")
    tally = Tally("options", request.config.getoption("--campaign-log"))
    for subject in (*POLICY_SUBJECTS, *PART_SUBJECTS, *OTHER_PART_SUBJECTS):
        kind = f"{subject.kind} parts of {subject.policy}" if subject.kind else subject.name
        if not only or kind in only:
            for outcome, finding in Pairs(subject, every=subject not in OTHER_PART_SUBJECTS).cases():
                tally.add(kind, outcome, finding and f"{subject.name}: {finding}")
    tally.finish(capsys)
