"""Sweeps: shared parts, what is left out, what varies together, repeats, every field as a list, keys of runs."""

from __future__ import annotations

import math
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from moesim.cli.main import main
from moesim.cli.options import policy_list
from moesim.errors import ConfigError, InputError
from moesim.experiment import run_experiment
from moesim.experiment.config import Config, load_config, parse_config, read_merged
from moesim.experiment.folder import outcome_of
from moesim.experiment.report import CI, aggregate
from moesim.experiment.resolve import Experiment, run_keys
from moesim.experiment.run import describe_grid, lookups, seconds
from moesim.experiment.store import PACKAGES, read_summary
from moesim.experiment.sweep import Point, RunSpec, expand, policies_of, quick
from moesim.metrics.naming import policy_label
from moesim.policies.registry import make_policy
from tests.docs.imports_kit import ALL as MODULES
from tests.docs.imports_kit import all_imports
from tests.experiment.experiment_kit import resolve, write_trace
from tests.experiment.sweep_kit import BARE, Counted, lines, write
from tests.waiting import Clock

BASE: dict[str, Any] = {
    "model": "mixtral-8x7b",
    "hardware": "rtx3090-epyc7532",
    "trace": "t",
    "cache": {"ratio": 0.5},
    "policies": ["lru"],
}


def points(**changes: Any) -> list[Point]:
    return expand(parse_config(BASE | changes, "a.yaml"), "a.yaml")


def files(folder: Path, **texts: str) -> Path:
    """Write files; ``a_b`` is ``a/b.yaml``. Give the first."""
    paths = [folder / f"{name.replace('_', '/')}.yaml" for name in texts]
    for path, text in zip(paths, texts.values(), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return paths[0]


# ---- include


def test_included_files_are_merged_key_by_key_and_the_nearest_wins(tmp_path: Path):
    top = files(
        tmp_path,
        top="include: [shared/one.yaml, shared/two.yaml]\nworkload: {seed: 3}\npolicies: [lru]\n",
        shared_one="include: deep/base.yaml\nworkload: {seed: 1, batch_size: [1, 2]}\ncache: {ratio: 0.5}\n",
        shared_two="cache: {budget: 8 GiB}\npolicies: [dali, fiddler]\n",
        shared_deep_base="model: m\nhardware: h\ntrace: t\nworkload: {seed: 0, n_batches: 4}\n",
    )
    assert read_merged(top) == {
        "model": "m", "hardware": "h", "trace": "t", "policies": ["lru"], "cache": {"ratio": 0.5, "budget": "8 GiB"},
        "workload": {"seed": 3, "n_batches": 4, "batch_size": [1, 2]},
    }  # fmt: skip
    assert load_config(top, ["workload.seed=9"]).workload.seed == 9


def test_paths_of_included_files_begin_at_the_file_that_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    files(tmp_path, top="include: sub/a.yaml\n", sub_a="include: b.yaml\n", sub_b="name: right\n", b="name: wrong\n")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert read_merged(Path("../top.yaml")) == {"name": "right"}


def test_a_file_may_be_included_twice_and_is_read_once(tmp_path: Path):
    """Twenty files that each include the next one twice: read at each mention, the last would be read half a million times."""
    names = [f"f{i}" for i in range(20)]
    texts = {a: f"include: [{b}.yaml, {b}.yaml]\n" for a, b in pairwise(names)}
    assert read_merged(files(tmp_path, **texts, f19="name: end\n")) == {"name": "end"}


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"a": "include: a.yaml\n"}, "a.yaml: include: expected files that do not include this one, got 'a.yaml'; remove it"),
        ({"a": "include: b.yaml\n", "b": "include: [./a.yaml]\n"}, "b.yaml: include: expected files that do not include this"),
        ({"a": "include: b.yaml\n"}, "a.yaml: include: {}/b.yaml: expected an experiment file, got: No such file or directory"),
        (
            {"a": "include: bb.yaml\n", "b": "x: 1\n"},
            "a.yaml: include: {}/bb.yaml: expected an experiment file, got: No such file or directory; did you mean 'b.yaml'?",
        ),
        ({"a": "include: b.yaml\n", "b": "- 1\n"}, "a.yaml: include: expected a mapping in 'b.yaml', got list"),
        ({"a": "include: b.yaml\n", "b": ""}, "a.yaml: include: expected a mapping in 'b.yaml', got nothing"),
        ({"a": "include: b.yaml\n", "b": "x: [\n"}, "b.yaml: expected valid YAML, got "),
        ({"a": "include: 3\n"}, "a.yaml: include: expected the path of a file or a list of paths, got 3"),
        ({"a": "include: [b.yaml, '']\n", "b": "name: x\n"}, "a.yaml: include: expected the path of a file or a list of paths, "),
        ({"a": "include: [b.yaml, 1]\n", "b": "name: x\n"}, "a.yaml: include: expected the path of a file or a list of paths, "),
        ({"a": "include: .\n"}, "a.yaml: include: {}: expected an experiment file, got: Is a directory"),
        ({"a": 'include: "b\\0.yaml"\n'}, "a.yaml: expected text that can be shown, got the control character"),
        ({f"f{i}": f"include: f{i + 1}.yaml\n" for i in range(30)}, "f20.yaml: include: expected at most 20 files that include"),
    ],
)  # fmt: skip
def test_wrong_includes_are_told_in_one_line(texts: dict[str, str], message: str, tmp_path: Path):
    with pytest.raises(ConfigError) as error:
        read_merged(files(tmp_path, **texts))
    assert str(error.value).startswith(f"{tmp_path}/{message.format(tmp_path)}")
    assert "\n" not in str(error.value)


