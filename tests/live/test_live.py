"""A replay is the simulation carried out: same decisions, same bytes, and the same numbers come out of the model."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import moesim.live.machine as live_machine
from moesim.errors import CapacityError, InputError
from moesim.experiment.runner import Execution, run_one
from moesim.live import LiveMachine, replay
from moesim.live.machine import Slots, share_out
from moesim.metrics.outcome import Outcome
from moesim.studies.replay import live_execution
from tests.live.live_kit import MODEL, device, experiment, sure, two_parts, with_disk

CLOCKLESS = ["all-cpu", "on-demand", "static", "fiddler", "lru", "lfu", "llama-cpp"]
NEEDED: dict[str, Any] = {"slots": {"fast": 16}, "dense": {"fast": 4}}
OTHERS = ["dali", "hybrimoe-paper", "hybrimoe-code", "prescope", "mixtral-offloading", "belady", "fifo"]
OTHERS += [{"name": "composed", "replacement": "arc"}]


def carried_out(folder: Path, policy: Any, *, keep: bool = True, **changes: Any) -> tuple[Outcome, Outcome, dict[int, Any]]:
    """Simulate and replay one policy; also the outputs of each step."""
    setup = experiment(folder, policies=[policy], **changes)
    spec = setup.specs[0]
    simulated = run_one(setup, spec, keep=True)
    disk = folder if "disk" in spec.hardware.devices else None
    with LiveMachine(spec.hardware, memory_bytes=200_000_000, disk=disk, keep_outputs=keep) as machine:
        live = run_one(setup, spec, keep=True, execution=Execution(partial(replay, machine), True))
        outputs = dict(machine.outputs)
    assert simulated.failure is None, simulated.failure
    assert live.failure is None, live.failure
    return simulated, live, outputs


OFTEN = [pytest.param(policy, marks=[] if policy in ("static", "lru", "fiddler") else [pytest.mark.long]) for policy in CLOCKLESS]


@pytest.mark.parametrize("policy", OFTEN)
def test_same_hits_and_bytes_where_no_clock_decides(policy: str, tmp_path: Path) -> None:
    simulated, live, _ = carried_out(tmp_path, policy)
    assert simulated.records is not None
    assert live.records is not None
    assert [lookup[1:] for lookup in live.records.lookups] == [lookup[1:] for lookup in simulated.records.lookups]
    moved = [sorted((t.link, t.cause, t.layer, t.expert, t.n_bytes) for t in r.records.transfers) for r in (simulated, live)]
    assert moved[0] == moved[1]
    ran = [sorted((t.device, t.kind, t.step, t.layer, t.expert, t.rows) for t in r.records.tasks) for r in (simulated, live)]
    assert ran[0] == ran[1]


def test_empty_actions_are_ignored(tmp_path: Path) -> None:
    def happened(empty: bool) -> tuple[tuple[Any, ...], dict[int, Any]]:
        simulated, live, outputs = carried_out(tmp_path, {"name": "tests.live.live_kit:Divided", "empty": empty})
        assert simulated.records is not None
        assert live.records is not None
        ran = sorted((t.device, t.kind, t.step, t.layer, t.expert, t.rows) for t in live.records.tasks)
        crossed = sorted((a.link, a.step, a.layer, a.rows, a.direction) for a in live.records.activations)
        moved = sorted((t.link, t.cause, t.layer, t.expert, t.n_bytes) for t in live.records.transfers)
        return (simulated.records, ran, crossed, moved), outputs

    (records, outputs), (expected, wanted) = happened(empty=True), happened(empty=False)
    assert records == expected
    for step, hidden in wanted.items():
        np.testing.assert_allclose(outputs[step], hidden, rtol=2e-4, atol=2e-5)


def test_every_exact_policy_computes_the_same(tmp_path: Path) -> None:
    """Weights in the right slots, rows on the right devices, gates and sums: else the hidden state would differ."""
    setup = experiment(tmp_path, policies=[*CLOCKLESS, *OTHERS])
    reference: dict[int, Any] = {}
    with LiveMachine(setup.specs[0].hardware, memory_bytes=200_000_000, keep_outputs=True) as machine:
        for spec in setup.specs:
            live = run_one(setup, spec, execution=Execution(partial(replay, machine), True))
            assert live.failure is None, live.failure
            assert live.row["source_label"] in ("synthetic", "oracle")
            reference = reference or dict(machine.outputs)
            for step, hidden in reference.items():
                name = f"{spec.policy_name}, step {step}"
                np.testing.assert_allclose(machine.outputs[step], hidden, rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.long
def test_a_disk_holds_the_experts(tmp_path: Path) -> None:
    for policy in ("lru", "on-demand", "static"):
        simulated, live, outputs = carried_out(tmp_path, policy, profile=with_disk())
        assert simulated.records is not None
        assert live.records is not None
        assert [t[2:7] for t in live.records.transfers] == [t[2:7] for t in simulated.records.transfers], policy
        assert {t.link for t in live.records.transfers} == {"disk->fast"}
        if policy == "lru":
            reference = outputs
        for step, hidden in reference.items():
            np.testing.assert_allclose(outputs[step], hidden, rtol=2e-4, atol=2e-5)
    assert not list(tmp_path.glob(".moesim*"))  # the file of experts is gone


@pytest.mark.long
def test_chunks_and_micro_batches_and_prompts_in_pieces(tmp_path: Path) -> None:
    """Pieces of a copy arrive where they belong, and each micro-batch is served once."""
    _, _, reference = carried_out(tmp_path, "on-demand")
    _, chunked, outputs = carried_out(tmp_path, "on-demand", transfer={"chunk": 4096})
    assert chunked.records is not None
    assert max(t.n_bytes for t in chunked.records.transfers) == 4096
    halves = {"prompt_tokens": 6, "decode_tokens": 4, "batch_size": 2, "micro_batches": 2}
    _, _, here = carried_out(tmp_path, "on-demand", workload=halves)
    _, _, there = carried_out(tmp_path, "all-cpu", workload=halves)
    for step, hidden in reference.items():
        np.testing.assert_allclose(outputs[step], hidden, rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(there[step], here[step], rtol=2e-4, atol=2e-5)


def test_times_are_those_of_the_wall(tmp_path: Path) -> None:
    _, live, _ = carried_out(tmp_path, "dali")
    records = live.records
    assert records is not None
    for lane in {(t.device, t.lane) for t in records.tasks}:
        tasks = sorted((t for t in records.tasks if (t.device, t.lane) == lane), key=lambda t: t.start)
        assert all(a.end <= b.start for a, b in pairwise(tasks))  # rule 4: one at a time
    assert all(t.submitted <= t.start <= t.end for t in records.tasks)
    assert [d.layer for d in records.decisions] == list(range(4)) * 5
    assert all(d.start <= d.end for d in records.decisions)
    assert records.makespan_ns >= max(t.end for t in records.tasks)
    assert live.split is not None
    by_cause = live.split.total()
    assert sum(by_cause.values()) == records.makespan_ns
    assert by_cause["dense"] > 0
    assert by_cause["decision"] > 0


def shared_link() -> dict[str, Any]:
    profile = two_parts()
    copies = profile["links"]["host->fast"]["any"]
    return {
        **profile,
        "links": {name: {"any": copies, "activation": {**copies, "share_link": True}} for name in profile["links"]},
    }


def of_devices(**devices: Any) -> dict[str, Any]:
    return two_parts(devices=two_parts()["devices"] | devices)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"memory_bytes": 40_000}, "expected at least"),
        ({}, {"memory_bytes": 10**18}, "--memory: expected at most"),
        ({}, {"backend": "tpu"}, "--backend: expected one of cpu, cuda, got 'tpu'"),
        ({}, {"disk": Path()}, "--disk: expected none"),
        ({"profile": with_disk()}, {"memory_bytes": 10**8}, "--disk FOLDER"),
        ({"profile": shared_link()}, {}, "got share_link: true"),
        ({"profile": of_devices(spare=device())}, {}, r"devices\.spare: expected every host among backing"),
        (
            {"profile": of_devices(fast=device(role="accelerator", cores=[4095]))},
            {},
            r"devices\.fast\.cores: expected some of the cores",
        ),
        ({"hardware": "rtx3090-epyc7532"}, {}, "expected devices of kind cpu or disk for --backend cpu, got a gpu"),
    ],
)
def test_refused_before_anything_is_allocated(
    changes: dict[str, Any], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    setup = experiment(tmp_path, **changes)
    spec = setup.specs[0]
    with pytest.raises(InputError, match=message), LiveMachine(spec.hardware, **options) as machine:
        machine.prepare(spec.model, setup.workload(spec), "pinned", **NEEDED)


@pytest.mark.long
def test_memory_is_made_anew_only_for_what_does_not_fit(tmp_path: Path) -> None:
    """A larger cache, or a dense part on another device, is added to what was there; the next runs find it all."""
    setup = experiment(tmp_path, policies=["lru", "llama-cpp"], cache={"ratio": [0.25, 0.5]})
    with LiveMachine(setup.specs[0].hardware, memory_bytes=10**8) as machine:
        stores = []
        for spec in [*setup.specs, *setup.specs]:
            assert run_one(setup, spec, execution=Execution(partial(replay, machine), True)).failure is None
            stores.append(id(machine.store))
            assert machine.store.aliased == ""
    assert len(set(stores[len(setup.specs) :])) == 1


LLAMA = {"name": "llama-cpp", "n_gpu_layers": 1}


def and_a_disk() -> dict[str, Any]:
    """Add a disk to a machine whose host has all experts."""
    one, other = two_parts(), with_disk()
    links = {"disk->host": other["links"]["disk->fast"], **one["links"]}
    return {**one, "devices": {**one["devices"], "disk": other["devices"]["disk"]}, "links": links}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"decision_us": 5}, "decision time: expected none in a replay"),
    ({"model": MODEL | {"expert_bits": 16}}, "expected expert_bits and other_bits both of 32 or both below"),
    (
        {"model": MODEL | {"expert_bits": [[32, 16]]}},
        "model.expert_bits: expected one width, since a replay holds experts at one, got 32, 16",
    ),
    (
        {"policies": ["zero-inference"]},
        "expected parts that stay where they run, since a replay streams no weights, got attention, ",
    ),
    (
        {"profile": and_a_disk(), "policies": ["llama-cpp-ssd"], "cache": {"ratio": 0.75}},
        "expected the experts on host, where a replay keeps those of .*, got disk",
    ),
    ({"policies": [LLAMA | {"op_offload_min_rows": 1}]}, "streamed in some step; set op_offload: false"),
    (
        {"policies": [{"name": "tests.live.live_kit:Divided", "late": True}]},
        r"Run\(L0/E\d+, host, late\): a replay adds outputs to their own layer only",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_what_a_replay_cannot_do_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    setup = experiment(tmp_path, **changes)
    with LiveMachine(setup.specs[0].hardware, memory_bytes=10**8) as machine:
        failed = run_one(setup, setup.specs[0], execution=Execution(partial(replay, machine), True))
    assert re.search(message, str(failed.failure))


def test_parts_that_only_larger_steps_would_stream_are_replayed(tmp_path: Path) -> None:
    carried_out(tmp_path, LLAMA | {"op_offload_min_rows": 10_000})


@pytest.mark.long
def test_the_profiles_thread_is_not_the_real_one(tmp_path: Path) -> None:
    """A replay takes the time that its own thread takes, and says in one line that the profile's numbers are for simulations."""
    slow = two_parts(host_expert_us=sure(1e6), host_shared=sure(True))  # a second an expert: the run would take a minute
    setup = experiment(tmp_path, profile=slow)
    with LiveMachine(setup.specs[0].hardware, memory_bytes=10**8) as machine:
        result = run_one(setup, setup.specs[0], execution=live_execution(machine))
    assert result.failure is None
    assert result.row["makespan_ns"] < 10e9
    said = "host_expert_us, host_shared: for simulations; the thread of a replay takes the time that it takes"
    assert said in result.row["notes"]


