"""DAOP: its algorithms, and what the policy does on the toy machine of `tests.engine.engine_kit`, by hand to the nanosecond.

An expert takes 100 on the GPU, 300 + 100 a row on the CPU and 1000 over a link in either direction; a dense part 100, a
prediction 10, one row 20 across. Two layers of four experts, two for each token; experts 0 and 1 of each layer start on the GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.core.table import Format
from moesim.experiment import run_experiment
from moesim.experiment.report import result_table
from moesim.metrics import bytes_moved, fidelity
from moesim.metrics.fidelity import fresh_percent
from moesim.policies.parts import Setup
from moesim.policies.parts.assignment import FixedThreshold, fiddler_code_assignment
from moesim.policies.parts.placement import FrequencyGlobal, FrequencyPerLayer
from moesim.policies.registry import make_policy
from moesim.policies.systems.daop import Ahead, DaopCode, DaopPaper, degraded, prefill_swaps
from moesim.policy import Predict, Predicted, Run, StepBegin
from moesim.records import InexactRecord, Records
from moesim.testing import FakeView, routed, run_tiny, tiny_model, tiny_workload
from moesim.trace.workload import WorkloadSpec, compose
from tests.engine.engine_kit import Oracle, assert_same, cpu, gpu, machine, play, tasks, transfers, workload
from tests.engine.engine_kit import tiny_model as toy_model
from tests.experiment.experiment_kit import resolve, write_trace

# ------------------------------------------------------------------------------------------------------- algorithms
LOADS, ON_GPU = [30, 2, 10, 8, 0, 25, 5, 16], [0, 1, 1, 1, 0, 0, 0, 1]


def after(pairs: list[tuple[int, int]], on_gpu: list[int]) -> set[int]:
    """Experts on the GPU after swaps."""
    return ({e for e, here in enumerate(on_gpu) if here} - {cold for _, cold in pairs}) | {hot for hot, _ in pairs}


def test_prefill_swaps_of_the_paper_and_of_the_released_code() -> None:
    pairs = prefill_swaps(LOADS, ON_GPU)
    assert pairs == [(0, 1), (5, 3)]  # not (6, 2): 5 is not above 10
    assert after(pairs, ON_GPU) == {0, 2, 5, 7}
    pairs = prefill_swaps(LOADS, ON_GPU, mixed=True, prompt_tokens=48)
    assert pairs == [(5, 1)]  # (0, 4) is passed over as 4 is on the CPU; (6, 3): 5 is not above 8
    assert after(pairs, ON_GPU) == {2, 3, 5, 7}


def test_prefill_swaps_of_equals_and_of_a_factor() -> None:
    assert prefill_swaps([0, 0, 7, 7], [1, 0, 1, 0]) == [(3, 0)]
    assert prefill_swaps([0, 0], [1, 0]) == []
    assert prefill_swaps([0, 0], [1, 0], strict=False) == [(1, 0)]  # two idle experts
    assert prefill_swaps([20, 21], [1, 0]) == []
    assert prefill_swaps([20, 21], [1, 0], strict=False) == [(1, 0)]
    assert prefill_swaps([20, 21], [1, 0], factor=1.0) == [(1, 0)]


def test_degradation_of_two() -> None:
    scores = [0.1, 0.2, 0.3, 0.4]
    assert degraded([3, 2], scores, [1, 1, 0, 0], 1) == [3, 1]  # both on the CPU: the lower for the best on the GPU
    assert degraded([3, 2], scores, [1, 1, 1, 0], 1) == [3, 2]
    assert degraded([3, 2], scores, [0, 0, 0, 0], 1) == [3, 2]  # nothing on the GPU
    assert degraded([3, 2], scores, [1, 1, 0, 0], 0) == [1, 0]


def test_more_ids_than_a_row_uses_stand_in_in_their_order() -> None:
    ahead = Ahead([[], [1, 1, 0, 0]], 2, 1)
    ahead.begin_step(1)
    assert ahead.add(Predicted(0, 1, 0, np.array([[2, 3, 1, 0]]), None, "told"), 0) == {2: [0]}
    assert ahead.take(1, 0) == {1: [0]}, "3 gives way to 1, which is before 0"


def test_a_fixed_threshold_is_fiddlers_with_its_constants() -> None:
    rng = np.random.default_rng(0)
    part = FixedThreshold()
    for _ in range(100):
        loads, resident = rng.integers(0, 20, 8).tolist(), rng.integers(0, 2, 8).tolist()
        assert part.assign(0, loads, [0 if here else 9 for here in resident]) == fiddler_code_assignment(loads, resident)
    a6000 = FixedThreshold(cpu_ms=8.5, load_ms=210)
    assert a6000.assign(0, [24, 25, 25], [1, 1, 0])[:2] == ((1, 2), (0,))  # 204 and 212.5 ms against 210
    assert FixedThreshold(cpu_ms=0).assign(0, [2, 3, 0], [0, 9, 9])[:2] == ((0,), (1,)), "what costs nothing runs all the same"


def test_a_placement_by_frequency_may_count_decode_only() -> None:
    every, decode = np.arange(32.0).reshape(4, 8), -np.arange(32.0).reshape(4, 8)
    view = FakeView(tables={"activation_frequency": every, "activation_frequency_decode": decode})
    setup = Setup(view, "gpu0", "cpu0", [6], per_layer=False)
    assert FrequencyPerLayer(phase="decode").choose(setup) == [[0, 1, 2], [0], [0], [0]]
    assert FrequencyPerLayer().choose(setup) == [[7], [7], [7], [5, 6, 7]]
    assert FrequencyGlobal(phase="decode").choose(setup) == [[0, 1, 2, 3, 4, 5], [], [], []]
    assert FrequencyGlobal(phase="decode").needs == {"table:activation_frequency_decode"}


# ------------------------------------------------------------------------------------------------------ the toy machine
class Told:
    """A predictor that says the same of a layer in every step."""

    name, label = "told", ""

    def __init__(self, said: dict[int, list[list[int]]], scores: list[float] | None = None) -> None:
        self.said = said
        self.scores = scores

    def needs_layer(self, layer: int) -> int | None:
        return layer - 1

    def predict(self, step: Any, mb: int, layer: int) -> Any:
        if layer not in self.said:
            return None
        ids = np.array(self.said[layer])
        scores = None if self.scores is None else np.tile(self.scores, (len(ids), 1))
        return ids, scores


TOY = machine({"gpu0": gpu(predict={"told": 10}), "cpu0": cpu()})
COMMON = {"placement": "lowest-ids", "source": "told", "first_predict_layer": 1}


def run(name: str, work: Any, told: Any = None, slots: int = 4, decision_ns: int = 0, **options: Any) -> Records:
    """Run DAOP on the toy machine."""
    spec = {"name": name, **COMMON, **options}
    return play(
        make_policy(spec), work, TOY, slots={"gpu0": slots}, model=toy_model(),
        predictors={"told": told or Oracle()},
        decision_ns=decision_ns,
    )  # fmt: skip


def decode(*tokens: list[list[int]]) -> Any:
    """One request that only decodes."""
    return workload([list(tokens)])


def experts(records: Records, device: str) -> list[tuple[int, int, str]]:
    """Start, end and name of the expert runs of a device."""
    return [(start, end, what) for start, end, where, what in tasks(records) if where == device and what[0] == "E"]


def ends(records: Records) -> list[int]:
    return [layer.end for layer in records.layers]


def test_the_cpu_begins_the_next_layer_on_the_state_of_this_one() -> None:
    # gpu0 |DDDDD|P|00000|11111|DDDDD|11111|           P: layer 1 will ask for 1 and 3
    # cpu0 |       |i| 3 of layer 1: 400     |o        its rows cross 110-130
    records = run("daop-paper", decode([[0, 1], [1, 3]]))
    assert sorted(tasks(records)) == [
        (0, 100, "gpu0", "dense"), (100, 110, "gpu0", "predict"), (110, 210, "gpu0", "E0x1"), (130, 530, "cpu0", "E3x1"),
        (210, 310, "gpu0", "E1x1"), (310, 410, "gpu0", "dense"), (410, 510, "gpu0", "E1x1"),
    ]  # fmt: skip
    assert ends(records) == [310, 550]
    assert records.inexact == [InexactRecord(0, 1, "stale", 1, 0.25)]
    # Without it the CPU waits for layer 1: 400, 20 across, 400, 20 back. Layer 0 has no prediction to make.
    records = run("daop-paper", decode([[0, 1], [1, 3]]), precalculate=False)
    assert ends(records) == [300, 840]
    assert records.inexact == []


def test_the_first_layers_ask_their_own_gate() -> None:
    records = run("daop-paper", decode([[0, 1], [1, 3]]), first_predict_layer=2)
    assert ends(records) == [300, 840]
    assert not [t for t in records.tasks if t.kind == "predict"]


def test_one_thread_computes_on_the_cpu_before_the_gpu() -> None:
    work = decode([[0, 2], [1, 3]])
    records = run("daop-paper", work)
    assert experts(records, "gpu0") == [(110, 210, "E0x1"), (640, 740, "E1x1")]
    assert experts(records, "cpu0") == [(120, 520, "E2x1"), (520, 920, "E3x1")]  # its own expert, then the layer ahead's
    assert ends(records) == [540, 940]
    # The GPU's part of layer 0 waits for the CPU's; that of layer 1 does not, as it is predicted.
    records = run("daop-code", work)
    assert experts(records, "gpu0") == [(520, 620, "E0x1"), (720, 820, "E1x1")]
    assert experts(records, "cpu0") == [(120, 520, "E2x1"), (520, 920, "E3x1")]
    assert ends(records) == [620, 940]


def test_the_job_of_the_next_layer_may_come_first_on_the_cpu() -> None:
    token = [[0, 2], [1, 3]]
    first, second = [
        [what for start, _, what in experts(run("daop-paper", decode(token, token), first_on_cpu=order), "cpu0")]
        for order in ("current", "next")
    ]
    assert first == ["E2x1", "E3x1", "E2x1", "E3x1"]
    assert second == ["E2x1", "E3x1", "E3x1", "E2x1"]  # once it is known that predictions come


def test_degradation_takes_the_best_of_the_gpu() -> None:
    work, told = decode([[0, 1], [3, 2]]), Told({1: [[3, 2]]}, [0.1, 0.2, 0.3, 0.4])
    records = run("daop-paper", work, told)
    assert experts(records, "gpu0")[2:] == [(410, 510, "E1x1")]  # for 2
    assert experts(records, "cpu0") == [(130, 530, "E3x1")]
    assert ends(records) == [310, 550]
    assert records.inexact == [InexactRecord(0, 1, "stale", 1, 0.75), InexactRecord(0, 1, "substituted", 1, 0.25)]
    records = run("daop-paper", work, told, degrade=False)
    assert experts(records, "cpu0") == [(130, 530, "E2x1"), (530, 930, "E3x1")]
    assert ends(records) == [310, 950]
    assert records.inexact == [InexactRecord(0, 1, "stale", 2, 1.0)]
    records = run("daop-paper", work, told, cpu_experts=0)  # nothing is left to the CPU
    assert ends(records) == [310, 610]
    assert records.inexact == [InexactRecord(0, 1, "substituted", 2, 1.0)]
    # Ids alone say nothing of the others: the lowest id.
    assert experts(run("daop-paper", work, Told({1: [[3, 2]]})), "gpu0")[2:] == [(410, 510, "E0x1")]


def test_a_degraded_expert_may_happen_to_be_the_routed_one() -> None:
    records = run("daop-paper", decode([[0, 1], [3, 1]]), Told({1: [[3, 2]]}, [0.1, 0.2, 0.3, 0.4]))
    assert records.inexact == [InexactRecord(0, 1, "stale", 1, 0.75)]


def test_fidelity_is_told_by_mass() -> None:
    """Two tokens of mass 1 in each of two layers. Layer 1 runs 3 early on the CPU and 1 on the GPU, whatever is routed."""
    records = run("daop-paper", decode([[0, 1], [1, 2]], [[0, 1], [0, 3]]), Told({1: [[3, 1]]}))
    assert records.inexact == [
        InexactRecord(0, 1, "substituted-stale", 1, 0.25),  # 3 for 2; 1 is fresh
        InexactRecord(1, 1, "stale", 1, 0.25),
        InexactRecord(1, 1, "substituted", 1, 0.75),  # 1 for 0
    ]
    assert fidelity(records) == {
        "fidelity_fresh": (2 + 0.75) / 4, "fidelity_stale": 0.25 / 4, "fidelity_substituted": 0.75 / 4,
        "fidelity_substituted_stale": 0.25 / 4, "fidelity_skipped": 0.0, "fidelity_late": 0.0,
        "fidelity_reduced": 0.0, "n_inexact_slots": 3,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["daop-paper", "daop-code"])
def test_a_layer_without_a_prediction_asks_its_own_gate(name: str) -> None:
    work = decode([[0, 1], [1, 3]])
    records = run(name, work, Told({}))
    assert records.inexact == []
    assert ends(records) == ends(run(name, work, Told({1: [[1]]})))  # one id for two slots is no prediction either
    assert ends(records)[1] == 410 + {"daop-paper": 440, "daop-code": 520}[name]  # 440 for the CPU; one thread: 420, then the GPU


def test_a_prediction_that_comes_too_late_is_not_used() -> None:
    view, policy = FakeView(slots=8), DaopPaper(placement="lowest-ids", first_predict_layer=1)
    view.use(policy.place(view))
    policy.decide(StepBegin(0, "decode", np.zeros(1, np.int32), True), view)
    assert policy.decide(routed([[0, 5]]), view) == [
        Predict(0, 1, "signal:gate_next1", "gpu0"), Run(0, (5,), "cpu0"), Run(0, [0], "gpu0")
    ]  # fmt: skip
    prediction = Predicted(0, 1, 0, np.array([[4, 1]]), None, "signal:gate_next1")
    assert policy.decide(prediction, view) == [Run(1, (4,), "cpu0", [0], inputs_from=0)]
    assert policy.decide(routed([[2, 3]], layer=1), view)[1:] == [Run(1, (1,), "gpu0", [0])]
    assert policy.decide(prediction, view) == ()
    assert policy.decide(routed([[2, 3]], layer=2), view)[1:] == [Run(2, (2,), "cpu0"), Run(2, (3,), "cpu0")]


# ------------------------------------------------------------------------------------------------------------ prefill
# Four rows; in layer 0 the experts serve 1, 0, 4 and 3 of them: 2 is swapped for 1, and 3 for 0. In layer 1 nothing is.
PROMPT = [[[2, 3], [0, 1]], [[2, 3], [0, 1]], [[2, 3], [0, 1]], [[2, 0], [0, 1]]]


def prefill(name: str, *, requests: int = 1, prompt: Any = PROMPT, **options: Any) -> Records:
    """Prompts of four rows and an answer of one token, without predictions."""
    work = workload([[*prompt, [[0, 1], [0, 1]]]] * requests, prompt=4, batch_size=1)
    return run(name, work, precalculate=False, **options)


def up(*times: tuple[int, int]) -> list[tuple[int, int, str, str]]:
    """Write-backs of 1000 ns of layer 0."""
    return [(start, start + 1000, "gpu0->cpu0", f"write-back 0/{expert}") for start, expert in times]


def down(*times: tuple[int, int]) -> list[tuple[int, int, str, str]]:
    """Demand loads of 1000 ns of layer 0."""
    return [(start, start + 1000, "cpu0->gpu0", f"demand 0/{expert}") for start, expert in times]


def test_overlapped_swaps_use_both_directions() -> None:
    # gpu0->cpu0 |  |1->: 1000 |0->: 1000  |            1 makes room in the spare slot at once, 0 when 1 is gone
    # cpu0->gpu0 |  |2: 1000   |3: 1000    |
    # gpu0       |DD|          |2222|      |3333|
    # cpu0                                  |i|0: 400|o  0 has one row, and is there at 2100
    records = prefill("daop-paper")
    assert sorted(transfers(records)) == sorted([*up((100, 1), (1100, 0)), *down((100, 2), (1100, 3))])
    assert experts(records, "gpu0")[:2] == [(1100, 1200, "E2x4"), (2100, 2200, "E3x3")]
    assert experts(records, "cpu0")[0] == (2120, 2520, "E0x1")
    assert ends(records)[:2] == [2540, 2840]
    moved = bytes_moved(records)
    assert (moved["bytes_demand"], moved["bytes_write_back"], moved["bytes_total"]) == (2000, 2000, 4000)
    assert records.pool_peak_bytes["gpu0", "cache"] == 4000
    assert records.pool_peak_bytes["gpu0", "leaving"] == 1000
    # Decode finds 2 and 3 on the GPU: 0 and 1 of layer 0 are computed on the CPU, nothing moves.
    assert experts(records, "cpu0")[1:] == [(2960, 3360, "E0x1"), (3360, 3760, "E1x1")]


def test_overlapped_swaps_without_a_spare_slot_wait_for_what_leaves() -> None:
    records = prefill("daop-paper", swap_buffers=0)
    assert sorted(transfers(records)) == sorted([*up((100, 1), (1100, 0)), *down((1100, 2), (2100, 3))])
    assert experts(records, "cpu0")[0] == (2120, 2520, "E0x1")
    assert ends(records)[0] == 3200


def test_swaps_without_write_back() -> None:
    records = prefill("daop-paper", writeback=False)
    assert transfers(records) == down((100, 2), (1100, 3))
    assert experts(records, "cpu0")[0] == (120, 520, "E0x1")  # the host has it
    assert ends(records)[0] == 2200
    assert ("gpu0", "leaving") not in records.pool_peak_bytes


def test_serial_swaps_go_before_everything() -> None:
    records = prefill("daop-paper", swap_cost="serial")
    assert sorted(transfers(records)) == sorted([*up((100, 1), (2100, 0)), *down((1100, 2), (3100, 3))])
    assert experts(records, "gpu0")[:2] == [(4100, 4200, "E2x4"), (4200, 4300, "E3x3")]
    assert experts(records, "cpu0")[0] == (4120, 4520, "E0x1")
    assert ends(records)[0] == 4540
    assert_same(records, prefill("daop-code", assignment="resident", serial=False))


@pytest.mark.parametrize("decision_ns", [0, 30])
def test_what_leaves_beside_the_computing_is_computed_on_the_host_whatever_the_plan(decision_ns: int) -> None:
    """Loads 8, 12, 20 and 0: 2 is swapped for 0, whose 8 rows take 1100 on the CPU, as long as a copy and a GPU run."""
    prompt = [*[[[2, 0], [0, 1]]] * 8, *[[[2, 1], [0, 1]]] * 12]
    work = workload([[*prompt, [[1, 2], [0, 1]]]], prompt=20)
    options = {"precalculate": False, "swap_cost": "overlapped", "assignment": "threshold"}
    for writeback in (True, False):
        records = run("daop-paper", work, decision_ns=decision_ns, writeback=writeback, **options)
        assert [t[3] for t in transfers(records) if t[3].startswith("demand")] == ["demand 0/2"]
        assert "E0x8" in [what for _, _, what in experts(records, "cpu0")]


def test_the_mixed_cold_list_can_leave_the_hottest_expert_behind() -> None:
    """Loads 2, 2, 4, 0: on the CPU, the idle expert 3 stands first in the cold list, opposite the hottest, 2."""
    prompt = [[[2, 0], [0, 1]], [[2, 0], [0, 1]], [[2, 1], [0, 1]], [[2, 1], [0, 1]]]
    assert transfers(prefill("daop-paper", prompt=prompt, cold_list="mixed")) == []
    assert sorted(transfers(prefill("daop-paper", prompt=prompt))) == [*down((100, 2)), *up((100, 0))]


def test_equals_are_swapped_by_the_printed_test() -> None:
    prompt = [[[2, 0], [0, 1]], [[2, 0], [0, 1]], [[3, 1], [0, 1]], [[3, 1], [0, 1]]]
    assert prefill("daop-paper", prompt=prompt, swap_factor=1.0).evictions == []
    printed = prefill("daop-paper", prompt=prompt, swap_factor=1.0, swap_if="at-least")
    assert [(e.layer, e.expert) for e in printed.evictions] == [(0, 0), (0, 1)]


def test_the_next_request_starts_from_the_swapped_placement() -> None:
    assert len(transfers(prefill("daop-paper", requests=2))) == 4  # the second finds what it wants
    assert len(transfers(prefill("daop-paper", requests=2, reset=True))) == 4  # and would be given just that
    even = [[[2, 0], [0, 1]], [[2, 0], [0, 1]], [[3, 1], [0, 1]], [[3, 1], [0, 1]]]
    answer = [[0, 1], [0, 1]]
    work = workload([[*PROMPT, answer], [*even, answer]], prompt=4, batch_size=1)
    kept, reset = [
        sorted(t[3] for t in transfers(run("daop-paper", work, precalculate=False, reset=reset))[4:]) for reset in (False, True)
    ]
    assert kept == []
    assert reset == ["demand 0/0", "demand 0/1", "write-back 0/2", "write-back 0/3"]


@pytest.mark.parametrize(("swap_chunk", "begin"), [("first", 100), ("last", 1900)])
def test_a_reset_holds_for_a_whole_prompt_of_several_chunks(swap_chunk: str, begin: int) -> None:
    """2 and 3 are swapped in once: by the first chunk, or by both, in which 0 to 3 have 3, 2, 6 and 5 rows."""
    even = [[[2, 0], [0, 1]], [[2, 0], [0, 1]], [[3, 1], [0, 1]], [[3, 1], [0, 1]]]
    work = workload([[*PROMPT, *even, [[0, 1], [0, 1]]]], prompt=8, prefill_chunk=4)
    records = run("daop-paper", work, precalculate=False, reset=True, swap_chunk=swap_chunk)
    assert [s.phase for s in records.steps] == ["prefill", "prefill", "decode"]
    assert sorted(transfers(records)) == sorted([*up((begin, 1), (begin + 1000, 0)), *down((begin, 2), (begin + 1000, 3))])


@pytest.mark.parametrize(("swap_chunk", "swapped"), [("first", [0, 1]), ("last", [])])
def test_the_swaps_of_a_prompt_are_decided_once(swap_chunk: str, swapped: list[int]) -> None:
    """The first chunk wants 2 and 3, the second 0 and 1; in both together 0 to 3 have 5, 4, 4 and 3 rows."""
    work = workload([[*PROMPT, *[[[0, 1], [0, 1]]] * 4, [[0, 1], [0, 1]]]], prompt=8, prefill_chunk=4)
    records = run("daop-paper", work, precalculate=False, swap_chunk=swap_chunk)
    assert sorted(e.expert for e in records.evictions) == swapped
    assert len(transfers(records)) == 2 * len(swapped)


@pytest.mark.parametrize("name", ["daop-paper", "daop-code"])
@pytest.mark.parametrize("reset", [False, True])
def test_decode_begins_in_the_same_places_whatever_the_chunks(name: str, reset: bool) -> None:
    """Two batches of two prompts of 12 rows: whole, and in chunks of 5 or 8."""
    trace, _ = tiny_workload(make_policy({"name": name, "source": "oracle"}), 4)

    def moved(chunk: int | None) -> list[set[tuple[int, int, str]]]:
        policy = make_policy({"name": name, "source": "oracle", "reset": reset, "assignment": "resident"})
        spec = WorkloadSpec(batch_size=2, requests="all", prompt_tokens=12, decode_tokens=3, prefill_chunk=chunk)
        records = run_tiny(policy, (trace, compose(trace, spec)), 12)
        batches = [s.batch for s in records.steps]
        n_batches = max(batches) + 1
        assert sum(s.phase == "prefill" for s in records.steps) == n_batches * (1 if chunk is None else -(-24 // chunk))
        found: list[set[tuple[int, int, str]]] = [set() for _ in range(n_batches)]
        for transfer in records.transfers:
            step = next(s for s in records.steps if s.begin <= transfer.submitted <= s.end)
            found[step.batch].add((transfer.layer, transfer.expert, transfer.cause))
        return found

    whole = moved(None)
    assert sum(map(len, whole)) > 10
    assert moved(5) == moved(8) == whole


def test_the_code_streams_an_expert_with_many_rows_and_one_thread_waits_for_it() -> None:
    """On the CPU 8 rows take 1100, as long as a load and a GPU run: the GPU has it. One row of 3 stays on the CPU."""
    prompt = [[[2, 0], [0, 1]]] * 7 + [[[2, 3], [0, 1]]]
    work = workload([[*prompt, [[0, 1], [0, 1]]]], prompt=8)
    records = run("daop-code", work, precalculate=False, swap=False)
    assert transfers(records) == down((100, 2))
    assert experts(records, "gpu0")[:2] == [(100, 200, "E0x7"), (1100, 1200, "E2x8")]
    assert experts(records, "cpu0")[0] == (1120, 1520, "E3x1")
    assert [(e.time, e.pool, e.expert) for e in records.evictions] == [(1540, "placeholder", 2)]
    parallel = run("daop-code", work, precalculate=False, swap=False, serial=False)
    assert experts(parallel, "cpu0")[0] == (120, 520, "E3x1")
    stays = run("daop-code", work, precalculate=False, swap=False, assignment={"name": "fixed-threshold", "load_ms": 70})
    assert experts(stays, "cpu0")[0] == (190, 1290, "E2x8")  # 56 ms against 70


# ------------------------------------------------------------------------------------------------------- common checks


# ------------------------------------------------------------------------------------------------------- whole programs
def test_an_experiment_says_what_was_not_exact(tmp_path: Path) -> None:
    write_trace(tmp_path / "small.safetensors", signals={"gate_next1": 0.8})
    experiment = resolve(tmp_path, policies=["daop-paper", "daop-code", "lru"], cache={"ratio": 0.469})
    rows = run_experiment(experiment).rows
    assert [row["error"] for row in rows] == [None] * 3
    assert rows[0]["fidelity_fresh"] < 1
    shares = ("fresh", "stale", "substituted", "substituted_stale", "skipped")
    assert sum(rows[0][f"fidelity_{kind}"] for kind in shares) == pytest.approx(1)
    assert [row["own_transfer"] for row in rows] == [None, "pageable", None]
    text = result_table(rows, Format.TABLE)
    assert text.count("*") == 3  # both, and the line that explains it
    shares = [f"{fresh_percent(row['fidelity_fresh_decode']):.1f} % ({row['policy']})" for row in rows[:2]]
    said = "routing is replayed as recorded, whatever the policy computed"
    assert f"* not exact: of the gate weight, computed as routed: {', '.join(shares)}; {said}" in text


def test_pageable_is_its_own_transfer() -> None:
    model = tiny_model()
    assert DaopCode().transfer(model) == ("pageable", None, 0)
    assert DaopCode(pageable=False).transfer(model) is None
    assert DaopPaper().transfer(model) is None
    assert DaopPaper(pageable=True).transfer(model) == ("pageable", None, 0)
