"""All pairs of options with more values than `test_option_pairs`: half an hour; it runs if it is named.

``pytest tests/long_option_pairs.py -n auto``
"""

from __future__ import annotations

import pytest
from option_pairs_kit import PART_SUBJECTS, POLICY_SUBJECTS, Pairs, Subject


@pytest.mark.parametrize(
    "subject", [*POLICY_SUBJECTS, *PART_SUBJECTS], ids=lambda subject: f"{subject.kind} {subject.name}".strip()
)
def test_pairs_of_options(subject: Subject) -> None:
    assert Pairs(subject, every=True).problems() == []