def test_an_override_of_one_alias_leaves_the_other_alone(tmp_path: Path):
    path = files(tmp_path, a="model: m\nhardware: h\ntrace: t\ncache: {ratio: 1}\npolicies: [&p {name: dali, w_size: 2}, *p]\n")
    assert load_config(path, ["policies.0.w_size=4"]).policies == [{"name": "dali", "w_size": 4}, {"name": "dali", "w_size": 2}]


# ---- exclude

GRID: dict[str, Any] = {
    "model": [{"base": "mixtral-8x7b", "expert_bits": [4, 8]}, "phi-3.5-moe"],
    "zip": [["hardware", "trace"], ["extrapolate", "warm_up_steps"]],
    "hardware": ["rtx3090-epyc7532", {"base": "a6000-i9-10980xe", "devices": {"gpu0": {"memory_bytes": ["24 GiB", "48 GiB"]}}}],
    "trace": ["t", {"synthesize": "mixtral-8x7b", "requests": [4, 8]}],
    "workload": {"batch_size": [1, 2], "refill": [False, True]},
    "cache": {"ratio": 0.25, "budget": ["8 GiB", 2**34]},
    "policies": ["lru", {"name": "dali", "w_size": [2, 4], "assignment": "greedy"}],
    "transfer": {"curve": ["pinned", "chunked"], "chunk": [None, "4 MiB"]},
    "decision_us": [0, 1.5],
    "extrapolate": [False, True],
    "warm_up_steps": [None, 1],
    "predictors": {"residual": ["oracle", "frequency"]},
    "repeat": 2,
}

EXCLUSIONS: list[tuple[dict[str, Any], Callable[[Point], bool]]] = [
    ({"model": "phi-3.5-moe"}, lambda p: p.model == "phi-3.5-moe"),
    ({"model": "mixtral-8x7b"}, lambda p: p.model != "phi-3.5-moe"),
    ({"model": {"base": "mixtral-8x7b", "expert_bits": 8}}, lambda p: p.model != "phi-3.5-moe" and p.model["expert_bits"] == 8),
    ({"model.expert_bits": 4}, lambda p: p.model != "phi-3.5-moe" and p.model["expert_bits"] == 4),
    ({"hardware": "a6000-i9-10980xe"}, lambda p: p.hardware != "rtx3090-epyc7532"),
    ({"hardware.devices.gpu0.memory_bytes": "24 GiB"}, lambda p: "24 GiB" in str(p.hardware)),
    ({"trace": "t"}, lambda p: p.trace == "t"),
    ({"trace": "mixtral-8x7b", "trace.requests": [8, 9]}, lambda p: p.trace != "t" and p.trace["requests"] == 8),
    ({"workload.batch_size": 2}, lambda p: p.workload["batch_size"] == 2),
    ({"workload.refill": True}, lambda p: p.workload["refill"]),
    ({"transfer.chunk": None}, lambda p: p.chunk_bytes is None),
    ({"cache.ratio": [0.25, 0.5]}, lambda p: p.ratio is not None),
    ({"cache.ratio": ["1/4", "50%"]}, lambda p: p.ratio is not None),
    ({"cache.budget": "16 GiB"}, lambda p: p.budget_bytes == 2**34),
    ({"cache.budget": 2**33}, lambda p: p.budget_bytes == 2**33),
    ({"policies": "dali"}, lambda p: p.policy["name"] == "dali"),
    ({"policies": "dali(w_size=2,assignment=greedy)"}, lambda p: p.policy.get("w_size") == 2),
    ({"policies.w_size": 4}, lambda p: p.policy.get("w_size") == 4),
    ({"policies": ["lru", "dali"], "decision_us": 1.5}, lambda p: p.decision_us == 1.5),
    ({"transfer.curve": "chunked"}, lambda p: p.curve == "chunked"),
    ({"transfer.chunk": "4 MiB"}, lambda p: p.chunk_bytes == 2**22),
    ({"decision_us": 0}, lambda p: p.decision_us == 0),
    ({"extrapolate": True}, lambda p: p.extrapolate),
    ({"warm_up_steps": 1}, lambda p: p.warm_up_steps == 1),
    ({"predictors.residual": "oracle"}, lambda p: p.predictors["residual"] == "oracle"),
    ({"repeat": 1}, lambda p: p.repeat == 1),
]


@pytest.fixture(scope="module")
def grid() -> list[Point]:
    return points(**GRID)


# Every third each time; the others with `make test-long`.
RULES = [pytest.param(*one, marks=[] if n % 3 == 0 else [pytest.mark.long]) for n, one in enumerate(EXCLUSIONS)]


