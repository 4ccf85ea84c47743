"""Hit rates of policies' caches without costs: equal to a replay of the trace, refused where they depend on times."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from moesim.cli.main import main
from moesim.errors import ConfigError
from moesim.model import load_model
from moesim.studies.cache_rules import cache_rates
from moesim.trace import Trace
from moesim.trace.derived import subset
from moesim.trace.stats.caches import layer_hit_rates
from moesim.trace.synthesis import read_parameters, synthesize
from moesim.trace.synthesis.lift import hit_rate_of

SIZES = {
    "n_layers": 4, "n_experts": 64, "top_k": 8, "hidden": 64, "expert_intermediate": 64, "n_heads": 1, "n_kv_heads": 1,
    "head_dim": 64, "vocab": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def routing(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Trace]:
    """Synthetic routing of a small model, as a file."""
    parameters = read_parameters("mixtral-8x7b").replace(n_layers=3, n_experts=16, top_k=1)  # no two of a token are used last
    trace = synthesize(parameters, n_requests=3, n_prompt=0, n_decode=30, scores=True)
    return str(trace.write(tmp_path_factory.mktemp("routing") / "small.safetensors")), trace


def test_rates_are_those_of_a_replay_of_the_trace(routing: tuple[str, Trace]):
    path, trace = routing
    found = cache_rates(["lru", "belady"], trace=path, slots=[4, "50%"], jobs=1)
    assert found.n_layers == 3 and not found.assumed and not found.refused
    replayed = layer_hit_rates(np.asarray(trace.experts), 16, (4, 8), ("lru",))["lru"].mean(axis=1)
    rates = {(row["policy"], row["cache_slots"]): row["hit_rate_decode"] for row in found.rows}
    for slots, rate in zip(
        (4, 8), replayed, strict=True
    ):  # a cache begins with experts of the policy's choice, the replay's empty
        assert 0 <= (rates["lru", 3 * slots] - rate) * trace.experts.size <= 3 * slots
        assert rates["belady", 3 * slots] > rates["lru", 3 * slots]


def test_a_cache_that_depends_on_times_is_refused_by_name(routing: tuple[str, Trace], capsys: pytest.CaptureFixture[str]):
    found = cache_rates(["lru", "two-uploads-lru"], trace=routing[0], slots=[8], jobs=1)
    assert [row["policy"] for row in found.rows] == ["lru"]
    assert "depend on the machine" in found.refused["two-uploads-lru"]
    asked = ["trace", "caches", routing[0], "--slots", "8", "--jobs", "1", "--policies"]
    assert main([*asked, "lru,two-uploads-lru"]) == 0
    printed = capsys.readouterr()
    assert "two-uploads-lru: its hit rates depend on the machine" in printed.err and "over lifts" not in printed.out
    assert main([*asked, "lru", "-o", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["slots"] == 8 and row["hit %"] == pytest.approx(100 * found.rows[0]["hit_rate_decode"])


def test_assumed_routing_has_a_range_and_a_counted_rate_narrows_it():
    model = load_model({"name": "unheard-of", **SIZES})
    wide, narrow = (
        cache_rates(["lru"], model=model, hit_rate=rate, slots=[16], requests=2, decode=64, jobs=1)
        for rate in (None, f"{hit_rate_of(2.03, 16, 64):.6f}@16")
    )
    ends = [[row["hit_rate_decode"] for row in found.rows[0]["lifts"]] for found in (wide, narrow)]
    assert wide.assumed and ends[0][0] < ends[1][0] < ends[0][1] == ends[1][1] < ends[1][2] < ends[0][2]  # +- 1 and +- 0.3
    for wrong in (0, "0%", 64, "x"):
        with pytest.raises(ConfigError, match="--slots"):
            cache_rates(["lru"], model=model, slots=[wrong])


def test_a_trace_or_a_model():
    with pytest.raises(ConfigError, match="expected a trace or --model, got neither"):
        cache_rates(["lru"])
    with pytest.raises(ConfigError, match="got both"):
        cache_rates(["lru"], trace="mini-mixtral", hit_rate="50%@2")


def test_requests_of_a_given_trace_are_its_first(routing: tuple[str, Trace], tmp_path: Path):
    path, trace = routing
    first = str(subset(trace, [0]).write(tmp_path / "first.safetensors"))
    one, alone, all_three = (
        [row["hit_rate_decode"] for row in cache_rates(["lru"], trace=name, slots=[4], requests=n, jobs=1).rows]
        for name, n in ((path, 1), (first, 8), (path, 8))
    )
    assert one == alone != all_three
