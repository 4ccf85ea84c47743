"""The table on the terminal: it fits, breaks no word, marks the best, sorts as asked, and says what it leaves out."""

from __future__ import annotations

import io
import json
import re
import sys
from typing import Any

import pytest

from moesim.core.colours import LABEL
from moesim.core.table import Format, render
from moesim.experiment import report
from moesim.experiment.report import (
    CI,
    LIFTS,
    By,
    aggregate,
    at_lifts,
    busy_percent,
    count_repeats,
    failure_lines,
    fresh_share,
    half_width,
    is_lossy,
    moved_mb,
    order_changes,
    over_lifts,
    range_of_lifts,
    repeated,
    result_table,
    waited,
)
from moesim.experiment.runner import LEAST, MOST
from moesim.metrics.breakdown import CAUSES
from moesim.metrics.naming import COLUMNS, HOW, NOT_VARIED, WORKLOAD, notes_of


def row(policy: str, speed: float | None, cache: float = 0.25, **more: Any) -> dict[str, Any]:
    return {
        "run": 0, "policy": policy, "cache_ratio": cache, "cache_budget_bytes": None, "batch_size": 1, "notes": "", "error": None,
        "model": "m", "hardware": "h", "trace": "t", "prompt_tokens": 4, "decode_tokens": 4, "source_label": "derived",
        "decode_tokens_per_s": speed, "ttft_mean_ns": 5e8, "tpot_mean_ns": 1e8, "hit_rate": 0.5, "n_generated_tokens": 5,
        "n_decode_tokens": 4, "utilisation.gpu0": 0.25, "utilisation.gpu1": 0.75, "utilisation.cpu0->gpu0": 1.0,
        "pcie_share": 0.9, **{f"bytes_{cause}": 5_000_000 for cause in ("demand", "prefetch_used", "prefetch_wasted")},
        "bytes_update": 10_000_000, "bytes_write_back": 5_000_000, "bytes_message": 0,
        **{f"decode_time_{cause}_ns": 10 for cause in CAUSES}, "decode_time_exposed_demand_ns": 60,
    } | more  # fmt: skip


TWO = [row("lru", 4.0), row("dali", 8.0), row("lru", 6.0, 0.5), row("dali", 3.0, 0.5, source_label="assumed")]


def lines(rows: list[dict[str, Any]], **how: Any) -> list[str]:
    return result_table(rows, Format.TABLE, **how).splitlines()


def test_columns_that_tell_nothing_stand_below() -> None:
    found = lines(TWO[:2])
    assert found[0].split() == ["policy", "tok/s", "TTFT", "TPOT", "hit", "%", "waited", "for"]
    assert found[1].split() == ["lru", "4.00", "500", "ms", "100", "ms", "50.0", "demand", "fetch", "38%"]
    assert found[4] == "model m, on h, routing t, prompt 4, decode 4, cache 0.25, batch 1"
    assert found[5] == "simulated; weakest source of its numbers: derived"
    assert lines(TWO)[0].split()[:2] == ["policy", "cache"]
    labels = [line.split()[-1] for line in lines([*TWO, row("old", 2.0, source_label=None)])[:6]]
    assert labels == ["source", "derived", "derived", "derived", "assumed", "-"]
    assert [line.split()[1] for line in lines([row("a", None), row("b", None, fidelity_fresh=0.5)])[1:3]] == ["-", "-*"]


def test_a_notebook_shows_the_fastest_bold_and_numbers_to_the_right() -> None:
    html = report.result_html([*TWO, row("slow", 1.0)])
    heads = re.findall("<th>(.*?)</th>", html)
    body = [re.findall('<td style="text-align: (left|right)">(.*?)</td>', line) for line in html.split("<tr>")[2:]]
    names = ["lru", "<b>dali</b>", "<b>lru</b>", "dali", "slow"]
    assert [cells[0] for cells in body] == [("left", name) for name in names]
    assert all(len({text.startswith("<b>") for _, text in cells}) == 1 for cells in body)
    assert heads == ["policy", "cache", "tok/s", "TTFT", "TPOT", "hit %", "waited for", "source"]
    assert [how for how, _ in body[0]] == ["left", *["right"] * 5, "left", "left"]
    assert {how for cells in body for name, (how, _) in zip(heads, cells, strict=True) if name == "tok/s"} == {"right"}