@pytest.mark.parametrize(("rule", "leaves_out"), RULES, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_exclude_leaves_out_what_fits_and_nothing_else(rule: dict[str, Any], leaves_out: Any, grid: list[Point]):
    kept = points(**GRID, exclude=[rule])
    assert 0 < len(kept) < len(grid)
    assert kept == [point for point in grid if not leaves_out(point)]


def test_rules_of_exclude_are_alternatives_and_their_fields_conditions(grid: list[Point]):
    # model, hardware with trace, batch and refill, cache, policies, transfer, decision, extrapolation and warm-up, rest
    assert len(grid) == 3 * (1 + 2 * 2) * 4 * 3 * 3 * 4 * 2 * 2 * 2 * 2
    kept = points(**GRID, exclude=[{"decision_us": 0, "policies": "lru"}, {"decision_us": 1.5, "policies": "dali"}])
    assert len(kept) == len(grid) // 2  # two thirds of the one half, a third of the other
    assert {(p.decision_us, p.policy["name"]) for p in kept} == {(0, "dali"), (1.5, "lru")}


# ---- zip


def test_a_model_made_small_keeps_its_widths_together():
    model = {"base": "mixtral-8x7b", "expert_bits": [[4, 2]]}
    others = {"hardware": "h", "trace": "t", "cache": {"ratio": 0.5}, "policies": ["lru"]}
    config = parse_config({"model": model, **others}, "x.yaml")
    small = quick(config, "x.yaml")
    assert [one.model["expert_bits"] for one in expand(config, "x.yaml")] == [[4, 2]]
    assert [one.model["expert_bits"] for one in expand(small, "x.yaml")] == [[4, 2]]


def test_zip_reaches_into_mappings_and_policies_and_groups_multiply():
    found = points(
        zip=[["model.expert_bits", "cache.budget", "policies"], ["workload.batch_size", "hardware.devices.gpu0.memory_bytes"]],
        model={"base": "mixtral-8x7b", "expert_bits": [4, 8]},
        cache={"budget": ["8 GiB", "16 GiB"]},
        policies=["lru", {"name": "dali", "w_size": [2, 4]}],
        workload={"batch_size": [1, 2]},
        hardware={"base": "rtx3090-epyc7532", "devices": {"gpu0": {"memory_bytes": ["24 GiB", "48 GiB"]}}},
    )
    seen = [
        (p.model["expert_bits"], p.budget_bytes, p.policy.get("w_size"), p.workload["batch_size"], list(p.hardware.values())[1])
        for p in found
    ]
    assert seen == [
        (4, 2**33, None, 1, "24 GiB"), (4, 2**33, None, 2, "48 GiB"),
        (8, 2**34, 2, 1, "24 GiB"), (8, 2**34, 4, 1, "24 GiB"), (8, 2**34, 2, 2, "48 GiB"), (8, 2**34, 4, 2, "48 GiB"),
    ]  # fmt: skip


# ---- repeat


def test_repeats_draw_other_requests_and_other_made_up_routing():
    found = points(repeat=3, workload={"seed": 5}, trace=["t", {"synthesize": "mixtral-8x7b", "seed": 7}])
    assert [(p.repeat, p.workload["seed"], p.trace if isinstance(p.trace, str) else p.trace["seed"]) for p in found] == [
        (0, 5, "t"), (1, 6, "t"), (2, 7, "t"), (0, 5, 7), (1, 6, 8), (2, 7, 9),
    ]  # fmt: skip


# Student's t, two-sided 95 %, by degrees of freedom: from a printed table
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def test_repeats_become_one_row_with_mean_and_interval(tmp_path: Path):
    rows = run_experiment(resolve(tmp_path, repeat=3, cache={"ratio": [0.25, 0.5]}, policies=["lru", "on-demand"])).rows
    assert len({row["requests_drawn"] for row in rows[:6]}) == 3
    one, *others = aggregate(rows)
    assert [(row["cache_ratio"], row["policy"]) for row in (one, *others)] == [
        (c, p) for c in (0.25, 0.5) for p in ("lru", "on-demand")
    ]
    speeds = [row["decode_tokens_per_s"] for row in rows if row["cache_ratio"] == 0.25 and row["policy"] == "lru"]
    assert one["repeats"] == len(set(speeds)) == 3
    assert one["decode_tokens_per_s"] == pytest.approx(fmean(speeds))
    assert one[f"{CI}decode_tokens_per_s"] == pytest.approx(T[2] * stdev(speeds) / math.sqrt(3), rel=1e-3)
    assert one["error"] is None and CI + "batch_size" not in one and one["seed"] == 0


def test_seeds_that_drew_the_same_requests_are_one_draw(tmp_path: Path):
    alone = write_trace(tmp_path / "alone.safetensors", n_requests=1)
    (one,) = aggregate(run_experiment(resolve(tmp_path, repeat=3, trace=str(alone), policies=["lru"])).rows)
    assert one[f"{CI}hit_rate"] is None and one["notes"].endswith("3 seeds drew the same requests")
    two = write_trace(tmp_path / "two.safetensors", n_requests=2)
    rows = run_experiment(resolve(tmp_path, repeat=6, trace=str(two), policies=["lru"])).rows
    (one,) = aggregate(rows)
    draws = sorted({row["hit_rate"] for row in rows})
    assert len(draws) == 2 and one["notes"].endswith("6 seeds drew 2 different sets of requests")
    assert one["hit_rate"] == pytest.approx(fmean(draws)), "each draw counts once, however often it came"
    assert one[f"{CI}hit_rate"] == pytest.approx(T[1] * stdev(draws) / math.sqrt(2), rel=1e-3)


def test_a_failed_repeat_is_told_and_the_others_count():
    rows = [
        {"run": i, "policy": "lru", "trace": "t", "repeat": i, "requests_drawn": str(i), "hit_rate": 0.1 * i, "error": None}
        for i in range(3)
    ]
    rows[1] = {"run": 1, "policy": "lru", "trace": "t", "repeat": 1, "error": "no room"}
    (one,) = aggregate(rows)
    assert one["repeats"] == 2 and one["error"] == "1 of 3 repeats failed"
    assert one["hit_rate"] == pytest.approx(0.1)


def test_what_differs_in_a_setting_is_no_repeat(tmp_path: Path):
    """Nor is a failed run, whose row has no results, of another setting than its repeats."""
    workload = {"prompt_tokens": 6, "decode_tokens": 3, "prefill_chunk": [None, 2]}
    changes: dict[str, Any] = {"warm_up_steps": [None, 1], "extrapolate": [False, True], "decision_us": [0, 1]}
    rows = run_experiment(resolve(tmp_path, repeat=2, policies=["lru"], workload=workload, **changes)).rows
    assert [row["repeats"] for row in aggregate(rows)] == [2] * 16
    broken = [{k: v for k, v in row.items() if not isinstance(v, float) or k == "cache_ratio"} for row in rows]
    for row in broken:
        row["error"] = "x" if row["repeat"] else None
        if row["repeat"]:
            del row["warm_up_steps"]
    assert [row["error"] for row in aggregate(broken)] == ["1 of 2 repeats failed"] * 16


# ---- every field as a list

SWEEPS: dict[str, Any] = {
    "model": {"model": [{"base": "mixtral-8x7b", "expert_bits": 4}, {"base": "mixtral-8x7b", "expert_bits": 3}]},
    "model.expert_bits": {"model": {"base": "mixtral-8x7b", "expert_bits": [4, 3]}},
    "hardware": {"hardware": ["rtx3090-epyc7532", "a6000-i9-10980xe"]},
    "hardware number": {"hardware": {"base": "rtx3090-epyc7532", "devices": {"gpu0": {"launch_us": [1, 50]}}}},
    "engine": {"engine": ["machine", "llama.cpp"]},
    "trace": {"trace": [{"synthesize": "mixtral-8x7b", "requests": n, "prompt": 6, "decode": 3, "seed": n} for n in (1, 2)]},
    "trace.seed": {"trace": {"synthesize": "mixtral-8x7b", "requests": 2, "prompt": 6, "decode": 3, "seed": [0, 1]}},
    "batch_size": {"workload": {"batch_size": [1, 2], "prompt_tokens": 6, "decode_tokens": 3}},
    "prompt_tokens": {"workload": {"prompt_tokens": [6, 4], "decode_tokens": 3}},
    "no prompt": {"workload": {"prompt_tokens": [6, 0], "decode_tokens": 3}},
    "requests": {"workload": {"prompt_tokens": 6, "decode_tokens": 3, "requests": [[3], [5, 1]]}},
    "decode_tokens": {"workload": {"prompt_tokens": 6, "decode_tokens": [3, 2]}},
    "n_batches": {"workload": {"n_batches": [1, 2], "prompt_tokens": 6, "decode_tokens": 3}},
    "seed": {"workload": {"seed": [0, 3], "prompt_tokens": 6, "decode_tokens": 3}},
    "micro_batches": {"workload": {"batch_size": 2, "micro_batches": [1, 2], "prompt_tokens": 6, "decode_tokens": 3}},
    "prefill_chunk": {"workload": {"prefill_chunk": [None, 2], "prompt_tokens": 6, "decode_tokens": 3}},
    "refill": {"workload": {"batch_size": 2, "n_batches": 2, "prompt_tokens": None, "refill": [False, True]}},
    "reuse": {"workload": {"reuse": [None, "shifted"], "prompt_tokens": 6, "decode_tokens": 3}},
    "cache.ratio": {"cache": {"ratio": [0.25, 0.5]}},
    "cache.budget": {"cache": {"budget": ["12 GiB", "16 GiB"]}},
    "cache": {"cache": {"ratio": 0.25, "budget": "12 GiB"}},
    "transfer.curve": {"transfer": {"curve": ["pinned", "pageable"]}},
    "transfer.chunk": {"transfer": {"curve": "chunked", "chunk": [None, "4 MiB"]}},
    "decision_us": {"decision_us": [0, 500]},
    "extrapolate": {"extrapolate": [False, True]},
    "warm_up_steps": {"warm_up_steps": [None, 2]},
    "predictors": {"predictors": {"residual": ["oracle", "synthetic:0.1"]}, "policies": ["dali"]},
    "policy option": {"policies": [{"name": "dali", "w_size": [2, 4]}]},
    "repeat": {"repeat": 2},
}  # fmt: skip
AS_WRITTEN = {"extrapolate": "extrapolate: false, true", "warm_up_steps": "warm_up: null, 2"}  # words of the file, not Python's
SAME = ("reuse", "extrapolate", "refill")  # nothing changes where requests are enough and equally long, and all was measured


@pytest.mark.parametrize("name", SWEEPS)
def test_every_field_sweeps_and_shows_in_rows_dry_run_and_quick(name: str, tmp_path: Path):
    experiment = resolve(tmp_path, **SWEEPS[name])
    n_policies = len({spec.policy_name for spec in experiment.specs}) if name != "policy option" else 1
    assert len(experiment.specs) == 2 * n_policies
    rows = run_experiment(experiment).rows
    assert all(row["error"] is None for row in rows), rows
    keys = run_keys(experiment)
    assert len(set(keys)) == len(keys), "settings that differ give other keys"
    first, second = rows[n_policies - 1], rows[2 * n_policies - 1]  # of one policy
    assert first["policy_name"] == second["policy_name"]
    results = ("makespan_ns", "hit_rate_cold", "hit_rate_decode_warm", "bytes_total", "error", "peak_memory_bytes.gpu0")
    assert ([first.get(k) for k in results] != [second.get(k) for k in results]) == (name not in SAME)
    told = describe_grid(experiment, None, 1, 2)
    assert f"{len(rows)} runs" in told and f"0 of them done, {len(rows)} to do" in told
    if name != "repeat":
        assert any(line.count(", ") for line in told.splitlines()[:-2]), told
    if name in AS_WRITTEN:
        assert AS_WRITTEN[name] in told.splitlines()
    smaller = quick(experiment.config, "a.yaml")
    for spec in Experiment(smaller, "a.yaml").specs:
        assert spec.workload.n_batches == 1 and (spec.workload.decode_tokens or 0) <= 4
    assert {s.policy_name for s in Experiment(smaller, "a.yaml").specs} == {s.policy_name for s in experiment.specs}


@pytest.mark.parametrize("field", sorted(Config.model_fields))
def test_no_field_is_forgotten_here(field: str):
    """A new field of the file is to be swept above, or named here as one that does not sweep."""
    fixed = {"name", "description", "zip", "exclude", "plots", "timeline", "frames", "output", "intervals"}
    swept = {key for changes in SWEEPS.values() for key in changes}
    assert (field in swept) != (field in fixed)


# ---- dry run


def test_a_dry_run_tells_grid_size_and_what_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    counted = Counted(monkeypatch)
    file = write(tmp_path, cache={"ratio": [0.25], "budget": ["12 GiB"]}, **BARE)
    assert main(["run", str(file), "--out", "out"]) == 0
    assert counted() == 4
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")}
    capsys.readouterr()
    more = ["--set", "cache.ratio=[0.25, 0.5]", "--set", "workload.batch_size=[1, 2]"]
    assert main(["run", str(file), "--out", "out", "--dry-run", *more]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:4] == ["policy: on-demand, lru", "batch_size: 1, 2", "cache_ratio: 0.25, 0.5", "cache_budget_bytes: 12 GiB"]
    assert told[4] == "12 runs (2 policies at 6 settings), 4 of them done, 8 to do"
    assert re.fullmatch(
        r"estimated time: (less than 1|\d+) s on \d process(es)?, without figures \(from short runs of 2 policies\)", told[5]
    )
    assert {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("*")} == before
    assert counted() == 0
    assert main(["run", str(file), "--out", "new", "--dry-run"]) == 0
    assert not (tmp_path / "new").exists()


FOREIGN = """
from pathlib import Path

from moesim.policies.systems.caches import LRU

Path(__file__).with_name("imported").write_text("yes")


class Mine(LRU):
    \"\"\"One like LRU.\"\"\"
"""


def test_a_dry_run_lists_what_it_would_import_and_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dry_package").mkdir()
    (tmp_path / "dry_package" / "__init__.py").write_text(FOREIGN)
    (tmp_path / "dry_package" / "inner.py").write_text(FOREIGN)
    (tmp_path / "dry_single.py").write_text(FOREIGN)
    (tmp_path / "dry-1.0.dist-info").mkdir()
    (tmp_path / "dry-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: dry\nVersion: 1.0\n")
    (tmp_path / "dry-1.0.dist-info" / "entry_points.txt").write_text("[moesim.policies]\nby-entry = dry_package.inner:Mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    policies = ["lru", "dry_package.inner:Mine", "by-entry", {"name": "dry_single:Mine", "slots_split": ["spread", "equal"]}]
    file = write(tmp_path, **BARE | {"policies": policies})
    for more in ([], ["--quick"]):
        assert main(["run", str(file), "--dry-run", *more]) == 0
        told = capsys.readouterr().out.splitlines()
        package = f"{tmp_path}/dry_package"
        said = [line for line in told if line.startswith("would import and run ")]
        assert said == [
            f"would import and run dry_package.inner ({package}/__init__.py and {package}/inner.py); it is neither "
            "checked nor tried here",
            f"would import and run dry_single ({tmp_path}/dry_single.py); it is neither checked nor tried here",
        ]
        assert "5 runs (5 policies at 1 settings); how many of them are done shows once the code is imported" in told
        assert told[-1].endswith("(from short runs of 1 policy)")
    assert main(["compare", "--policies", "lru,dry_single:Mine", "--dry-run"]) == 0
    assert f"would import and run dry_single ({tmp_path}/dry_single.py)" in capsys.readouterr().out
    assert main(["compare", "--policies", "lru,builtins:Mine", "--dry-run"]) == 0
    assert "would import and run builtins (which comes from no file)" in capsys.readouterr().out
    assert not list(tmp_path.rglob("imported"))
    assert not {"dry_package", "dry_package.inner", "dry_single"} & set(sys.modules)
    assert main(["run", str(file), "--out", str(tmp_path / "out")]) == 0
    assert len(list(tmp_path.rglob("imported"))) == 2


START = 1_000_000  # ns


def test_the_estimated_time_is_the_pace_of_short_runs_times_what_there_is_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """On a machine on which each policy takes so many nanoseconds a lookup, and a run begins in a millisecond."""
    write_trace(tmp_path / "small.safetensors", decode=20)
    workload = {"batch_size": [1, 4], "prompt_tokens": 6, "decode_tokens": 20}
    experiment = resolve(tmp_path, workload=workload, policies=["on-demand", "lru", "fiddler"])
    clock, pace = Clock(), {"on-demand": 1_000, "lru": 3_000, "fiddler": 5_000}
    tried: list[RunSpec] = []

    def run(experiment: Experiment, spec: RunSpec) -> Any:
        tried.append(spec)
        clock.advance(START + pace[spec.policy_name] * lookups(experiment, spec))
        return SimpleNamespace(failure=None)

    monkeypatch.setattr("moesim.experiment.run.time", clock)
    monkeypatch.setattr("moesim.experiment.run.run_one", run)
    estimated, n_tried, failures = seconds(experiment, experiment.specs)
    assert estimated == pytest.approx(
        sum(START + pace[spec.policy_name] * lookups(experiment, spec) for spec in experiment.specs) / 1e9, rel=1e-5
    )
    assert [spec.policy_name for spec in tried] == ["on-demand", "on-demand", "lru", "lru", "fiddler", "fiddler"]
    assert (n_tried, failures) == (3, ()) and [spec.workload.decode_tokens for spec in tried] == [4, 16] * 3
    estimated, n_tried, failures = seconds(experiment, experiment.specs, limit_s=1e-6)  # over as soon as one has been tried
    assert (n_tried, failures) == (1, ())
    whole = len(experiment.specs) * START + 1_000 * sum(lookups(experiment, spec) for spec in experiment.specs)
    assert estimated == pytest.approx(whole / 1e9, rel=1e-5)


# ---- keys


def keys_of(folder: Path, **changes: Any) -> list[str]:
    return run_keys(resolve(folder, **changes))


def test_a_key_follows_contents_and_not_names(tmp_path: Path):
    (key,) = keys_of(tmp_path, policies=["lru"])
    shutil.copy(tmp_path / "small.safetensors", tmp_path / "renamed.safetensors")
    profile = Path(__file__).resolve().parents[2] / "hardware_profiles" / "rtx3090-epyc7532.yaml"
    (tmp_path / "profiles").mkdir()
    shutil.copy(profile, tmp_path / "profiles" / profile.name)
    others = {"plots": ["hit_rate"], "name": "x", "output": "y", "frames": True, "timeline": None, "description": "z"}
    for changes in (
        {"trace": str(tmp_path / "renamed.safetensors")}, {"hardware": str(tmp_path / "profiles" / profile.name)}, others,
        {"policies": ["on-demand", "lru"], "exclude": [{"policies": "on-demand"}]},
    ):  # fmt: skip
        assert keys_of(tmp_path, **{"policies": ["lru"], **changes}) == [key], changes
    write_trace(tmp_path / "small.safetensors", seed=1)
    assert keys_of(tmp_path, policies=["lru"]) != [key], "another trace under the same name"


def test_a_changed_number_of_a_profile_is_another_key(tmp_path: Path):
    text = (Path(__file__).resolve().parents[2] / "hardware_profiles" / "rtx3090-epyc7532.yaml").read_text()
    mine = tmp_path / "mine.yaml"
    found = set()
    for memory in ("24 GiB", "23 GiB"):
        raw = yaml.safe_load(text)
        raw["devices"]["gpu0"]["memory_bytes"]["value"] = memory
        mine.write_text(yaml.safe_dump(raw))
        found |= set(keys_of(tmp_path, hardware=str(mine), policies=["lru"]))
    assert len(found) == 2


def test_only_what_depends_on_a_change_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    counted = Counted(monkeypatch)
    other = str(write_trace(tmp_path / "other.safetensors", seed=3))
    file = write(tmp_path, trace=[str(tmp_path / "small.safetensors"), other], **BARE)
    again = ["run", str(file), "--out", "out", "--jobs", "1"]
    assert main(again) == 0
    assert counted() == 4
    write_trace(tmp_path / "other.safetensors", seed=4)
    assert main(again) == 0
    assert counted() == 2, "runs on the other trace are kept"
    assert main([*again, "--set", "policies.1={name: lru, per_layer: false}"]) in (0, 2)
    monkeypatch.setattr("moesim.experiment.resolve.code_digest", lambda: "another version")
    counted()
    assert main(again) == 0
    assert counted() == 4, "other code, other results"
    assert main(again) == 0
    assert counted() == 0


MINE = "from moesim.policies.systems.caches import LRU\n\n\nclass Mine(LRU):\n    '''One of the current folder.'''\n"


def test_an_edited_policy_of_the_current_folder_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    counted = Counted(monkeypatch)
    policy = tmp_path / "sweep_policy_of_a_test.py"
    policy.write_text(MINE)
    file = write(tmp_path, policies=["lru", f"{policy.stem}:Mine"], **BARE)
    again = ["run", str(file), "--out", "out", "--jobs", "1"]
    assert main(again) == 0
    assert counted() == 2
    policy.write_text(MINE + "\n# edited\n")
    assert main(again) == 0
    assert counted.policies == [f"{policy.stem}:Mine"]


def test_all_code_that_a_run_goes_through_counts():
    """Whatever the runner and the policies import, at the top of a module or within, is of a package that keys hash."""
    used = {"experiment.runner"} | {name for name in MODULES if name.split(".")[0] == "policies"}
    todo = list(used)
    while todo:
        name = todo.pop()
        found = {i.imported for i in all_imports() if i.importer == name and i.ours and not i.for_types}
        todo += found - used
        used |= found
    assert len(used) > 80
    missing = {name for name in used if "." in name and name.split(".")[0] not in PACKAGES}
    assert not missing, f"moesim.experiment.store.PACKAGES lacks the package of {sorted(missing)}"
    assert {name for name in PACKAGES if name not in MODULES} == set()


# ---- one run once more


def test_a_run_of_a_folder_is_told_once_more_only_of_the_same_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(write(tmp_path, cache={"ratio": [0.25, 0.5]})), "--out", "out"]) == 0
    assert lines(capsys)[-1] == "wrote out"
    kept, simulated = outcome_of(Path("out"), 0), outcome_of(Path("out"), 3)
    assert kept.records is not None and simulated.records is not None
    assert kept.split is not None
    assert {f"time_{cause}_ns": ns for cause, ns in kept.split.total().items()}.items() <= kept.row.items()
    with monkeypatch.context() as patch:  # as where several machines have the name that the row says
        patch.setattr("moesim.experiment.folder._machine", lambda *_: None)
        again = outcome_of(Path("out"), 0)
    assert (again.row, again.machine, again.records) == (kept.row, kept.machine, kept.records)
    (file,) = Path("out/records").glob(f"{str(kept.row['key'])[:32]}-*")
    whole = file.read_bytes()
    file.write_bytes(b"damaged")
    capsys.readouterr()
    assert outcome_of(Path("out"), 0).records == kept.records and file.read_bytes() == b"damaged"
    told = lines(capsys)[0]
    assert told.endswith("changed since moesim wrote it, so that it counts as not there; the folder stays as it is")
    file.write_bytes(whole)
    with monkeypatch.context() as patch:
        changed = {"run": 9, "cost_label": "other", "model": "other", "n_steps": 0, "makespan_ns": 1, "new": 1}
        other = replace(simulated, row=simulated.row | changed)
        patch.setattr("moesim.experiment.folder.run_one", lambda *_, **__: other)
        numbers = {"n_steps": 0, "makespan_ns": 1}
        first = next(name for name in simulated.row if name in numbers)  # before texts, whatever their names
        told = f"got another {first}: {simulated.row[first]} before, {numbers[first]} now; an input, code of a policy or moesim"
        with pytest.raises(ConfigError, match=f"{told} changed; run it again$"):
            outcome_of(Path("out"), 3)
    write_trace(tmp_path / "small.safetensors", seed=1)
    assert outcome_of(Path("out"), 0).row == kept.row
    with pytest.raises(
        InputError, match=r"^out: run 3 \(.*: expected the trace .*/small.safetensors \(sha256 [0-9a-f]{16}\) to simulate it "
    ):
        outcome_of(Path("out"), 3)


