"""The list of all printed numbers agrees with the published rows and with what is simulated now."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moesim.errors import ConfigError
from tests.docs import claims_kit
from tests.docs.claims_kit import (
    CANNOT,
    NOT_REPRODUCED,
    NUMBERS,
    SETUP,
    STATUSES,
    judged,
    read_claims,
    results,
    rows_of,
    same_number,
)

RESULTS = results()
CLAIMS = read_claims()
AGAIN = "python -m tests.docs.claims_kit writes them anew"


def test_every_published_row_is_named_by_a_claim():
    named = {index for claim in CLAIMS for index in rows_of(claim, RESULTS).index}
    left = RESULTS.loc[[index for index in RESULTS.index if index not in named], ["paper", "figure", "setting", "system", "over"]]
    assert left.empty, f"published rows that no claim names: {left.to_numpy().tolist()}"


def test_claims_name_rows_that_have_their_number():
    for claim in CLAIMS:
        rows = rows_of(claim, RESULTS)
        assert not claim.row or len(rows), f"no published row: {claim}"
        wrong = [row["published"] for _, row in rows.iterrows() if not same_number(claim, row)]
        assert not wrong, f"{wrong}: {claim}"


def test_statuses_and_numbers_are_those_of_the_results():
    for claim in CLAIMS:
        assert claim == judged(claim, RESULTS), AGAIN


def test_what_no_row_answers_has_a_reason():
    for claim in CLAIMS:
        assert claim.paper and claim.place and claim.quantity and claim.status in STATUSES, claim
        assert claim.why, claim
        if not claim.row:
            assert claim.status in (CANNOT, SETUP), claim
        elif not claim.why.startswith(NUMBERS):
            assert claim.status in (CANNOT, NOT_REPRODUCED), f"{claim}: no simulated number, so only these"


def test_a_claim_is_listed_once():
    keys = [(claim.paper, claim.place, claim.quantity, claim.setting) for claim in CLAIMS]
    assert sorted(set(keys)) == sorted(keys)


def test_changed_results_change_statuses():
    """A status cannot stay behind: half of a simulated speed, or a gain of the other sign, is another one."""
    changed = RESULTS.copy()
    changed[["simulated", "ratio"]] /= 2
    moved = {claim.status for claim in CLAIMS if judged(claim, changed).status != claim.status}
    assert len(moved) >= 2
    gain = next(claim for claim in CLAIMS if claim.row == "fig14; kind=gain")
    turned = RESULTS.assign(simulated=RESULTS["simulated"].where(RESULTS["kind"] != "gain", -1.0), ratio=1.0)
    assert judged(gain, turned).status == NOT_REPRODUCED


def test_another_number_or_column_is_found(tmp_path, monkeypatch):
    claim = next(claim for claim in CLAIMS if claim.row == "fiddler")
    ((_, row),) = rows_of(claim, RESULTS).iterrows()
    assert same_number(claim, row) and not same_number(replace(claim, value="14.9"), row)
    monkeypatch.setattr(claims_kit, "CLAIMS", tmp_path / "claims.csv")
    (tmp_path / "claims.csv").write_text("paper,place\ndali,1\n")
    with pytest.raises(ConfigError, match="expected the columns"):
        read_claims()