def test_what_fails_on_the_machine_ends_the_run_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup = experiment(tmp_path, policies=["on-demand", "all-gpu"])

    def broken(*_: Any, **__: Any) -> None:
        raise OSError("the cable is out")

    with LiveMachine(setup.specs[0].hardware, memory_bytes=10**8) as machine:
        with monkeypatch.context() as patch:
            patch.setattr(live_machine, "copy", broken)
            failed = run_one(setup, setup.specs[0], execution=Execution(partial(replay, machine), True))
        assert "the cable is out" in str(failed.failure)
        assert "host->fast" in str(failed.failure)
        assert run_one(setup, setup.specs[1], execution=Execution(partial(replay, machine), True)).failure is None


def test_buffers_take_turns_where_memory_is_short(tmp_path: Path) -> None:
    """Fewer buffers than experts: the same decisions, and a note that says so."""
    setup = experiment(tmp_path, policies=["lru"])
    with LiveMachine(setup.specs[0].hardware, memory_bytes=700_000) as machine:
        live = run_one(setup, setup.specs[0], keep=True, execution=Execution(partial(replay, machine), True))
        assert live.failure is None
        assert "32 on host in" in machine.store.aliased
    simulated = run_one(setup, setup.specs[0], keep=True)
    assert live.records is not None
    assert simulated.records is not None
    assert [t[2:7] for t in live.records.transfers] == [t[2:7] for t in simulated.records.transfers]


