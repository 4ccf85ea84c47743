"""The page of conformance shows what the check finds; with --regenerate its rows are written anew."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from moesim.policies.registry import POLICIES, make_policy
from moesim.testing.rules import RuleCheck, examine_rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "conformance.md"
KINDS = ("eviction", "admission", "prefetch", "assignment")


def _cell(checks: list[RuleCheck], kind: str) -> str:
    """Write the shares of a kind in prefill and decode, in whole percent, rounded down."""
    shares = next((check.shares for check in checks if check.kind == kind), {})
    found = [shares.get(phase) for phase in ("prefill", "decode")]
    return " / ".join("-" if share is None else str(100 * share[0] // share[1]) for share in found) if shares else "-"


def _row(name: str, checks: list[RuleCheck]) -> str:
    why = "; ".join(dict.fromkeys(check.reason for check in checks if check.reason))
    return f"| `{name}` | " + " | ".join(_cell(checks, kind) for kind in KINDS) + f" | {why} |\n"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_decides_as_its_rule_says_and_the_page_shows_it(name: str, regenerate: bool) -> None:
    checks = examine_rules(partial(make_policy, {"name": name}))
    assert [str(check) for check in checks if check.verdict == "failed"] == []
    assert checks, "a rule, or why there is none"
    page, row = PAGE.read_text(encoding="utf-8"), _row(name, checks)
    if regenerate:
        page = re.sub(rf"^\| `{name}` \|.*\n", lambda _: row, page, flags=re.M)
        PAGE.write_text(page, encoding="utf-8")
    assert row in page, f"with --regenerate the row is written anew; a new policy needs a row `| `{name}` |` first"


def test_the_page_has_a_row_for_each_policy_in_their_order() -> None:
    names = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.M)
    assert [name for name in names if name in POLICIES] == list(POLICIES)