def test_settings_that_differ_have_columns_in_their_order_texts_last() -> None:
    settings = ["model", "hardware", "trace", *WORKLOAD, *HOW]
    rows = [row("lru", 1.0, **{name: f"{name}{i}" for name in settings}) for i in range(2)]
    texts = [name for name in HOW if COLUMNS[name].missing is str]
    order = ["model", "hardware", "trace", *WORKLOAD[1:], *(name for name in HOW if name not in texts), *texts]
    assert texts == ["predictors"] and WORKLOAD[0] == "batch_size"
    names, _, *cells = [line.split(" | ") for line in result_table(rows, Format.MD).splitlines()[:4]]
    assert names[: len(order)] == [f"{'| ' * (not i)}{COLUMNS[name].head or COLUMNS[name].word}" for i, name in enumerate(order)]
    assert [one[1 : len(order)] for one in cells] == [[f"{name}{i}" for name in order[1:]] for i in range(2)]


def test_below_stands_what_all_rows_share_and_which_some_have() -> None:
    assert lines(TWO)[6:8] == ["model m, on h, routing t, prompt 4, decode 4, batch 1", "simulated"]
    assert lines([row("lru", 1.0, source_label=None)])[4] == "simulated"
    some = [row("lru", 1.0, notes="x"), row("lru", 2.0)]
    assert "x: some runs" in lines(some) and "x: some runs of lru" in lines([*some, row("dali", 2.0)])
    assert "x: batch 2" in lines([row("lru", 1.0, notes="x", batch_size=2), row("lru", 2.0)])


@pytest.mark.parametrize(("n_more", "left_out"), [(0, []), (1, ["TTFT"]), (8, ["TTFT"]), (9, ["TTFT", "TPOT"])])
def test_columns_are_left_out_from_the_left_as_soon_as_a_line_is_too_long(n_more: int, left_out: list[str]) -> None:
    """Columns of 6 characters and two blanks each; the rest takes what is left of 80."""
    rows = [row("lru", 1.0, ttft_mean_ns=1.25e8, tpot_mean_ns=1.25e8)]
    n = 80 - max(map(len, lines(rows)[:2])) - 2 + n_more
    found = lines([rows[0] | {"trace": letter * n} for letter in "ab"])
    named = [line for line in found if line.startswith("left out")]
    assert named == ([f"left out for want of room: {', '.join(left_out)}; --wide shows all"] if left_out else [])
    assert max(map(len, found[:3])) <= 80


@pytest.mark.parametrize(("n", "broken"), [(23, False), (24, False), (25, True)])
def test_a_name_has_room_for_24_characters_whatever_else_there_is(n: int, broken: bool) -> None:
    name = f"p(a=1,{'b' * (n - 7)})"
    assert len(name) == n
    rows = [row(name, 1.0, trace=letter * 70) for letter in "ab"]
    assert (name not in "\n".join(lines(rows)).partition("\n\n")[0]) is broken


def test_what_stands_below_is_wrapped_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row("lru", 1.0, notes=f"{'a-' * 30}a, {'b' * 50}, c")]
    long = f"simulated; weakest source of its numbers: derived; notes: {rows[0]['notes']}"
    assert long in lines(rows)
    on_a_terminal(40, monkeypatch)
    found = lines(rows)
    assert "a-" * 30 + "a," in found and "b" * 50 + ", c" not in found and "b" * 50 + "," in found
    assert long in lines(rows, wide=True)


def test_lines_fit_and_what_does_not_is_named() -> None:
    rows = [row("a-policy-with-a-long-name", 4.0), row("b", 5.0, 0.5, source_label="assumed", batch_size=16)]
    found = lines(rows)
    table = found[: found.index("")]
    assert max(map(len, table)) <= report.LINE
    assert "TTFT" not in table[0]
    assert found[-1] == "left out for want of room: TTFT, TPOT; --wide shows all"
    assert "TTFT" in lines(rows, wide=True)[0]


