"""The page of conformance shows what the check finds; with --regenerate its table is written anew."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from moesim.policies.registry import POLICIES, make_policy
from moesim.testing.rules import RuleCheck, examine_rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "conformance.md"
KINDS = ("eviction", "admission", "prefetch", "assignment")


def _cell(checks: list[RuleCheck], kind: str) -> str:
    """Write the shares of a kind in prefill and decode, in whole percent, rounded down."""
    shares = next((check.shares for check in checks if check.kind == kind), {})
    found = [shares.get(phase) for phase in ("prefill", "decode")]
    return " / ".join("-" if share is None else str(100 * share[0] // share[1]) for share in found) if shares else "-"


def _row(name: str) -> str:
    checks = examine_rules(partial(make_policy, {"name": name}))
    why = "; ".join(dict.fromkeys(check.reason for check in checks if check.reason))
    return f"| `{name}` | " + " | ".join(_cell(checks, kind) for kind in KINDS) + f" | {why} |\n"


def test_the_page_shows_the_table(regenerate: bool) -> None:
    page, table = PAGE.read_text(encoding="utf-8"), "".join(map(_row, POLICIES))
    if regenerate:
        page = re.sub(r"(^\| policy \| evictions .*\n\|---.*\n)(?:^\|.*\n)*", lambda head: head[1] + table, page, flags=re.M)
        PAGE.write_text(page, encoding="utf-8")
    assert table in page
