"""From a configuration to rows: sharing, labels, budgets, failures, processes."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moesim.core.units import parse_bytes
from moesim.errors import CapacityError, ConfigError, InputError, MoesimError, TraceError, WorkloadError
from moesim.experiment import run_experiment
from moesim.experiment.runner import initial_placement, notes_of, run_one, slots_used, slots_within
from moesim.fits import required_bytes
from moesim.hardware.costs import CostModel
from moesim.policies.composed import Composed
from moesim.policies.registry import make_policy
from moesim.policy import LAYER_PARTS
from moesim.testing import FakeView, tiny_machine, tiny_model, tiny_workload
from moesim.trace.predictors import NEVER, FutureUse
from tests.engine.engine_kit import Script
from tests.experiment.experiment_kit import resolve, write_trace


def test_rows_come_in_the_order_of_the_grid_and_share_the_workload(tmp_path: Path):
    experiment = resolve(
        tmp_path, workload={"batch_size": [1, 2], "prompt_tokens": 6, "decode_tokens": 2}, cache={"ratio": [0.25, 0.5]}
    )
    rows = run_experiment(experiment).rows
    assert [(r["batch_size"], r["cache_ratio"], r["policy"]) for r in rows] == [
        (b, c, p) for b in (1, 2) for c in (0.25, 0.5) for p in ("on-demand", "lru")
    ]
    assert [r["run"] for r in rows] == list(range(8))
    workloads = {id(experiment.workload(spec)) for spec in experiment.specs}
    assert len(workloads) == 2


@pytest.mark.parametrize(("ratio", "slots"), [(0.29, 74), (0.469, 120), (0.25, 64), (1.0, 256), (0.001, 0)])
def test_cache_slots_are_the_exact_floor(tmp_path: Path, ratio: float, slots: int):
    (spec,) = resolve(tmp_path, cache={"ratio": ratio}, policies=["on-demand"]).specs
    assert spec.cache_slots == slots


def test_more_cache_serves_more_hits_and_everything_is_labelled(tmp_path: Path):
    rows = run_experiment(resolve(tmp_path, cache={"ratio": [0.25, 0.75]}, policies=["lru"])).rows
    assert rows[0]["hit_rate"] < rows[1]["hit_rate"]
    for row in rows:
        assert row["source_label"] in ("synthetic", "assumed")
        assert "synthetic routing of synthetic-32x8" in str(row["notes"])
        assert "model expert_bits=4" in str(row["notes"])
        assert row["error"] is None


def test_a_budget_gives_the_largest_cache_that_fits(tmp_path: Path):
    budget = 12 * 2**30
    experiment = resolve(tmp_path, cache={"budget": budget}, policies=["lru"])
    (spec,) = experiment.specs
    row = run_one(experiment, spec).row
    workload, costs = experiment.workload(spec), _costs(spec)

    def needed(slots: int) -> int:
        placement = initial_placement(spec.model, costs, workload, make_policy("lru"), {"gpu0": slots}, {})
        return sum(required_bytes(spec.model, spec.hardware, workload.peak_kv_tokens, placement)["gpu0"].values())

    slots = int(row["cache_slots"])
    assert slots > 0
    assert needed(slots) <= budget < needed(slots + spec.model.n_layers)
    assert needed(slots - 1) < needed(slots), "no slot is counted that the policy cannot use"
    assert row["peak_memory_bytes.gpu0"] <= budget
    assert 0 < row["peak_pool_bytes.gpu0.cache"] < row["peak_memory_bytes.gpu0"]


def test_a_run_asks_its_policy_for_one_placement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    place = Composed.place
    monkeypatch.setattr(Composed, "place", lambda policy, view: asked.append(place(policy, view)) or asked[-1])
    experiment = resolve(tmp_path, cache={"ratio": 0.5}, policies=["lru"])
    row = run_one(experiment, experiment.specs[0]).row
    assert row["error"] is None
    assert len(asked) == 1
    assert row["cache_slots_used"] == slots_used(asked[0], experiment.specs[0].model)


def _costs(spec):
    from moesim.hardware.costs import CostModel

    return CostModel(spec.model, spec.hardware)


def test_a_budget_too_small_says_what_would_do(tmp_path: Path):
    experiment = resolve(tmp_path, cache={"budget": "1 GiB"}, policies=["lru"])
    (spec,) = experiment.specs
    with pytest.raises(
        CapacityError, match=r"expected at least .* GiB, which gpu0 of rtx3090-epyc7532 needs.* got 1 GiB;"
    ) as told:
        slots_within(2**30, spec.model, _costs(spec), experiment.workload(spec), make_policy("lru"), {}, "lru")
    least = parse_bytes(str(told.value).partition("at least ")[2].partition(",")[0])  # what is named is enough
    assert slots_within(least, spec.model, _costs(spec), experiment.workload(spec), make_policy("lru"), {}, "lru") > 0


@pytest.mark.parametrize("slots", [4, 5, 18, 29])
def test_a_budget_is_kept_by_the_gpu_that_needs_most(slots: int):
    """Of two GPUs one has everything; a slot takes an expert more."""
    model, hardware, policy = tiny_model(), tiny_machine(2), make_policy("lru")
    _, workload = tiny_workload(policy, 2)
    placement = policy.place(FakeView(model, hardware, slots=slots))
    need = required_bytes(model, hardware, workload.peak_kv_tokens, placement, workload.peak_requests)
    budget, more = sum(need["gpu0"].values()), model.expert_bytes(0)
    assert sum(need["gpu1"].values()) == 0
    for n_bytes, found in ((budget, slots), (budget + more - 1, slots), (budget + more, slots + 1)):
        assert slots_within(n_bytes, model, CostModel(model, hardware), workload, policy, {}, "lru") == found


def test_a_policy_that_needs_no_gpu_has_no_cache_in_any_budget():
    model, hardware = tiny_model(), tiny_machine()
    parts = [*product(LAYER_PARTS, range(model.n_layers)), ("leading", -1), ("embedding", -1), ("head", -1)]
    policy = Script(parts=dict.fromkeys(parts, "cpu0"), pools=[])
    _, workload = tiny_workload(policy, 2)
    assert slots_within(2**30, model, CostModel(model, hardware), workload, policy, {}, "mine") == 0


def test_what_does_not_fit_is_a_row_with_its_error_and_the_others_go_on(tmp_path: Path):
    results = run_experiment(resolve(tmp_path, model="mixtral-8x7b", cache={"ratio": 1.0}))
    done, failed = results.rows
    assert done["error"] is None and done["tpot_mean_ns"] > 0
    assert str(failed["error"]).startswith("gpu0 of rtx3090-epyc7532: needs ")
    assert "tpot_mean_ns" not in failed
    assert len(results.failures) == 1 and results.failures[0].startswith("run 1 (lru, cache 1, batch 1): gpu0 of ")


def test_processes_change_nothing(tmp_path: Path):
    changes = {"policies": ["on-demand", "lru", "fiddler"], "cache": {"ratio": [0.25, 0.5]}}
    alone = run_experiment(resolve(tmp_path, **changes))
    together = run_experiment(resolve(tmp_path, **changes), jobs=2, keep=lambda index: index == 1)
    assert together.rows == alone.rows
    assert [o.records is not None for o in together.outcomes] == [False, True, False, False, False, False]


def test_signals_of_one_policy_restrict_the_requests_of_all(tmp_path: Path):
    experiment = resolve(tmp_path, policies=["lru", "dali"])
    assert experiment.workload(experiment.specs[0]) is experiment.workload(experiment.specs[1])
    bare = tmp_path / "bare.safetensors"
    write_trace(bare, signals={})
    with pytest.raises(TraceError, match=r"small.yaml: policy dali needs signal:residual; trace '.*' has none"):
        resolve(tmp_path, trace=str(bare), policies=["dali"])
    assert resolve(tmp_path, trace=str(bare), policies=["lru", "on-demand"]).specs


def test_notes_say_how_many_requests_were_drawn_from_which(tmp_path: Path):
    def notes(**changes) -> list[str]:
        return [str(row["notes"]).split(", ")[1] for row in run_experiment(resolve(tmp_path, **changes)).rows]

    workload = {"batch_size": [1, 2], "prompt_tokens": 6, "decode_tokens": 2}
    assert notes(policies=["lru"], workload=workload) == ["1 request of 8", "2 requests of 8"]
    experiment = resolve(tmp_path, policies=["dali"])
    (spec,) = experiment.specs
    trace, run = experiment.trace(spec), experiment.workload(spec)
    table = SimpleNamespace(signals=[{"residual"}] * 5 + [set()] * 3)
    partly = SimpleNamespace(origin=trace.origin, header=trace.header, model=trace.model, remarks=(), requests=table)
    found = notes_of(spec, partly, run, assumes_memory=False, signals=experiment.signals(spec))
    assert "1 request of the 5 with signal residual" in found


def test_a_stand_in_takes_the_place_of_a_recorded_signal(tmp_path: Path):
    bare = tmp_path / "bare.safetensors"
    write_trace(bare, signals={})
    experiment = resolve(tmp_path, trace=str(bare), policies=["dali"], predictors={"residual": ["synthetic:0.9", "oracle"]})
    notes = [row["notes"] for row in run_experiment(experiment).rows]
    assert "residual = synthetic:0.9" in str(notes[0])
    assert "residual = oracle" in str(notes[1])
    labels = [row["source_label"] for row in run_experiment(experiment).rows]
    assert labels[1] == "oracle"


def test_a_signal_is_needed_however_it_is_named(tmp_path: Path):
    """Requests without the signal would get no prediction, and nothing would say so."""
    for policy, predictors, wanted in [
        ({"name": "dali", "prefetch_source": "signal:gate_next1"}, {}, {"gate_next1"}),
        ({"name": "dali", "prefetch_source": "gate_next1"}, {}, {"gate_next1"}),
        ("dali", {"residual": "signal:gate_next1"}, {"gate_next1"}),
        ({"name": "dali", "prefetch_source": "frequency"}, {"*": "gate_next1"}, {"gate_next1"}),
        ("dali", {}, {"residual"}),
        ("dali", {"residual": "oracle"}, set()),
        ("lru", {"residual": "gate_next1"}, set()),
    ]:
        experiment = resolve(tmp_path, policies=[policy], predictors=predictors)
        assert experiment.signals(experiment.specs[0]) == wanted, (policy, predictors)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"predictors": {"residual": "orakel"}}, "predictors.residual: unknown predictor 'orakel'; did you mean 'oracle'?"),
        ({"predictors": {"residual": "synthetic:1.5"}}, "predictors.residual: .*expected a recall from 0 to 1, .*got '1.5'"),
        (
            {"policies": [{"name": "dali", "prefetch_source": "synthetic:0.5,x"}]},
            "policy dali: .*expected a recall .*got '0.5,x'",
        ),
        (
            {"policies": [{"name": "dali", "prefetch_source": "gates"}]},
            "needs signal:gates; .*unknown signal 'gates'.*--set 'predictors.gates=coactivation'",
        ),
        ({"policies": [{"name": "dali", "prefetch_source": "frequency:all"}]}, "needs signal:frequency:all"),
    ],
)
def test_a_wrong_prediction_source_is_refused_before_anything_runs(tmp_path: Path, changes: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        resolve(tmp_path, **{"policies": ["dali"], **changes})


def test_requests_are_a_list_by_nature_and_several_lists_a_sweep(tmp_path: Path):
    def drawn(requests: Any, **changes: Any) -> list[tuple[int, ...]]:
        workload = {"prompt_tokens": 6, "decode_tokens": 2, "requests": requests}
        experiment = resolve(tmp_path, policies=["lru"], workload=workload, **changes)
        return [experiment.workload(spec).requests for spec in experiment.specs]

    assert drawn([3, 1]) == [(3, 1)]
    assert drawn([[3, 1], [4], "all"]) == [(3, 1), (4,), tuple(range(8))]
    assert drawn("all") == [tuple(range(8))] and drawn(None) == [drawn(None)[0]] and len(drawn(None)[0]) == 1
    assert drawn([[3, 1], [4]], exclude=[{"workload.requests": [[4]]}]) == [(3, 1)]
    zipped = drawn([[3, 1], [4]], zip=[["workload.requests", "cache.ratio"]], cache={"ratio": [0.25, 0.5]})
    assert zipped == [(3, 1), (4,)]


def test_an_oracle_policy_is_told_the_future_and_labelled(tmp_path: Path):
    oracle, lru = run_experiment(resolve(tmp_path, policies=["belady", "lru"])).rows
    assert oracle["source_label"] == "oracle"
    assert lru["source_label"] != "oracle"
    assert oracle["hit_rate"] >= lru["hit_rate"]


def test_the_future_names_the_next_step_that_uses_an_expert(tmp_path: Path):
    experiment = resolve(tmp_path)
    workload = experiment.workload(experiment.specs[0])
    future = FutureUse(workload)
    uses = [[step.index for step in workload.steps if 3 in step.micro[0].layers[5].active]]
    for step in workload.steps:
        later = [u for u in uses[0] if u > step.index]
        assert future.next_use(5, 3, step.index) == (later[0] if later else NEVER)


def test_a_charged_decision_time_is_an_assumption_and_costs_time(tmp_path: Path):
    free, charged = run_experiment(resolve(tmp_path, policies=["lru"], decision_us=[0, 500])).rows
    assert charged["decision_ns"] == 500_000
    assert charged["makespan_ns"] > free["makespan_ns"]
    assert charged["source_label"] == "assumed"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"policies": ["fidler"]}, ConfigError, "small.yaml: policies[0]: unknown policy 'fidler'; did you mean 'fiddler'?"),
        ({"policies": ["lru", "lru"]}, ConfigError, "small.yaml: policies: expected each policy once, got 'lru' 2 times"),
        (
            {"policies": [{"name": "lru", "sccope": 1}]},
            ConfigError,
            "small.yaml: policies[0]: policy lru: unknown option 'sccope'",
        ),
        (
            {"policies": ["on-demand", {"name": "lru", "use_order": ["id", "x"]}]},
            ConfigError,
            "small.yaml: policies[1]: policy lru: option use_order: expected 'rank' or 'id', got 'x'",
        ),
        (
            {
                "policies": ["lru", {"name": "lru", "scope": "x"}],
                "workload": {"batch_size": [1, 2], "prompt_tokens": 6},
                "zip": [["policies", "workload.batch_size"]],
            },
            ConfigError,
            "small.yaml: policies[1]: policy lru: option scope: ",
        ),
        (
            {
                "policies": ["lru", "fidler"],
                "workload": {"batch_size": [1, 2], "prompt_tokens": 6},
                "zip": [["policies", "workload.batch_size"]],
            },
            ConfigError,
            "small.yaml: policies[1]: unknown policy 'fidler'",
        ),
        ({"model": "mixtrall"}, MoesimError, "small.yaml: model: unknown model 'mixtrall'; did you mean 'mixtral-8x7b'?"),
        ({"hardware": "rtx"}, MoesimError, "small.yaml: hardware: unknown hardware profile 'rtx'"),
        ({"trace": "nothing"}, TraceError, "small.yaml: trace: unknown trace 'nothing'"),
        (
            {"trace": "no/such.safetensors"},
            TraceError,
            "small.yaml: trace: no/such.safetensors: expected a trace file, got nothing there, looked for from /",
        ),
        ({"workload": {"batch_size": 100}}, WorkloadError, "small.yaml: workload: expected 100 distinct requests"),
        (
            {"workload": {"micro_batches": 3}},
            WorkloadError,
            "small.yaml: workload.micro_batches: expected at most batch_size = 1",
        ),
        (
            {"hardware": {"base": "rtx3090-epyc7532", "devices.gpu0.memory_bytes": "24 GX"}},
            MoesimError,
            "small.yaml: hardware: devices.gpu0.memory_bytes.value: expected a size with a unit",
        ),
    ],
)
def test_wrong_input_is_found_before_anything_runs(tmp_path: Path, changes: dict, error: type[Exception], message: str):
    with pytest.raises(error) as raised:
        resolve(tmp_path, **changes)
    assert str(raised.value).startswith(message)
    assert "\n" not in str(raised.value)