def test_the_range_of_what_is_not_exact_goes_by_numbers() -> None:
    found = "\n".join(lines([row("daop", 4.0, i, fidelity_fresh_decode=share) for i, share in enumerate((0.2, 0.09, 0.3))]))
    assert "computed as routed: 9.0 to 30.0 % (daop);" in found


def test_rows_are_sorted_as_asked() -> None:
    def order(by: By | None) -> list[str]:
        return [
            " ".join(line.split()[:2]) for line in lines([*TWO, row("all-gpu", None, error="too large; buy more")], by=by)[1:6]
        ]

    assert order(None) == ["lru 0.25", "dali 0.25", "lru 0.5", "dali 0.5", "all-gpu 0.25"]
    assert order(By.SPEED) == ["dali 0.25", "lru 0.5", "lru 0.25", "dali 0.5", "all-gpu 0.25"]
    assert [line.split()[0] for line in lines([row("a", 1.0, ttft_mean_ns=9e8), row("b", 1.0)], by=By.TTFT)[1:3]] == ["b", "a"]


@pytest.mark.parametrize(
    ("by", "key", "least_first"),
    [
        (By.SPEED, "decode_tokens_per_s", False), (By.TTFT, "ttft_mean_ns", True), (By.TPOT, "tpot_mean_ns", True),
        (By.HITS, "hit_rate", False),
    ],
)  # fmt: skip
def test_rows_without_the_number_come_last_and_equals_stay_as_they_are(by: By, key: str, least_first: bool) -> None:
    rows = [row(name, 1.0) | {key: value} for name, value in zip("abcdefg", (0.5, None, 0.25, 0.5, 0.0, None, 0.75), strict=True)]
    found = [json.loads(line)["policy"] for line in result_table(rows, Format.JSONL, by=by).splitlines()]
    assert found == [*("ecadg" if least_first else "gadce"), "b", "f"]


def test_every_column_of_the_wide_table() -> None:
    """Speeds below 100 with two digits, times of a second or more in seconds, a cache of which not all slots are used."""
    more = {"cache_slots": 8.0, "cache_slots_used": 6, LEAST: 1.0, MOST: 2.25, "bytes_message": 5_000_000}
    times = {"ttft_mean_ns": 1e9, "tpot_mean_ns": 999e6, "resident_rate": 0.625, "fidelity_fresh_decode": 0.5}
    none = dict.fromkeys(("bytes_demand", "bytes_prefetch_used", "resident_rate", "ttft_mean_ns", "hit_rate", "source_label"))
    last = {"cache_slots": 4, "n_generated_tokens": 10, "utilisation.cpu0": 0.125, "decode_time_idle_ns": 90, **none}
    table = result_table([row("daop", 100.0, **more, **times), row("lru", 99.994, 0.5, **last)], Format.MD, wide=True)
    names, _, *found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line[:1] == "|"]
    assert list(zip(names, *found, strict=True)) == [
        ("policy", "daop", "lru"), ("cache", "0.25", "0.5"), ("slots", "6 of 8", "4"), ("batch", "1", "1"),
        ("tok/s", "100*", "99.99"), ("over intervals", "1 to 2.25", "-"), ("TTFT", "1 s", "-"), ("TPOT", "999 ms", "100 ms"),
        ("hit %", "50.0", "-"), ("resident %", "62.5", "-"), ("waited for", "demand fetch 38%", "idle 38%"),
        ("MB/token demand", "1", "-"), ("prefetched", "1", "-"), ("wasted", "1", "0"), ("other", "4", "2"),
        ("busy % GPU", "50", "50"), ("CPU", "-", "12"), ("link", "90", "90"), ("fresh %", "50.0*", "-"),
        ("source", "derived", "-"),
    ]  # fmt: skip