def test_each_run_of_a_sweep_over_traces_is_simulated_again_on_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    traces = [str(write_trace(tmp_path / f"{name}.safetensors", seed=seed)) for seed, name in enumerate("ab")]
    file = write(tmp_path, trace=traces, policies=["lru", "on-demand"], cache={"ratio": [0.25, 0.5]}, timeline=None)
    assert main(["run", str(file), "--out", "out", "--jobs", "1"]) == 0
    rows = read_summary(Path("out"))["runs"]
    assert len({row["makespan_ns"] for row in rows}) > 4
    shutil.rmtree(Path("out/records"), ignore_errors=True)
    for run, row in enumerate(rows):
        found = outcome_of(Path("out"), run)
        assert found.row == row and found.records is not None and found.records.makespan_ns == row["makespan_ns"]


def test_kept_records_are_read_without_importing_policies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kept_policy.py").write_text(FOREIGN)
    timeline = {"policies": ["kept_policy:Mine"], "steps": 2}
    file = write(tmp_path, policies=["lru", "kept_policy:Mine"], cache={"ratio": [0.25, 0.5]}, timeline=timeline)
    assert main(["run", str(file), "--out", "out", "--jobs", "1"]) == 0
    rows = read_summary(Path("out"))["runs"]
    there = [run for run, row in enumerate(rows) if list(Path("out/records").glob(f"{row['key'][:32]}-*"))]
    (kept,) = [run for run in there if rows[run]["policy_name"] == "kept_policy:Mine"]
    (simulated,) = [run for run, row in enumerate(rows) if row["policy_name"] == "kept_policy:Mine" and run != kept]
    (tmp_path / "imported").unlink()
    monkeypatch.delitem(sys.modules, "kept_policy")
    assert outcome_of(Path("out"), kept).row == rows[kept]
    assert not (tmp_path / "imported").exists()
    with pytest.raises(InputError, match="to simulate it again takes kept_policy:Mine, whose code is not imported to read a"):
        outcome_of(Path("out"), simulated)
    own = next(run for run, row in enumerate(rows) if row["policy_name"] == "lru" and run not in there)
    assert outcome_of(Path("out"), own).row == rows[own]
    with monkeypatch.context() as patch:
        patch.setattr("moesim.experiment.folder.run_one", lambda *_, **__: SimpleNamespace(row=rows[own] | {"n_steps": 0}))
        why = "code of a policy or moesim changed, or it depends on what kept_policy:Mine needs (--trust); run it again"
        with pytest.raises(ConfigError, match=f"{re.escape(why)}$"):
            outcome_of(Path("out"), own)
    assert not (tmp_path / "imported").exists()
    assert outcome_of(Path("out"), simulated, trust=True).row == rows[simulated]
    assert (tmp_path / "imported").exists()
    (tmp_path / "code").mkdir()
    (tmp_path / "kept_policy.py").rename(tmp_path / "code" / "kept_policy.py")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "kept_policy")
    assert outcome_of(Path("out"), simulated, trust=True, inputs=Path("code")).row == rows[simulated]
    for run in (-1, len(rows)):
        with pytest.raises(ConfigError, match=f"^out: expected a run from 0 to {len(rows) - 1}, got {run}$"):
            outcome_of(Path("out"), run)


