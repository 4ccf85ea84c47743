"""Requests of a trace composed into batched steps."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.errors import WorkloadError
from moesim.testing.traces import synthetic_trace
from moesim.trace import Signal, Trace
from moesim.trace.synthesis import read_parameters, synthesize
from moesim.trace.workload import Step, Workload, WorkloadSpec, compose
from moesim.trace.workload.compose import look_up

routing = import_module("moesim.trace.workload.compose")  # the package has a function of that name

#: Requests with prompts of 5, 5, 7, 3 and 4, 6, 4, 5 decode tokens; first rows 0, 9, 20, 31.
RAGGED = synthetic_trace(n_layers=3, n_requests=4, prompt=[5, 5, 7, 3], decode=[4, 6, 4, 5])
#: As above, but nothing is known of the prompts except their lengths.
NO_PROMPTS = Trace.build(
    experts=RAGGED.experts[:12], weights=RAGGED.weights[:12], n_prompt=[0, 0, 0], n_decode=[4, 4, 4],
    prompt_offset=[10, 20, 30], n_experts=8, model="tiny", label="synthetic",
)  # fmt: skip


def rows_of(workload: Workload) -> list[tuple[str, list[int], list[int]]]:
    return [(s.phase, s.requests.tolist(), s.rows.tolist()) for s in workload.steps]


def test_one_prefill_step_then_one_decode_step_a_token() -> None:
    w = compose(RAGGED, WorkloadSpec(batch_size=2, prompt_tokens=5, decode_tokens=2, requests=(0, 1)))
    assert rows_of(w) == [
        ("prefill", [0] * 5 + [1] * 5, [0, 1, 2, 3, 4, 9, 10, 11, 12, 13]),
        ("decode", [0, 1], [5, 14]),
        ("decode", [0, 1], [6, 15]),
    ]
    prefill, first, last = w.steps
    assert (prefill.begins, prefill.ends, prefill.n_sequences, prefill.last_chunk) == ((0, 1), (), 2, True)
    assert prefill.work2 == 2 * 5 * (2 * 0 + 5)
    assert first.work2 == 2 * 1 * (2 * 5 + 1)
    assert last.work2 == 2 * 1 * (2 * 6 + 1)
    assert (first.begins, first.ends, last.ends) == ((), (), (0, 1))
    assert [s.kv_tokens for s in w.steps] == [14, 14, 14]
    assert (w.max_tokens, w.peak_kv_tokens, w.labels, w.label) == (10, 14, (), "")


def test_prompts_are_ragged_and_a_request_that_ends_leaves() -> None:
    assert compose(RAGGED, WorkloadSpec(batch_size=3, decode_tokens=5, requests="all")).requests == (1, 3)
    (only,) = compose(RAGGED, WorkloadSpec(batch_size=2, decode_tokens=0, requests=(0, 3))).steps
    assert (only.phase, only.ends) == ("prefill", (0, 1))
    w = compose(RAGGED, WorkloadSpec(batch_size=2, requests=(2, 1)))
    assert [s.requests.tolist() for s in w.steps[1:]] == [[0, 1]] * 4 + [[1]] * 2
    assert [s.kv_tokens for s in w.steps] == [22] * 5 + [11] * 2
    assert w.steps[4].ends == (0,)
    assert w.steps[6].ends == (1,)


def test_refill_admits_the_next_at_once_and_never_mixes_phases() -> None:
    w = compose(RAGGED, WorkloadSpec(batch_size=2, refill=True, requests=(0, 1, 3)))
    assert [(s.phase, sorted(set(s.requests.tolist()))) for s in w.steps] == [
        ("prefill", [0, 1]),
        *[("decode", [0, 1])] * 4,
        ("prefill", [2]),  # request 0 has left
        *[("decode", [1, 2])] * 2,
        *[("decode", [2])] * 3,
    ]
    assert w.steps[5].kv_tokens == 11 + 8  # what runs on is still there
    assert {s.batch for s in w.steps} == {0}
    w = compose(RAGGED, WorkloadSpec(batch_size=2, requests=(0, 1, 3)))  # without refill batches follow one another
    assert [s.batch for s in w.steps] == [0] * 7 + [1] * 6
    assert w.steps[7].requests.tolist() == [2, 2, 2]


def test_chunks_hold_at_most_so_many_tokens_of_all_requests() -> None:
    spec = WorkloadSpec(batch_size=3, prompt_tokens=5, decode_tokens=1, prefill_chunk=7, requests=(0, 1, 2))
    steps = compose(RAGGED, spec).steps
    assert [s.requests.tolist() for s in steps[:3]] == [[0] * 5 + [1] * 2, [1] * 3 + [2] * 4, [2]]
    assert [s.last_chunk for s in steps] == [False, False, True, True]
    assert [s.begins for s in steps] == [(0, 1), (2,), (), ()]
    assert [s.n_sequences for s in steps] == [1, 1, 1, 3]  # those whose prompt is complete
    assert [s.kv_tokens for s in steps] == [12, 18, 18, 18]  # reserved when a request starts
    assert steps[1].work2 == 3 * (2 * 2 + 3) + 4 * 4
    whole, chunked = (compose(RAGGED, WorkloadSpec(batch_size=4, prefill_chunk=chunk, requests="all")) for chunk in (None, 3))
    assert sum(s.work2 for s in whole.steps) == sum(s.work2 for s in chunked.steps)


def test_micro_batches_hold_whole_requests() -> None:
    w = compose(RAGGED, WorkloadSpec(batch_size=3, micro_batches=2, requests=(0, 2, 3)))
    assert [(m.first_row, m.n_rows, m.n_sequences) for m in w.steps[0].micro] == [(0, 5, 1), (5, 10, 2)]
    assert [m.work2 for m in w.steps[0].micro] == [25, 49 + 9]
    assert [m.n_rows for m in w.steps[1].micro] == [1, 2]
    assert [m.n_rows for m in w.steps[5].micro] == [1]  # one sequence is left


def test_routing_is_that_of_the_trace() -> None:
    trace = synthetic_trace(n_layers=3, n_experts=16, top_k=4, prompt=9, decode=2, scores=True)
    step = compose(trace, WorkloadSpec(batch_size=2)).steps[0]
    for layer, routed in enumerate(step.micro[0].layers):
        experts = trace.experts[step.rows, layer]
        assert np.array_equal(routed.experts, experts)
        assert np.array_equal(routed.weights, trace.weights[step.rows, layer])
        assert np.array_equal(routed.scores, trace.scores[step.rows, layer])
        loads = [int((experts == e).sum()) for e in range(16)]
        assert routed.rows == tuple(loads)
        assert routed.active == tuple(e for e in range(16) if loads[e])
        assert all(type(n) is int for n in (*routed.rows, *routed.active))
        with pytest.raises(ValueError, match="read-only"):  # no policy can change it
            routed.experts[0, 0] = 1


@pytest.mark.parametrize("keep_bytes", [routing.KEEP_BYTES, 0])
def test_routing_is_kept_only_while_it_is_small(keep_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "KEEP_BYTES", keep_bytes)
    monkeypatch.setattr(routing, "BLOCK", 1)  # each step for itself
    steps = compose(RAGGED, WorkloadSpec(requests=(0, 1, 2))).steps
    first, second, third, fourth = steps[:4]
    before = second.micro
    assert second.micro is before is steps[1].micro  # the step at hand and the one before are always kept
    assert third.micro is third.micro and second.micro is before
    assert fourth.micro is fourth.micro
    assert (second.micro is before) == (keep_bytes > 0)
    assert second.micro[0].layers[0].rows == before[0].layers[0].rows
    assert [step.index for step in steps] == list(range(len(steps)))  # other requests are gone through
    assert (steps[0].micro is first.micro) == (keep_bytes > 0)


def test_neighbours_are_looked_up_together_and_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = WorkloadSpec(batch_size=2, micro_batches=2, requests="all")
    asked, found = [], []

    def noted(trace: Trace, rows: Any, sizes: list[int]) -> Any:
        asked.append(len(rows))
        return look_up(trace, rows, sizes)

    monkeypatch.setattr(routing, "look_up", noted)
    for block in (1, 90, routing.BLOCK):
        monkeypatch.setattr(routing, "BLOCK", block)
        micro = [one for step in compose(RAGGED, spec).steps for one in step.micro]
        found.append([(one.work2, one.n_rows, [layer.rows for layer in one.layers]) for one in micro])
        for one in micro:
            for name in ("weights", "scores"):
                by_layer = [getattr(layer, name) for layer in one.layers]
                whole = getattr(one.layers, name)
                assert by_layer == [None] * 3 if whole is None else np.array_equal(whole, np.stack(by_layer, axis=1))
    assert found[0] == found[1] == found[2]
    assert {1, 2, 4} <= set(asked)


def test_steps_are_made_when_they_are_asked_for() -> None:
    """Composing takes no longer for more tokens; each step is the same however it is reached."""
    steps = compose(RAGGED, WorkloadSpec(batch_size=3, refill=True, requests="all")).steps
    assert len(steps) == len(list(steps)) == len(steps.n_tokens)
    for i, step in enumerate(steps):
        for other in (steps[i], steps[i - len(steps)], steps[i : i + 1][0]):
            assert (other.index, other.phase, other.sequences, other.rows.tolist()) == (
                i, step.phase, step.sequences, step.rows.tolist()
            )  # fmt: skip
        assert step.n_tokens == steps.n_tokens[i] == len(step.rows)
        assert step.rows.base is not None and not step.rows.flags.writeable  # a view of the rows of all steps nearby
    with pytest.raises(IndexError):
        steps[len(steps)]


def test_prompts_of_the_very_length_come_first_and_longer_ones_give_their_end() -> None:
    for seed in range(5):
        w = compose(RAGGED, WorkloadSpec(batch_size=3, prompt_tokens=5, decode_tokens=1, seed=seed))
        assert set(w.requests[:2]) == {0, 1}
        assert w.requests[2] == 2
        assert w.admitted[2].prompt_rows.tolist() == [22, 23, 24, 25, 26]
        assert w.admitted[2].decode_rows.tolist() == [27]
        assert w.admitted[2].context == 0
        assert w.labels == ("prompt-truncated",)
    assert compose(RAGGED, WorkloadSpec(batch_size=2, prompt_tokens=5, decode_tokens=1)).labels == ()


def test_without_recorded_prompts_it_starts_in_decode() -> None:
    w = compose(NO_PROMPTS, WorkloadSpec(batch_size=2, requests=(0, 2)))
    assert {s.phase for s in w.steps} == {"decode"}
    assert w.steps[0].work2 == (2 * 10 + 1) + (2 * 30 + 1)
    assert w.steps[0].begins == (0, 1)
    assert w.steps[0].kv_tokens == 14 + 34
    exact = compose(NO_PROMPTS, WorkloadSpec(prompt_tokens=20))
    assert (exact.requests, exact.labels) == ((1,), ())
    shorter = compose(NO_PROMPTS, WorkloadSpec(prompt_tokens=5))
    assert shorter.steps[0].work2 == 2 * 5 + 1
    assert shorter.labels == ("prompt-truncated",)


def test_the_choice_depends_on_the_seed_only() -> None:
    trace = synthetic_trace(n_requests=12, prompt=3, decode=2)
    spec = WorkloadSpec(batch_size=3, n_batches=2, seed=1)
    one, again = compose(trace, spec), compose(trace, spec)
    assert one.requests == again.requests
    assert one.digest == again.digest
    assert len(set(one.requests)) == 6
    others = {compose(trace, replace(spec, seed=s)).requests for s in range(8)}
    assert len(others) > 1
    assert compose(trace, replace(spec, seed=2)).digest != one.digest
    assert compose(synthetic_trace(n_requests=12, prompt=3, decode=2, seed=9), spec).digest != one.digest


def test_no_prompt_begins_with_the_first_decoded_token() -> None:
    """A prompt of 0 tokens: no prefill step, contexts from 0, and a label, for the recorded decode followed a prompt."""
    w = compose(RAGGED, WorkloadSpec(batch_size=2, prompt_tokens=0, decode_tokens=3, requests=(0, 1)))
    assert [(s.phase, s.begins, s.ends) for s in w.steps] == [("decode", (0, 1), ()), ("decode", (), ()), ("decode", (), (0, 1))]
    assert [s.sequences for s in w.steps] == [((1, 0), (1, 0)), ((1, 1), (1, 1)), ((1, 2), (1, 2))]
    assert [s.rows.tolist() for s in w.steps] == [[5, 14], [6, 15], [7, 16]]  # rows of decode follow those of the prompt
    assert [s.kv_tokens for s in w.steps] == [6, 6, 6] and w.labels == ("prompt-truncated",)
    without = synthetic_trace(n_layers=3, n_requests=2, prompt=0, decode=2)
    assert compose(without, WorkloadSpec(prompt_tokens=0)).labels == ()


def test_a_request_takes_part_with_a_row_at_least() -> None:
    trace = synthetic_trace(n_layers=3, n_requests=3, prompt=[2, 2, 0], decode=[0, 3, 3])
    assert compose(trace, WorkloadSpec(prompt_tokens=0, requests="all")).requests == (1, 2)
    assert compose(trace, WorkloadSpec(prompt_tokens=1, decode_tokens=0, requests="all")).requests == (0, 1)
    for spec in (WorkloadSpec(prompt_tokens=0, requests=(0,)), WorkloadSpec(decode_tokens=0, requests=(2,), reuse="shifted")):
        with pytest.raises(WorkloadError, match=r"workload\.requests: request"):
            compose(trace, spec)


def test_shifted_copies_are_spread_over_the_recording() -> None:
    spec = WorkloadSpec(batch_size=4, prompt_tokens=5, decode_tokens=4, reuse="shifted", n_batches=2)
    w = compose(RAGGED, spec)
    assert w.labels == ("prompt-truncated", "reuse-shifted")
    of_first = [a for a in w.admitted if a.request == w.requests[0]]
    starts = [int(a.decode_rows[0]) for a in of_first]
    assert len(of_first) == 3
    assert len(set(starts)) == 3
    for a in of_first:  # each is a rotation
        assert sorted(a.prompt_rows) == sorted(of_first[0].prompt_rows)
        assert (np.diff(a.decode_rows) == 1).sum() >= 2
    assert w.steps[0].requests.max() == 3  # copies are requests of their own
    assert compose(RAGGED, replace(spec, batch_size=2, decode_tokens=2, n_batches=1)).labels == ()  # nothing is shifted


def test_shifted_repeats_rows_if_no_request_is_long_enough() -> None:
    w = compose(RAGGED, WorkloadSpec(prompt_tokens=9, decode_tokens=8, reuse="shifted", requests=(0,)))
    assert w.admitted[0].prompt_rows.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
    assert w.admitted[0].decode_rows.tolist() == [5, 6, 7, 8, 5, 6, 7, 8]
    assert w.labels == ("reuse-shifted",)
    assert compose(RAGGED, WorkloadSpec(prompt_tokens=9, decode_tokens=8, reuse="shifted")).labels == w.labels


def test_only_requests_that_a_signal_covers() -> None:
    def chosen(rows: list[int], n: int = 1, name: str = "residual") -> set[int]:
        scores = np.zeros((len(rows), RAGGED.n_layers, RAGGED.n_experts), np.float16)
        trace = replace(RAGGED, signals={"residual": Signal("residual", np.array(rows, np.int32), scores)})
        return set(compose(trace, WorkloadSpec(batch_size=n), require_signals={name}).requests)

    rows = [*range(9), *range(31, 38)]  # all of request 0, all but one row of request 3
    assert chosen(rows) == {0}
    with pytest.raises(WorkloadError, match=r"1 of the 4 recorded qualify \(covered by signal residual, as 1 are\)"):
        chosen(rows, 2)
    with pytest.raises(WorkloadError, match=r"unknown signal 'residul'; did you mean 'residual'\?"):
        chosen(rows, name="residul")
    assert chosen([*range(14, 20), *range(34, 39)], 2) == {1, 3}  # decode only


TOO_MUCH = "; ask for fewer or shorter ones, or set workload.reuse: shifted"
HELD = "; the trace holds prompts of 3..7 and decodes of 4..6 tokens" + TOO_MUCH


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size: expected an integer of at least 1, got 0"),
        ({"batch_size": True}, "batch_size: expected an integer of at least 1, got True"),
        ({"prompt_tokens": "64"}, "prompt_tokens: expected an integer of at least 0, got '64'"),
        ({"decode_tokens": -1}, "decode_tokens: expected an integer of at least 0, got -1"),
        ({"prompt_tokens": 0, "decode_tokens": 0}, "expected prompt_tokens or decode_tokens of at least 1, got 0 of both; ask"),
        ({"prefill_chunk": 0}, "prefill_chunk: expected an integer of at least 1, got 0"),
        ({"refill": 1}, "refill: expected true or false, got 1"),
        ({"reuse": "again"}, "reuse: expected 'shifted' or nothing, got 'again'"),
        ({"batch_size": 2, "micro_batches": 3}, "micro_batches: expected at most batch_size = 2, got 3; a micro-batch holds"),
        ({"requests": "some"}, "requests: expected 'all' or a list of request numbers, got 'some'"),
        ({"requests": ()}, "requests: expected 'all' or a list of request numbers, got ()"),
        ({"requests": (1, 1)}, "requests: a request is named twice; name it once, or set workload.reuse: shifted"),
        ({"requests": "all", "n_batches": 2}, "n_batches: expected 1 (the default) next to workload.requests, got 2; the number"),
        (
            {"batch_size": 2, "n_batches": 2, "prompt_tokens": 5, "decode_tokens": 2},
            "expected 4 distinct requests (batch_size 2 x n_batches 2), but 3 of the 4 recorded qualify "
            f"(a prompt of at least 5 tokens, at least 2 decode tokens){HELD}",
        ),
        ({"decode_tokens": 7}, f"but 0 of the 4 recorded qualify (at least 7 decode tokens){HELD}"),
        ({"requests": (4,)}, "requests: request 4 is not in the trace, which holds 0..3"),
        ({"requests": (0, 2), "decode_tokens": 5}, "request 0 has a prompt of 5 and 4 decode tokens; expected at least 5 decode"),
        ({"batch_size": 40, "requests": (0,) * 6, "reuse": "shifted"}, "expected at most 4 copies of request 0, which"),
    ],
)  # fmt: skip
def test_what_cannot_be_run_is_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    with pytest.raises(WorkloadError, match=f"^workload[^\n]*{re.escape(message)}[^\n]*$"):
        compose(RAGGED, WorkloadSpec(**changes))


@settings(max_examples=60)
@given(data=st.data())
def test_every_row_runs_once_in_order(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=6))
    trace = synthetic_trace(n_layers=1, n_requests=len(lengths), prompt=[p for p, _ in lengths], decode=[d for _, d in lengths])
    batch_size = data.draw(st.integers(1, 4))
    spec = WorkloadSpec(
        batch_size=batch_size, prefill_chunk=data.draw(st.none() | st.integers(1, 8)), refill=data.draw(st.booleans()),
        micro_batches=data.draw(st.integers(1, batch_size)), requests="all",
    )  # fmt: skip
    w = compose(trace, spec)
    seen: dict[int, list[int]] = {}
    active: set[int] = set()
    for step in w.steps:
        active |= set(step.begins)
        assert len(active) <= batch_size
        assert set(step.requests.tolist()) <= active
        assert {trace.phase[r] for r in step.rows} == {0 if step.phase == "prefill" else 1}
        assert step.kv_tokens == sum(w.admitted[s].final_tokens for s in active)
        work2, contexts = 0, {s: len(seen.get(s, [])) for s in active}
        for slot, row in zip(step.requests.tolist(), step.rows.tolist(), strict=True):
            work2 += 2 * contexts[slot] + 1  # token by token it is the same sum
            contexts[slot] += 1
            seen.setdefault(slot, []).append(row)
        assert step.work2 == work2 == sum(m.work2 for m in step.micro)
        assert step.n_sequences == sum(m.n_sequences for m in step.micro)
        assert [m.first_row for m in step.micro] == np.cumsum([0, *[m.n_rows for m in step.micro]])[:-1].tolist()
        assert sum(m.n_rows for m in step.micro) == step.n_tokens
        active -= set(step.ends)
    assert not active
    assert len(w.requests) == len(lengths)
    for slot, rows in seen.items():
        first = int(trace.requests.first_row[w.requests[slot]])
        assert rows == list(range(first, first + sum(lengths[w.requests[slot]])))


def made(n_layers: int, n_experts: int, top_k: int, prompt: list[int], decode: list[int], scores: bool = False) -> Trace:
    """Draw integers only, which are the same on every machine."""
    rng = np.random.default_rng(5)
    n_rows = sum(prompt) + sum(decode)
    experts = rng.permuted(np.tile(np.arange(n_experts), (n_rows, n_layers, 1)), axis=2)[:, :, :top_k]
    scored = rng.integers(1, 256, experts.shape) / 256
    return Trace.build(
        experts=experts, weights=scored, n_prompt=prompt, n_decode=decode, n_experts=n_experts, model="drawn", label="synthetic",
        scores=rng.integers(1, 256, (n_rows, n_layers, n_experts)) / 256 if scores else None,
    )  # fmt: skip


TRACES = {
    "small": made(3, 8, 2, [5, 5, 7, 3, 0, 9, 5], [4, 6, 4, 5, 3, 0, 8], scores=True),
    "long": made(2, 4, 2, [700, 20], [5, 40]),  # more rows of an expert than a byte counts
    "longest": made(1, 2, 1, [140_000], [2]),  # more than two bytes count
    "wide": made(2, 256, 8, [6, 6, 6], [30, 30, 30]),  # as many experts as have ids of a byte, and more
    "wider": made(2, 300, 4, [6, 6], [9, 9]),
}

WORKLOADS: dict[str, tuple[str, dict[str, Any], str]] = {
    "one by one": ("small", {"requests": "all"}, "224e5d4e2af49f8f"),
    "batches": ("small", {"batch_size": 3, "requests": "all"}, "02fd8d29153a0206"),
    "micro-batches": ("small", {"batch_size": 3, "micro_batches": 2, "requests": "all"}, "253351d248d8837a"),
    "refill": ("small", {"batch_size": 3, "refill": True, "requests": "all"}, "529caae949c4d7fb"),
    "refill, micro-batches, chunks": ("small", {"batch_size": 3, "refill": True, "micro_batches": 3, "prefill_chunk": 4,
                                                "requests": "all"}, "0421a377a1577f22"),
    "chunks": ("small", {"batch_size": 4, "prefill_chunk": 3, "requests": "all"}, "b11a0e2bfd944a47"),
    "prefill only": ("small", {"batch_size": 2, "decode_tokens": 0, "n_batches": 2, "seed": 3}, "fc7dd337157ad1fa"),
    "no prompt": ("small", {"batch_size": 2, "prompt_tokens": 0, "decode_tokens": 3, "n_batches": 2}, "9d4e43ecdf40d646"),
    "cut prompts": ("small", {"batch_size": 2, "prompt_tokens": 4, "decode_tokens": 3}, "87b1de5a1ff44411"),
    "shifted copies": ("small", {"batch_size": 6, "prompt_tokens": 5, "decode_tokens": 4, "reuse": "shifted", "n_batches": 2,
                                 "micro_batches": 2}, "46ac6e939daae8ea"),
    "rows repeat": ("small", {"prompt_tokens": 9, "decode_tokens": 20, "reuse": "shifted", "requests": (0, 1)},
                    "40c2f269b07fee2b"),
    "many rows": ("long", {"batch_size": 2, "requests": "all"}, "2b1f75517a277444"),
    "many rows, chunks": ("long", {"batch_size": 2, "requests": "all", "prefill_chunk": 256, "refill": True}, "e7247c3d3326c62e"),
    "most rows": ("longest", {"requests": "all"}, "32e543aa238921b6"),
    "256 experts": ("wide", {"batch_size": 3, "requests": "all"}, "fc2ac6caa62f3e9b"),
    "300 experts": ("wider", {"batch_size": 2, "requests": "all", "micro_batches": 2}, "5c57044c1edbd1e7"),
}  # fmt: skip
"""Name -> trace, specification, digest of all that its steps say."""


def add(found: Any, value: Any) -> None:
    """Digest a value with its type, so that 1, True and an array of 1 differ."""
    if isinstance(value, np.ndarray):
        found.update(f"{value.dtype.str}{value.shape}{value.flags.writeable}".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, (tuple, list)):
        found.update(f"{type(value).__name__}{len(value)}".encode())
        for one in value:
            add(found, one)
    else:
        found.update(f"{type(value).__name__}{value!r}".encode())


def step_values(step: Step) -> list[Any]:
    said = [step.index, step.phase, step.batch, step.kv_tokens, step.last_chunk, step.begins, step.ends]
    said += [step.n_tokens, step.n_micro, step.n_sequences, step.work2, step.sequences]
    arrays = [np.array(step.requests), np.array(step.rows)]  # writable or not
    return [*said, *arrays, *([*micro[:4], list(micro.layers)] for micro in step.micro)]  # its last field is all layers once more


def digest(workload: Workload) -> str:
    found = hashlib.sha256()
    for step in workload.steps:
        add(found, step_values(step))
    sums = [workload.max_tokens, workload.peak_kv_tokens, workload.labels, workload.requests]
    add(found, sums)
    return found.hexdigest()[:16]


@pytest.mark.parametrize("name", WORKLOADS)
def test_steps_are_as_recorded(name: str) -> None:
    trace, spec, recorded = WORKLOADS[name]
    assert digest(compose(TRACES[trace], WorkloadSpec(**spec))) == recorded


SYNTHETIC = {
    "deepseek-v2-lite": "fa9fb32efa9a530d", "gpt-oss-20b": "eddf3d7125fdc82e", "mixtral-8x7b": "733f76014190e374",
    "olmoe-1b-7b": "d5b2c3a8f10bbf62", "qwen2-57b-a14b": "b5e04f8f34838369", "qwen3-30b-a3b": "ca101003ce02d8a2",
}  # fmt: skip
"""Parameters -> digest of the experts that are made of them."""


@pytest.mark.parametrize(("name", "recorded"), SYNTHETIC.items())
def test_synthetic_routing_is_as_recorded(name: str, recorded: str) -> None:
    experts = synthesize(read_parameters(name), n_requests=2, n_prompt=6, n_decode=24, seed=1).experts
    assert hashlib.sha256(np.ascontiguousarray(experts).tobytes()).hexdigest()[:16] == recorded