def test_rows_without_a_group_are_repeats_if_only_seeds_differ() -> None:
    def at(seed: int, policy: str = "lru", trace: str = "synthetic-x", **more: Any) -> dict[str, Any]:
        return row(policy, 1.0, trace=f"{trace}-seed{seed}", seed=seed, repeat=seed, requests_drawn=str(seed), **more)

    rows = [at(0), at(1), at(1, "dali"), at(0, trace="recorded"), at(1, trace="recorded"), at(1, trace="synthetic-y"),
            at(1, batch_size=2), at(1, cache_ratio=0.5), at(7)]  # fmt: skip
    assert [one["repeats"] for one in aggregate(rows)] == [3, 1, 1, 1, 1, 1, 1]
    assert [one["repeats"] for one in aggregate([one | {"group": f"g{i % 2}"} for i, one in enumerate(rows)])] == [5, 4]
    assert count_repeats(rows) == 8 and count_repeats([]) == 1 and repeated(rows) and not repeated(rows[:1])


def test_settings_of_repeats_are_those_of_the_first_that_ran() -> None:
    failed = row("lru", None, group="g", error="no room", only=1, word="x", **{LEAST: 9.0})
    first = row("lru", 2.0, group="g", repeat=1, word="y", mixed=1.0, flag=True)
    second = row("lru", 2.0, group="g", repeat=2, word="z", mixed="text", flag=True)
    (whole,) = aggregate([failed, first, second])
    assert (whole["word"], whole["mixed"], whole["flag"], whole["error"]) == ("y", 1.0, True, "1 of 3 repeats failed")
    assert "only" not in whole and f"{CI}mixed" not in whole and LEAST not in whole
    (none,) = aggregate([failed, {**failed, "word": "w"}])
    assert (none["policy"], none["word"], none["repeats"], none["error"]) == ("lru", "x", 0, "2 of 2 repeats failed")


def test_runs_over_lifts_are_the_middle_one_with_the_range() -> None:
    """By number, not by text; runs of another setting or of recorded routing stay as they are."""

    def at(lift: str, speed: float | None, **more: Any) -> dict[str, Any]:
        return row("lru", speed, trace=f"synthetic-assumed-lift{lift}-2x4", seed=3, **more)

    rows = [at("10", 4.0), at("1.5", 1.0), row("lru", 7.0), at("2", 2.0), row("lru", 7.0), at("1", 9.0, batch_size=2)]
    first, *others = found = over_lifts(rows)
    assert first == rows[3] | {LIFTS: (rows[1], rows[3], rows[0])} and others == [rows[2], rows[4], rows[5]]
    assert at_lifts(first, "decode_tokens_per_s") == [1.0, 2.0, 4.0] and at_lifts(rows[2], "decode_tokens_per_s", 3) == [21.0]
    assert [range_of_lifts(one) for one in found] == ["1 to 4", "7", "7", "9"]
    assert range_of_lifts(first, scale=10) == "10 to 40"
    (two,) = over_lifts([at("1", 3.0), at("2", None)])
    assert two["trace"] == rows[3]["trace"] and range_of_lifts(two) == "3" and range_of_lifts(row("lru", None)) == "-"


@pytest.mark.parametrize(
    ("mine", "theirs", "changes"),
    [((1, 3), (2, 2), True), ((1, 3), (0, 2), False), ((1, 3), (2, 4), False), ((2, 3), (2, 2), True), ((2, 2), (2, 2), False),
     ((1, 3), (2, None), False), ((None, 3), (2, 2), False)],
)  # fmt: skip
def test_two_rows_swap_places_between_lifts(mine: Any, theirs: Any, changes: bool) -> None:
    one, other = (
        {"policy": name, LIFTS: tuple({"trace": f"lift{i}", "decode_tokens_per_s": speed} for i, speed in enumerate(speeds))}
        for name, speeds in (("one", mine), ("other", theirs))
    )
    assert order_changes(one, other) is order_changes(other, one) is changes


def test_slots_are_those_granted_and_how_many_are_used() -> None:
    for granted, used, text in ((None, 3, "-"), (8, None, "8"), (8, 8, "8"), (8.0, 0, "0 of 8")):
        assert report._slots({"cache_slots": granted, "cache_slots_used": used}) == text