def test_repeats_of_settings_with_the_same_label_are_not_mixed(tmp_path: Path):
    """Two models that differ in the bytes of single layers have one label; `group` tells them apart."""
    by_layer = [[40_000_000] * 31 + [20_000_000], [20_000_000] * 31 + [40_000_000]]
    experiment = resolve(
        tmp_path, model={"base": "mixtral-8x7b", "expert_bytes_by_layer": by_layer}, policies=["on-demand"], repeat=2
    )
    rows = run_experiment(experiment).rows
    assert len({row["model"] for row in rows}) == 1
    assert len({row["group"] for row in rows}) == 2
    both = aggregate(rows)
    assert [row["repeats"] for row in both] == [2, 2]
    assert both[0]["makespan_ns"] > 1.5 * both[1]["makespan_ns"]


def test_a_metric_without_meaning_in_some_repeats_is_the_mean_of_the_others():
    rows = [
        {"policy": "p", "group": "g", "repeat": i, "trace": "t", "requests_drawn": str(i), "error": None, "share": share}
        for i, share in enumerate([None, 0.25, 0.75])
    ]
    (row,) = aggregate(rows)
    assert row["share"] == 0.5
    assert row["ci95.share"] == pytest.approx(12.706 * 0.25, rel=1e-3)  # two draws: Student's t with one degree of freedom


