"""The table of conformance has what the check finds, and the page its sums; with --regenerate both are written anew."""

from __future__ import annotations

import csv
import re
from functools import partial
from pathlib import Path

import pytest

from moesim.policies.registry import POLICIES, make_policy
from moesim.testing.rules import RuleCheck, examine_rules

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "conformance.md"
TABLE = PAGE.with_suffix(".csv")
KINDS = ("eviction", "admission", "prefetch", "assignment")
HEAD = ["policy", *KINDS, "why"]


def table() -> dict[str, list[str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return {row[0]: row for row in csv.reader(file)}


def _cell(checks: list[RuleCheck], kind: str) -> str:
    """Write the shares of a kind in prefill and decode, in whole percent, rounded down."""
    shares = next((check.shares for check in checks if check.kind == kind), {})
    found = [shares.get(phase) for phase in ("prefill", "decode")]
    return " / ".join("-" if share is None else str(100 * share[0] // share[1]) for share in found) if shares else "-"


def _row(name: str, checks: list[RuleCheck]) -> list[str]:
    why = "; ".join(dict.fromkeys(check.reason for check in checks if check.reason))
    return [name, *(_cell(checks, kind) for kind in KINDS), why]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_decides_as_its_rule_says_and_the_table_has_it(name: str, regenerate: bool) -> None:
    checks = examine_rules(partial(make_policy, {"name": name}))
    assert [str(check) for check in checks if check.verdict == "failed"] == []
    assert checks, "a rule, or why there is none"
    row = _row(name, checks)
    if regenerate:
        rows = table() | {name: row}
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows[one] for one in ("policy", *POLICIES) if one in rows)
    assert table().get(name) == row, "with --regenerate the row is written anew"


def test_the_table_has_a_row_for_each_policy_in_their_order() -> None:
    assert list(table()) == ["policy", *POLICIES] and table()["policy"] == HEAD


def page_tables(rows: list[list[str]]) -> str:
    """Write how many policies are judged by kind of decision, and which are not judged at all."""
    lines = ["| decision | policies judged | in prefill | in decode | below 100 % |", "|---|---:|---:|---:|---|"]
    for at, kind in enumerate(KINDS, 1):
        shares = [(row[0], row[at].split(" / ")) for row in rows if row[at] != "-"]
        below = [f"`{name}`" for name, both in shares if any(one not in ("-", "100") for one in both)]
        counts = [sum(both[phase] != "-" for _, both in shares) for phase in (0, 1)]
        lines.append(f"| {kind} | {len(shares)} of {len(rows)} | {counts[0]} | {counts[1]} | {', '.join(below) or 'none'} |")
    lines += ["", "| not judged | why |", "|---|---|"]
    lines += [f"| `{row[0]}` | {row[-1]} |" for row in rows if set(row[1:-1]) == {"-"}]
    return "\n".join(lines) + "\n"


def test_the_page_has_the_sums_of_the_table(regenerate: bool) -> None:
    found, text = page_tables(list(table().values())[1:]), PAGE.read_text(encoding="utf-8")
    if regenerate:
        text = re.sub(r"(<!-- policies -->\n\n).*?(\n<!-- end -->)", lambda at: at[1] + found + at[2], text, flags=re.S)
        PAGE.write_text(text, encoding="utf-8")
    assert f"<!-- policies -->\n\n{found}\n<!-- end -->" in text


def test_a_share_below_100_is_named() -> None:
    rows = [["a", "-", "-", "-", "-", "none"], ["b", "99 / -", "-", "-", "-", ""]]
    assert "| eviction | 1 of 2 | 1 | 0 | `b` |" in page_tables(rows)