def test_share_out() -> None:
    assert share_out({"a": 10, "b": 100}, 10, 50, 100_000, "memory") == {"a": 10, "b": 100}
    assert share_out({"a": 100, "b": 100}, 10, 50, 1000, "memory") == {"a": 47, "b": 48}
    with pytest.raises(CapacityError, match=r"expected at least 130 B of memory .* got a budget of 100 B"):
        share_out({"a": 100, "b": 100}, 10, 50, 100, "memory")


class _Device:
    def __init__(self) -> None:
        self.memory = self
        self.copies: dict[int, Any] = {}
        self.pending: dict[int, Any] = {}


def test_slots_are_taken_back_from_units_that_have_left() -> None:
    device = _Device()
    slots = Slots(device, 2)  # type: ignore[arg-type]
    first, second = slots.take(7), slots.take(8)
    device.copies = {8: None}
    assert slots.take(9) == first  # 7 is gone
    device.copies = {8: None, 9: None}
    shared = slots.take(10)  # all are in use: one is used twice
    assert shared in (first, second)
    device.copies = {10: None}
    assert slots.take(11) == 1 - shared  # 8 and 9 are gone, but 10 still uses what it shared
    assert slots.of(10) == shared


def test_gpu_profiles_run_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the CUDA backend, with this processor as GPU: all but streams, events and page-locking."""
    streams = []

    class Stream(live_machine.Worker):
        def __init__(self, name: str, done: Any, place: str, cores: Any) -> None:
            streams.append((name, place))
            super().__init__(name, done)

    gpu = two_parts()
    gpu["devices"]["fast"] = {**gpu["devices"]["fast"], "kind": "gpu"}
    setup = experiment(tmp_path, policies=["fiddler"], profile=gpu, transfer={"curve": "pageable"})
    monkeypatch.setattr(live_machine, "CudaStreamWorker", Stream)
    monkeypatch.setattr(live_machine, "_torch_devices", lambda hardware, backend, first: {"fast": "cpu:0", "host": "cpu"})
    monkeypatch.setattr("moesim.live.machine.available_gpu_bytes", lambda place: 10**8)
    _, reference = carried_out(tmp_path, "fiddler")[1:]
    with LiveMachine(setup.specs[0].hardware, backend="cuda", memory_bytes=10**8, keep_outputs=True) as machine:
        live = run_one(setup, setup.specs[0], execution=Execution(partial(replay, machine), True))
        outputs = dict(machine.outputs)
    assert live.failure is None
    assert {place for _, place in streams} == {"cpu:0"}
    assert {name for name, _ in streams} == {"fast.main", "fast.side", "link.host->fast", "link.fast->host"}
    for step, hidden in reference.items():
        np.testing.assert_allclose(outputs[step], hidden, rtol=2e-4, atol=2e-5)


def test_gpus_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = experiment(tmp_path, hardware="rtx3090x2-epyc7532").specs[0]
    for n_gpus, message in (
        (0, "--backend cuda: expected a GPU that PyTorch finds, got none"),
        (1, "expected at most the 1 GPUs"),
    ):
        monkeypatch.setattr(live_machine, "n_gpus", lambda n=n_gpus: n)
        with pytest.raises(InputError, match=message):
            LiveMachine(spec.hardware, backend="cuda")
