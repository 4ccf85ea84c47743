"""README and the first page show numbers of the quickstart's rows, rounded once."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pandas as pd
import pytest

from moesim.cli.main import main
from tests.docs import quickstart_kit
from tests.docs.quickstart_kit import DRAWS, HALF, ROOT, SETTING, TABLE, cells, with_table

README = (ROOT / "README.md").read_text(encoding="utf-8")
START = (ROOT / "docs" / "guide" / "start.md").read_text(encoding="utf-8")
FRAME = pd.read_csv(TABLE).set_index(SETTING)
SPEED = FRAME[quickstart_kit.SPEED]


def rows(page: str, head: str) -> list[list[str]]:
    """Give the rows of the table that begins with a cell."""
    (block,) = re.findall(rf"^\| {re.escape(head)} \|.*\n\|[-:|]+\n((?:\|.*\n)+)", page, flags=re.M)
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in block.splitlines()]


def test_the_table_of_the_readme_has_the_speeds_of_the_rows():
    wanted = cells(FRAME.reset_index())
    assert {row[0].split(" (")[0]: row[1:-1] for row in rows(README, "policy")} == wanted
    assert len(wanted) == 10
    assert with_table(README, FRAME.reset_index()) == README


def test_entries_that_the_readme_calls_a_tie_are_one():
    """The hybrids at batch 1: neighbours by speed, a quarter or half cached, are closer than both their intervals."""
    for share in (0.25, 0.5):
        mine = FRAME.xs((1, share), level=SETTING[1:]).loc[["fiddler", "hybrimoe-paper", "prescope"]]
        mine = mine.sort_values(quickstart_kit.SPEED)
        gaps = mine[quickstart_kit.SPEED].diff().iloc[1:]
        widths = (mine[HALF] + mine[HALF].shift()).iloc[1:]
        assert (gaps <= widths).all(), f"{share}: {mine[[quickstart_kit.SPEED, HALF]]}"


def test_the_intervals_are_those_of_the_rows():
    """Every policy whose speed has an interval at batch 8, half cached, and no other."""
    mine = FRAME.xs((8, 0.5), level=SETTING[1:])
    ends = mine[["decode_tokens_per_s_least", "decode_tokens_per_s_most"]].dropna()
    moves = 100 * ends.div(mine.loc[ends.index, "decode_tokens_per_s"], axis=0) - 100
    wanted = {str(policy): "{} to {:+.0f} %".format(f"{low:+.0f}".replace("+0", "0"), high) for policy, (low, high) in zip(
        moves.index, moves.to_numpy(), strict=True)}  # fmt: skip
    assert dict(rows(START, "policy")) == wanted
    for policy in ("llama-cpp", "dali"):
        assert f"`{policy}`" in README
        assert f" by {wanted[policy]}" in README
    most = ends["decode_tokens_per_s_most"]
    assert f"`fiddler` ({most['fiddler']:.1f}) is level with `dali` ({most['dali']:.1f})" in START


def test_the_link_is_as_busy_as_the_page_says():
    busy = 100 * FRAME["pcie_share"].xs(1, level="batch_size")
    fetching = busy.loc[["on-demand", "mixtral-offloading", "lru", "belady"]]
    others = fetching.drop(("belady", 0.5))
    told = f"{others.min():.0f} to {others.max():.0f} % busy (`belady` with half cached: {fetching['belady', 0.5]:.0f})"
    assert told in " ".join(START.split())


def test_what_daop_leaves_out_is_as_the_pages_say():
    daop = FRAME.xs("daop-paper")
    fresh, first = 100 * daop["fidelity_fresh_decode"], daop["ttft_mean_ns"] / 1e9
    assert f"serves {int(fresh.min())} to {int(fresh.max())} % of the gate weight as routed" in README, "rounded down"
    for page in (README, START):
        assert f"first token takes {first.min():.0f} to {first.max():.0f} s" in " ".join(page.split())


def test_the_rows_are_what_the_simulator_says_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Two of the sixty; `tests.docs.quickstart_kit` says how all are made."""
    policies = ["fiddler", "lru"]
    sets = [f"policies={json.dumps(policies)}", "workload.batch_size=4", "cache.ratio=0.5", "plots=[]", "timeline=null"]
    sets.append(f"repeat={DRAWS}")
    command = ["run", str(ROOT / "experiments" / "quickstart.yaml"), "--out", str(tmp_path / "out"), "-o", "json"]
    assert main([*command, *(word for one in sets for word in ("--set", one))]) == 0
    capsys.readouterr()
    found = quickstart_kit.means(tmp_path / "out").set_index("policy")
    known = FRAME.xs((4, 0.5), level=SETTING[1:]).loc[policies]
    for column in (quickstart_kit.SPEED, HALF):
        assert found[column].to_dict() == pytest.approx(known[column].to_dict(), rel=1e-9)