def test_what_is_waited_for_in_the_prompt_is_what_the_steps_that_decode_leave() -> None:
    times = dict.fromkeys((f"{phase}time_{cause}_ns" for cause in CAUSES for phase in ("", "decode_")), 0)
    one = row("lru", 4.0) | times | {"time_dense_ns": 70, "time_idle_ns": 40, "decode_time_dense_ns": 60}
    dense, idle = LABEL["dense"], LABEL["idle"]
    assert waited(one) == waited(one, "decode") == f"{dense} 100%"
    assert waited(one, "prompt") == f"{idle} 80%"
    assert waited(one | {"n_decode_tokens": 0}) == f"{dense} 64%"
    assert waited(row("lru", 4.0) | times) == "-"


def test_half_the_interval_of_a_mean_stands_behind_it_in_its_unit() -> None:
    """Two seeds: Student's t is 12.706, half the interval 12.706 times half the difference."""
    low = row("lru", 3.0, group="g", requests_drawn="1", ttft_mean_ns=1e9, tpot_mean_ns=2e6, hit_rate=0.5)
    high = row("lru", 5.0, group="g", repeat=1, seed=1, requests_drawn="2", ttft_mean_ns=2e9, tpot_mean_ns=4e6, hit_rate=0.7)
    found = lines([low, high], wide=True)
    for cell in ("4.00 ±13", "1.5 ±6.4 s", "3 ±13 ms", "60.0 ±1.3e+02"):
        assert cell in found[1]
    assert half_width([3.0]) is None and half_width([3.0, 5.0]) == pytest.approx(12.7062, abs=1e-4)


def test_means_over_seeds_are_what_is_sorted() -> None:
    """The fastest single run is lru's; the higher mean is dali's."""
    speeds = {"lru": (9.0, 1.0), "dali": (6.0, 6.5)}
    rows = [
        row(policy, speed, repeat=i, seed=i, group=policy, run=i)
        for policy, both in speeds.items()
        for i, speed in enumerate(both)
    ]
    found = lines(rows, by=By.SPEED)
    assert [line.split()[0] for line in found[1:3]] == ["dali", "lru"]
    mean = "mean of 2 seeds ± half the 95 % interval (Student's t)"
    assert sum(mean in line for line in found) == 1
    assert "mean of" not in "\n".join(lines(TWO))


@pytest.mark.parametrize(
    ("lossy", "more"),
    [
        (False, {}),
        (False, {"fidelity_fresh": 1.0, "fidelity_fresh_decode": 1.0, "n_inexact_slots": 0}),
        (True, {"fidelity_fresh": 0.5, "fidelity_fresh_decode": 1.0}),
        (True, {"fidelity_fresh": 1.0, "fidelity_fresh_decode": 0.5}),
        (True, {"fidelity_fresh": 0.5, "fidelity_fresh_decode": None}),
        (True, {"fidelity_fresh": 1.0, "fidelity_fresh_decode": 1.0, "n_inexact_slots": 1}),
    ],
)
def test_a_run_is_lossy_if_it_was_in_prefill_or_decode(lossy: bool, more: dict[str, Any]) -> None:
    assert is_lossy(row("lru", 1.0, **more)) is lossy


def test_numbers_of_a_row_are_shares_of_tokens_and_of_devices() -> None:
    one = row("lru", 4.0, fidelity_fresh=0.5)
    assert moved_mb(one, "demand", "update") == (5 + 10) / 5
    assert moved_mb(one, "demand", "unheard-of") == 1
    assert moved_mb(one, "unheard-of") is moved_mb({**one, "n_generated_tokens": 0}, "demand") is None
    assert busy_percent(one, "gpu") == 50
    assert busy_percent(one, "cpu") is None  # a link alone
    assert fresh_share(one) == 0.5 and fresh_share({**one, "fidelity_fresh_decode": 0.25}) == 0.25


def test_failed_runs_are_in_the_table_and_why_is_below() -> None:
    found = lines([*TWO, row("all-gpu", None, error="too large; buy more")])
    assert found[5].split() == ["all-gpu", "0.25", "failed"]
    assert found[-1] == "failed: all-gpu: too large"