@pytest.mark.parametrize(
    "policy",
    [
        {"name": "lru"},
        {"name": "kt-expert", "strategy": "frequency", "gpu_experts": 2},
        {"name": "hybrimoe-paper", "alpha": 0.25},
        {"name": "prescope", "async_io": False},
        {"name": "freetoken", "max_fetch": None},
    ],
)
def test_the_label_of_a_policy_is_read_as_the_policy(policy: dict[str, Any]):
    """Labels are what tables print, so they are what people type."""
    assert [*policies_of(policy_label(policy), "here")] == [*policies_of(policy, "here")] == [policy]
    both = policy_list(f"static, {policy_label(policy)},{{name: dali, prefetch_size: 0}}", "here")
    assert [one for written in both for one in policies_of(written, "here")] == [
        {"name": "static"}, policy, {"name": "dali", "prefetch_size": 0}
    ]  # fmt: skip


@pytest.mark.parametrize("imports", [True, False])
def test_resolving_makes_a_policy_once_whatever_the_number_of_settings(imports: bool, monkeypatch: pytest.MonkeyPatch):
    made: list[Any] = []

    def make(spec: Any, place: str = "policies") -> Any:
        made.append(spec)
        return make_policy(spec, place)

    monkeypatch.setattr("moesim.experiment.routing.make_policy", make)
    raw = {
        "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532", "trace": "mini-mixtral",
        "workload": {"batch_size": 1, "prompt_tokens": 4, "decode_tokens": 2}, "cache": {"ratio": 0.25}, "repeat": 40,
        "policies": ["lru", {"name": "dali", "w_size": [2, 4]}],
    }  # fmt: skip
    assert len(Experiment(parse_config(raw, "a.yaml"), "a.yaml", imports=imports).specs) == 120
    assert made == [{"name": "lru"}, {"name": "dali", "w_size": 2}, {"name": "dali", "w_size": 4}]


def test_a_label_is_the_name_of_a_policy_and_its_sweeps_add_what_they_vary():
    plain, *swept = points(policies=["lru", {"name": "dali", "w_size": [1, 2], "u_size": 3, "label": "Ours"}])
    assert policy_label(plain.policy) == "lru"
    assert [policy_label(one.policy) for one in swept] == ["Ours(w_size=1)", "Ours(w_size=2)"]
    assert repr(make_policy(swept[0].policy)) == repr(make_policy({"name": "dali", "w_size": 1, "u_size": 3}))
    for wrong in ("", 3, "a\nb", "x" * 61):
        with pytest.raises(ConfigError, match="label: expected a text of one line"):
            points(policies=[{"name": "lru", "label": wrong}])
