"""The shipped evidence for intervals is what its command makes."""

from __future__ import annotations

import pytest

from experiments.research.tables.residuals import MEASURED_PROFILES, of_public, of_validation
from moesim.studies.advice.recommend import read_residuals
from moesim.studies.validation.public import run_public
from moesim.studies.validation.public_tables import checks_file, read_checks


def test_the_shipped_table_is_that_of_the_shipped_validations():
    shipped = read_residuals()
    anew = [one for profile in MEASURED_PROFILES for one in of_validation(profile)]
    assert [one for one in shipped if one.profile == "measured"] == anew
    checks = {check.check: check for check in read_checks(checks_file())}
    expected = {f"public {c.check}" for c in checks.values() if c.status == "predicted" and c.metric == "decode_tokens_per_s"}
    assert {one.figure for one in shipped if one.profile == "derived"} == expected


def test_public_figures_are_what_the_simulator_says_now():
    policies = {check.check: check.policy for check in read_checks(checks_file())}
    anew = of_public(run_public(rows=["6", "7"], plot=False, progress=False).frame, policies)
    shipped = {one.figure: one for one in read_residuals()}
    assert len(anew) == 3
    for one in anew:
        assert shipped[one.figure].ratio == pytest.approx(one.ratio, rel=1e-3) and shipped[one.figure].experts == one.experts