def test_runs_that_failed_alike_are_one_line() -> None:
    """Two policies; the first failed twice in the same way, with other numbers, and once in another."""
    many = [row("a", None, error=f"needs {n} GB, has 2; buy more", batch_size=n) for n in (3, 4)]
    rows = [*many, row("a", None, error="no layer"), row("b", None, error="needs 3 GB, has 2; buy more"), row("lru", 1.0)]
    assert [line for line in lines(rows) if line.startswith("failed")] == [
        "failed: a, 2 runs, the first cache 0.25, batch 3: needs 3 GB, has 2", "failed: a: no layer",
        "failed: b: needs 3 GB, has 2",
    ]  # fmt: skip
    assert failure_lines(rows) == [
        "2 runs of a, the first run 0 (cache 0.25, batch 3): needs 3 GB, has 2; buy more",
        "run 0 (a, cache 0.25, batch 1): no layer", "run 0 (b, cache 0.25, batch 1): needs 3 GB, has 2; buy more",
    ]  # fmt: skip


def test_long_names_are_broken_between_options_before_columns_are_left_out() -> None:
    long = "dali(assignment=exact,u_size=2,w_size=1)"
    found = lines([row(long, 4.0), row("lru", 5.0)])
    assert found[0].split() == ["policy", "tok/s", "TTFT", "TPOT", "hit", "%", "waited", "for"]
    assert found[1].startswith("dali(assignment=exact,u_size=2,  ") and found[2] == "  w_size=1)"
    assert found[3].startswith("lru ") and max(map(len, found[:4])) <= report.LINE
    assert lines([row(long, 4.0)], wide=True)[1].startswith(long)


def test_prefetching_that_did_nothing_is_named() -> None:
    on = {"prefetches": True, "n_prefetches": 0, "resident_rate": 0.5, "pcie_share": 0.5}
    full, busy = on | {"resident_rate": 1.0}, on | {"pcie_share": 0.995}
    rows = [row("a", 1.0, **full), row("b", 1.0, **busy), row("c", 1.0, **full | {"n_prefetches": 1}),
            row("d", 1.0, **full | {"prefetches": False}), row("e", 1.0, **on)]  # fmt: skip
    told = [line for line in lines(rows) if "prefetch" in line]
    assert told == [
        "nothing was prefetched, as all experts were in the cache already: a",
        "nothing was prefetched, as the link was busy all the time: b",
    ]
    assert not any("prefetch" in line for line in lines(rows[2:])), "nothing is said that no record proves"


def test_notes_stand_once() -> None:
    rows = [row("lru", 1.0, notes="all, one"), row("dali", 2.0, notes="all"), row("dali", 2.0, 0.5, notes="all, x"),
            row("lru", 2.0, 0.5, notes="all, x")]  # fmt: skip
    assert lines(rows)[-5:] == [
        "simulated; weakest source of its numbers: derived; notes: all",
        "policy changed nothing here: dali, lru have the same results in 1 of 2 settings",
        "cache ratio changed nothing here: dali with cache ratio 0.25, dali with cache ratio 0.5 have the same results",
        "one: some runs of lru",
        "x: cache 0.5",
    ]
    short = result_table([row("lru", 1.0, notes=str(i)) for i in range(8)], Format.TABLE, notes=False).splitlines()
    assert short[-1] == "6 more notes: --notes shows them"
    assert short[-6] == ""
    narrow = [row("a-policy-with-a-long-name", 4.0, i / 10, notes=str(i), source_label=str(i), batch_size=i) for i in range(8)]
    assert result_table(narrow, Format.TABLE, notes=False).splitlines()[-1].startswith("left out for want of room: ")


