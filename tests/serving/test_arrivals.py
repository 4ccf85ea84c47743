"""Which requests arrive and when: gaps, lengths, files in an experiment, requests that never fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from moesim.cli.main import main
from moesim.errors import WorkloadError
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment, run_keys
from moesim.serving import ServedWorkload, composed
from moesim.serving.arrivals import Asked, Closed, Open, drawn_lengths, gamma_times, scaled
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from moesim.trace.workload import WorkloadSpec
from moesim.trace.workload.spec import shortened
from tests.experiment.experiment_kit import small
from tests.experiment.sweep_kit import write

S = 10**9
TABLE = "time_s,prompt,answer\n2,6,3\n3,4,2\n7,5,1\n8,9,4\n"


@pytest.fixture
def trace() -> Trace:
    """Six requests of 6 + 4 tokens."""
    return synthetic_trace(n_layers=2, n_experts=4, top_k=1, n_requests=6, prompt=6, decode=4)


@pytest.fixture
def table(tmp_path: Path) -> str:
    path = tmp_path / "requests.csv"
    path.write_text(TABLE)
    return str(path)


def made(trace: Trace, **asked: Any) -> ServedWorkload:
    found = composed(trace, WorkloadSpec(**asked))
    assert isinstance(found, ServedWorkload)
    return found


def asked_of(trace: Trace, **asked: Any) -> Asked:
    return made(trace, **asked).asked


def test_times_of_a_poisson_process_and_of_bursts():
    n, rate = 40_000, 0.5
    for shape in (1.0, 0.25, 4.0):
        gaps = np.diff(gamma_times(rate, n, 3, shape)) / S
        variation = 1 / np.sqrt(shape)
        assert abs(gaps.mean() - 1 / rate) < 4 * variation / rate / np.sqrt(n), "four standard errors"
        # Four standard errors; those of a coefficient of variation are from 200 samples of as many gaps with another seed.
        assert abs(gaps.std() / gaps.mean() - variation) < {1.0: 0.02, 0.25: 0.06, 4.0: 0.008}[shape]
    assert_array_equal(gamma_times(rate, 5, 3), gamma_times(rate, 5, 3))
    assert (gamma_times(rate, 5, 3) != gamma_times(rate, 5, 4)).all()
    assert gamma_times(rate, 5, 3)[0] > 0


def test_a_rate_stretches_times_and_keeps_their_order_and_gaps():
    ns = np.array([0, 0, 1 * S, 4 * S, 5 * S])
    assert scaled(ns, 1.0).tolist() == [0, 0, 800_000_000, 3_200_000_000, 4 * S]
    assert scaled(ns, 0.8).tolist() == ns.tolist()
    slow = scaled(np.array([0, 7, 8, 8 + 10**6]), 1e-3)
    assert slow[-1] == 3000 * S and (np.diff(slow) >= 0).all()
    assert scaled(np.array([0]), 3.0).tolist() == [0]
    with pytest.raises(WorkloadError, match="rate: expected requests that arrive at different times, got 2 at once"):
        scaled(np.array([0, 0]), 1.0)
    with pytest.raises(WorkloadError, match="rate: expected all requests within a year"):
        scaled(np.array([0, 5]), 1e-9)


def test_a_file_says_when_requests_come_and_how_long_they_are(trace: Trace, table: str):
    found = asked_of(trace, arrivals=table)
    assert found.ns is not None and found.ns.tolist() == [0, S, 5 * S, 6 * S]
    assert found.prompt.tolist() == [6, 4, 5, 9] and found.answer.tolist() == [3, 2, 1, 4]
    found = asked_of(trace, arrivals=table, n_requests=3, rate=0.2, answer_tokens=2)
    assert found.ns is not None and found.ns.tolist() == [0, 2 * S, 10 * S]
    assert found.prompt.tolist() == [6, 4, 5] and found.answer.tolist() == [2, 2, 2]
    source = Open(found)
    taken = []
    while (ns := source.next_ns()) is not None:
        taken.append(source.take())
        assert taken[-1].ns == ns
    assert [(one.ns, one.prompt, one.answer, one.blocks) for one in taken] == [
        (0, 6, 2, ()),
        (2 * S, 4, 2, ()),
        (10 * S, 5, 2, ()),
    ]


def test_blocks_of_a_prompt_come_with_it_unless_it_has_another_length(trace: Trace, tmp_path: Path):
    path = tmp_path / "m.jsonl"
    rows = [{"timestamp": t, "input_length": 600, "output_length": 2, "hash_ids": [0, t]} for t in (1, 2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = asked_of(trace, arrivals=str(path))
    assert found.block == 512
    first, second = found.arrival(0, 0).blocks, found.arrival(1, 9).blocks
    assert first[0] == second[0] and first[1] != second[1]
    assert asked_of(trace, arrivals=str(path), prompt_tokens=5).arrival(0, 0).blocks == ()


def test_users_ask_again_for_the_lengths_of_a_file_round_and_round(trace: Trace, table: str):
    found = asked_of(trace, closed=2, lengths=table, n_requests=6)
    assert found.ns is None and found.prompt.tolist() == [6, 4, 5, 9, 6, 4]
    assert len(asked_of(trace, closed=2, lengths=table)) == 4
    source = Closed(2, 5 * S, found)
    first, second = source.take(), source.take()
    assert (first.user, second.user, first.prompt, second.prompt) == (0, 1, 6, 4)
    assert source.next_ns() is None, "both wait for their answers"
    source.ended(type("Ended", (), {"user": 1})(), 3 * S)
    assert source.next_ns() == 8 * S and source.take()[:4] == (8 * S, 5, 1, 1)


def test_lengths_have_the_quantiles_that_are_asked_for(trace: Trace):
    lengths = {"prompt": {"p50": 100, "p90": 300, "most": 400}, "answer": {"p50": 20, "p90": 20}}
    found = asked_of(trace, arrivals="poisson", rate=1, n_requests=20_000, lengths=lengths, seed=5)
    # Three standard errors of a quantile q of n lognormal numbers, sqrt(q (1 - q) / n) over their density there.
    assert abs(np.quantile(found.prompt, 0.5) - 100) < 2.3 + 0.5
    assert abs(np.quantile(found.prompt, 0.9) - 300) < 9.4 + 0.5
    assert found.prompt.max() == 400 and set(found.answer) == {20}
    again = asked_of(trace, arrivals="poisson", rate=1, n_requests=20_000, lengths=lengths, seed=5)
    assert_array_equal(found.prompt, again.prompt)
    other = asked_of(trace, closed=1, n_requests=50, lengths={"answer": lengths["prompt"]}, seed=6)
    assert set(other.prompt) == {512} and len(set(other.answer)) > 20
    fixed = asked_of(trace, closed=1, n_requests=9, lengths=lengths, prompt_tokens=3)
    assert set(fixed.prompt) == {3} and set(fixed.answer) == {20}


def test_times_do_not_depend_on_lengths(trace: Trace):
    plain, long = (
        asked_of(trace, arrivals="poisson", rate=2, n_requests=9, **more)
        for more in ({}, {"lengths": {"answer": {"p50": 5, "p90": 9}}})
    )
    assert_array_equal(plain.ns, long.ns)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"arrivals": "poison", "rate": 1}, "workload.arrivals: poison: expected a file of requests, got No such file"),
    ({"arrivals": "FILE", "n_requests": 5}, "workload.n_requests: expected at most the 4 that .* has, got 5; lower it"),
    ({"arrivals": "LENGTHS"}, "expected times of arrival in .*, got lengths alone; name their column time_s, or set"),
    ({"arrivals": "gamma"}, "No such file or directory, looked for from /"),
    ({"closed": 1, "limits": "fast"}, "workload.limits: expected a mapping, got 'fast'; write it as {ttft_s: 2"),
    ({"closed": 1, "limits": {"ttft_s": True}}, "workload.limits.ttft_s: expected seconds above 0, got True"),
    ({"closed": 1, "drafts": "mtp"}, "workload.drafts: expected a mapping, got 'mtp'; write it as {n: 2, accept: 0.8}"),
    ({"closed": 1, "drafts": {"n": 1, "accept": [True]}}, "workload.drafts.accept: expected a share for each draft"),
    ({"closed": 1, "scheduler": "{name: vllm}"}, "expected a name or a mapping, got .{name: vllm}.; write it as"),
    ({"closed": 1, "scheduler": {"parallel": 2}}, "workload.scheduler.name: expected one of freetoken, .*, got none; add it"),
    ({"closed": 1, "scheduler": {"name": ["vllm"]}}, "workload.scheduler: unknown scheduler"),
    ({"arrivals": "FILE", "lengths": "FILE"}, "workload.lengths: expected it next to closed or arrivals: poisson, for a"),
    ({"arrivals": "FILE", "burstiness": 2}, "workload.burstiness: expected it next to arrivals: poisson, got arrivals: "),
    ({"closed": 2, "burstiness": 2}, "workload.burstiness: expected it next to arrivals: poisson, got closed"),
    ({"arrivals": "poisson", "rate": 1, "think_s": 2}, "workload.think_s: expected it next to closed, got arrivals: poisson"),
    ({"arrivals": "poisson", "rate": 1, "burstiness": 0}, "workload.burstiness: expected a number above 0, got 0"),
    ({"arrivals": "poisson", "rate": 1, "prompt_tokens": 0}, "workload.prompt_tokens: expected at least 1 in a served workload"),
    ({"lengths": "FILE"}, "workload.lengths: expected arrivals or closed next to it"),
    ({"closed": 1, "lengths": {"answers": {}}}, "workload.lengths: unknown key 'answers'; did you mean 'answer'"),
    ({"closed": 1, "lengths": {"answer": {"p50": 5}}}, "workload.lengths.answer: expected p50 and p90"),
    ({"closed": 1, "lengths": {"answer": 5}}, "workload.lengths.answer: expected p50 and p90, and perhaps most, got 5"),
    ({"closed": 1, "lengths": {"answer": {"p50": 5, "p90": 9, "max": 9}}}, "workload.lengths.answer: unknown key 'max'"),
    ({"closed": 1, "lengths": {"answer": {"p50": 0, "p90": 9}}}, "workload.lengths.answer.p50: expected 1 to .* tokens, got 0"),
    ({"closed": 1, "lengths": {"answer": {"p50": 9, "p90": 5}}}, "workload.lengths.answer: expected p50 <= p90 <= most"),
]  # fmt: skip


@pytest.mark.parametrize(("asked", "words"), WRONG)
def test_what_does_not_fit_is_refused(asked: dict[str, Any], words: str, trace: Trace, table: str, tmp_path: Path):
    (tmp_path / "lengths.csv").write_text("prompt,answer\n1,2\n")
    files = {"FILE": table, "LENGTHS": str(tmp_path / "lengths.csv")}
    written = {key: files.get(value, value) if isinstance(value, str) else value for key, value in asked.items()}
    with pytest.raises(WorkloadError, match=words) as error:
        made(trace, **written)
    assert "\n" not in str(error.value)


def test_lengths_round_to_whole_tokens_within_their_bounds():
    assert drawn_lengths({"p50": 3, "p90": 3}, np.array([-5.0, 0.0, 5.0])).tolist() == [3, 3, 3]
    assert drawn_lengths({"p50": 1, "p90": 10**9}, np.array([-9.0, 9.0])).tolist() == [1, 10**9]


def test_a_result_says_what_was_read_of_the_trace_and_left_out(trace: Trace, tmp_path: Path):
    fits = tmp_path / "fits.csv"
    fits.write_text("time_s,prompt,answer\n0,6,5\n1,2,1\n")
    found = made(trace, arrivals=str(fits))
    assert found.labels == () and len(found.requests) == 2 and len(set(found.order)) == 6
    assert made(trace, arrivals=str(fits), prompt_tokens=7).labels == ("reuse-shifted",), "a prompt of more rows than recorded"
    assert made(trace, arrivals=str(fits), answer_tokens=6).labels == ("reuse-shifted",)
    assert made(trace, closed=1, n_requests=7, prompt_tokens=2, answer_tokens=1).labels == ("reuse-shifted",)
    burst = tmp_path / "burst.csv"
    burst.write_text("Timestamp,Request tokens,Response tokens,Log Type\n0,4,2,x\n1,4,0,x\n")
    assert made(trace, arrivals=str(burst)).labels == (f"1 failed requests of {burst} left out",)


def test_a_request_that_never_fits_is_refused_by_its_number(trace: Trace, table: str):
    found = made(trace, arrivals=table, scheduler={"name": "llama-server", "parallel": 2, "kv_tokens": 18})
    assert (
        found.labels[-1]
        == "1 of 4 requests refused (longer than the 9 tokens of KV cache for one): first request 3 of 9 + 4 tokens"
    )
    with pytest.raises(
        WorkloadError, match="got 2 tokens of KV cache for one in llama-server; all 4 are longer, the first request 0 of"
    ):
        made(trace, arrivals=table, scheduler={"name": "llama-server", "kv_tokens": 8})


def test_a_short_trial_takes_two_requests_of_any_served_workload(trace: Trace, table: str, tmp_path: Path):
    at_once = tmp_path / "at_once.csv"
    at_once.write_text("time_s,prompt,answer\n0,6,5\n0,2,9\n4,2,1\n")
    for asked in (
        {"arrivals": str(at_once), "rate": 2}, {"closed": 3, "lengths": table}, {"arrivals": "poisson", "rate": 3},
        {"closed": 3, "lengths": {"answer": {"p50": 50, "p90": 90}}},
    ):  # fmt: skip
        found = asked_of(trace, **shortened(vars(WorkloadSpec(**asked)), 4))
        assert len(found) == 2 and found.answer.tolist() == [4, 4], asked


# ------------------------------------------------------------ in an experiment
def served(folder: Path, file: str, **changes: Any) -> dict[str, Any]:
    return small(folder, workload={"arrivals": file, **changes}, plots=[])


def test_another_content_of_a_file_is_another_run(table: str, tmp_path: Path):
    def keys(**changes: Any) -> tuple[list[str], Any, str]:
        experiment = Experiment(parse_config(served(tmp_path, table, **changes), "e.yaml"), "e.yaml")
        return run_keys(experiment), experiment.inputs()["requests"], experiment.workload(experiment.specs[0]).digest

    before = keys()
    assert keys() == before and before[1] == {table: {"sha256": before[1][table]["sha256"], "requests": 4}}
    first_two = keys(n_requests=2)
    Path(table).write_text(TABLE.replace("8,9,4", "8,9,3"))
    after = keys()
    assert not set(before[0]) & set(after[0]) and before[1] != after[1] and before[2] != after[2]
    assert keys(n_requests=2) == first_two, "nothing that is read has changed"


def test_a_file_is_run_through_the_command_line_with_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("requests.csv").write_text(TABLE)
    workload = {"arrivals": "requests.csv", "rate": [2.0, 0.5], "scheduler": "vllm"}
    write(tmp_path, "served.yaml", workload=workload, policies=["lru"], timeline=None)
    for jobs in "12":
        assert main(["run", "served.yaml", "--jobs", jobs, "--out", f"out{jobs}"]) == 0
    rows, again = (json.loads(Path(f"out{jobs}/summary.json").read_text())["runs"] for jobs in "12")
    assert rows == again and len(rows) == 2
    for row in rows:
        assert row["arrivals"] == "requests.csv" and row["n_requests_finished"] == 4
        assert "4 requests of 8" in row["notes"] and "reuse-shifted" in row["notes"]
    assert rows[0]["requests_per_s"] > rows[-1]["requests_per_s"]
    Path("requests.csv").write_text(TABLE.replace("7,5", "1,5"))
    assert main(["run", "served.yaml", "--out", "out3"]) == 2
    assert not Path("out3").exists()


def test_a_wrong_file_is_named_with_its_key_and_line(table: str, tmp_path: Path):
    Path(table).write_text(TABLE.replace("7,5", "1,5"))
    with pytest.raises(WorkloadError) as error:
        Experiment(parse_config(served(tmp_path, table), "e.yaml"), "e.yaml")
    assert str(error.value).startswith(
        f"e.yaml: workload.arrivals: {table}:4: expected times that do not go backwards, got 1 after 3"
    )