def test_what_changed_nothing_is_named() -> None:
    def run(name: str, speed: float, cache: float = 0.25, **options: Any) -> dict[str, Any]:
        label = f"{name}({options})" if options else name
        return row(label, speed, cache, policy_name=name, policy_options=json.dumps(options))

    def named(*rows: dict[str, Any]) -> list[str]:
        return [line for line in lines(list(rows)) if "changed nothing" in line]

    a, b = run("dali", 2.0, relabel=True), run("dali", 2.0, relabel=False)
    assert named(a, b) == [f"relabel changed nothing here: {a['policy']}, {b['policy']} have the same results"]
    both = [run("dali", 3.0, 0.5, relabel=True), run("dali", 4.0, 0.5, relabel=False)]
    assert named(a, b, *both)[0].endswith("have the same results in 1 of 2 settings")
    assert not named(a, run("dali", 3.0, relabel=False)), "the speed differs"
    assert not named(a, run("dali", 2.0, relabel=False, w_size=2)), "two options differ"
    assert not named(run("lru", 2.0), run("fifo", 2.0, 0.5)), "the policy differs, and the cache"
    of_cache = named(run("all-cpu", 2.0), run("all-cpu", 2.0, 0.5))
    assert of_cache == [
        "cache ratio changed nothing here: all-cpu with cache ratio 0.25, all-cpu with cache ratio 0.5 have the same results"
    ]


@pytest.mark.parametrize("n", [5, 6, 8])
def test_of_what_changed_nothing_five_lines_are_shown(n: int) -> None:
    rows = [
        row(f"p({i}={value})", 2.0, policy_name="p", policy_options=json.dumps({f"option{i}": value}), batch_size=i)
        for i in range(n) for value in (1, 2)
    ]  # fmt: skip
    shown = [f"option{i} changed nothing here: p({i}=1), p({i}=2) have the same results" for i in range(5)]
    more = [f"{n - 5} more settings changed nothing"] if n > 5 else []
    assert [line for line in lines(rows) if "changed nothing" in line] == shown + more


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)


def test_on_a_terminal_the_best_of_each_setting_is_bold_beside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(100, monkeypatch)
    head, *body = result_table(TWO, Format.TABLE).splitlines()[:5]
    assert [line.startswith("\x1b[1m") for line in (head, *body)] == [True, False, True, True, False]
    assert [line.count("█") for line in body] == [3, 6, 4, 2]
    assert "▎" in body[3]  # 3 of 8 are 2 and a quarter of 6
    _, *body = result_table([row("a", 8.0), row("b", 4.6), row("c", None, n_tokens=1)], Format.TABLE).splitlines()[:4]
    assert [re.sub("[^▏▎▍▌▋▊▉█]", "", line) for line in body] == ["█" * 6, "███▌", ""]  # 27.6 eighths are 28


def test_an_oracle_is_never_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(100, monkeypatch)
    rows = [row("lru", 2.0), row("dali", 4.0), row("belady", 9.0) | {"source_label": "oracle"}]
    assert [line.startswith("\x1b[1m") for line in result_table(rows, Format.TABLE).splitlines()[1:4]] == [False, True, False]


def test_each_interval_that_was_not_varied_is_told_once() -> None:
    texts = [
        f"synthetic, {NOT_VARIED}a 1 to 3 us; b 2 to 4 us, other",
        "synthetic",
        f"{NOT_VARIED}b 2 to 4 us; c 1 to 2 us, last",
    ]
    assert notes_of(texts) == ["synthetic", f"{NOT_VARIED}a 1 to 3 us; b 2 to 4 us; c 1 to 2 us", "other", "last"]
    assert notes_of(["x, y", "y"]) == ["x", "y"] and notes_of([]) == []
    rows = [row("lru", 2.0) | {"notes": texts[0]}, row("dali", 3.0) | {"notes": texts[2]}]
    assert result_table(rows, Format.TABLE).count("interval not varied") == 1


def test_a_table_wider_than_the_terminal_keeps_all_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_terminal(60, monkeypatch)
    head = ["constant", "before and after it was told", "a", "unit", "values", "verdict"]
    rows = [
        ["cpu_read_rate_of_all_cores", "29,100,000,000 (24.7 to 34.3, published)", "1", "B/s", "35,300,000,000", "identified"],
        ["gpu_layer", "assumed", "2", "us", "0.562", "not identified, cannot be told from cpu_read_rate"],
    ]
    shown = render(head, rows, Format.TABLE)
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert max(map(len, text.splitlines())) <= 60
    assert all(letter in text for letter in ("cpu_read_", "before and", "unit"))
