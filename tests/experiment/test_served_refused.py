"""Commands and policies that need all steps beforehand refuse requests that arrive, before anything is read or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.cli.main import main
from moesim.errors import ConfigError, InputError
from tests.experiment.experiment_kit import resolve, small, write_yaml

SERVED: dict[str, Any] = {"arrivals": "poisson", "rate": 0.5, "n_requests": 2, "prompt_tokens": 4, "answer_tokens": 3}


@pytest.mark.parametrize("verb", ["whatif", "regret", "replay", "validate"])
def test_a_command_that_needs_all_steps_refuses_at_once(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, out = write_yaml(tmp_path, workload=SERVED, trace="no-such-trace"), tmp_path / "out"
    assert main([verb, str(file), "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"moesim: {file}: workload.arrivals: expected batches for moesim {verb}, which needs all steps beforehand, got 'poisson'"
        "; set batch_size and decode_tokens instead, or take moesim run\n"
    )
    assert not out.exists()


def test_users_are_refused_wherever_they_are_in_a_sweep(tmp_path: Path):
    workload = {name: value for name, value in SERVED.items() if name not in ("arrivals", "rate")} | {"closed": [None, 2]}
    with pytest.raises(ConfigError, match=r"regret: workload.closed: expected batches for moesim regret.*got \[None, 2\]"):
        moesim.regret(small(tmp_path, workload=workload), progress=False)


@pytest.mark.parametrize("options", [[], ["--dry-run"]])
@pytest.mark.parametrize("policy", ["belady", "windowed-belady", {"name": "composed", "replacement": "belady"}])
def test_an_oracle_is_refused_where_requests_arrive(
    policy: Any, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file, out = write_yaml(tmp_path, workload=SERVED, policies=["lru", policy], trace="no-such-trace"), tmp_path / "out"
    assert main(["run", str(file), "--out", str(out), *options]) == 2
    name = policy if isinstance(policy, str) else policy["name"]
    assert capsys.readouterr().err == (
        f"moesim: {file}: policies[1]: {name}: expected a policy that does not need the future, unknown where requests arrive, "
        "got an oracle; take lru or any other but belady, min-bypass, windowed-belady\n"
    )
    assert not out.exists()
    batches = write_yaml(tmp_path, policies=["lru", policy])
    assert main(["run", str(batches), "--out", str(out), *options]) == 0


@pytest.mark.parametrize(
    ("workload", "words"),
    [
        ({"users": 4}, "workload.users: unknown key 'users'; did you mean 'closed'?"),
        ({"arrival_rate": 2}, "workload.arrival_rate: unknown key 'arrival_rate'; did you mean 'rate'?"),
        ({"rate": "0.5/s"}, "workload.rate: expected a number, got '0.5/s'; write it in requests a second, without a unit"),
        ({"rate": [0.5, "1"]}, "workload.rate[1]: expected a number, got '1'; write it without quotes"),
        ({"rate": 0}, "workload.rate: expected a number above 0, got 0.0; choose a value in this range"),
        ({"until_s": "60s"}, "workload.until_s: expected a number, got '60s'; write it in seconds, without a unit"),
        ({"limits": 2}, "workload.limits: expected a mapping, got 2; write it as {ttft_s: 2}"),
        ({"limits": {"ttft_s": "2s"}}, "workload.limits.ttft_s: expected seconds above 0, got '2s'; write a number, without"),
        ({"drafts": 3}, "workload.drafts: expected a mapping, got 3; write it as {n: 2, accept: 0.8}"),
        ({"requests": "all"}, "workload.requests: expected nothing in a served workload, got 'all'; use n_requests"),
        ({"lengths": {"prompt": 30}}, "workload.lengths.prompt: expected p50 and p90, and perhaps most, got 30; for one length "
         "use prompt_tokens"),
        ({"scheduler": "VLLM"}, "workload.scheduler: unknown scheduler 'VLLM'; did you mean 'vllm'? known: "),
        ({"scheduler": {"name": "vllm", "max_num_seqs": [2, 4]}}, "workload.scheduler.max_num_seqs: expected an integer of at "
         "least 1, got [2, 4]; list several schedulers instead"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_workload_is_one_line_with_its_remedy(workload: dict[str, Any], words: str, tmp_path: Path):
    with pytest.raises(InputError) as caught:
        resolve(tmp_path, workload=SERVED | workload)
    assert str(caught.value).startswith(f"small.yaml: {words}")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--users", "8"], "Got unexpected extra argument(s) (8); --users takes no value"),
        (["--prompt", "0"], "Invalid value for '--prompt': Input should be greater than or equal to 1, got '0'"),
        (["--ttft", "0"], "capacity: ttft: expected seconds above 0, got 0; raise it"),
        (["--set", "repeat=2"], "capacity: expected one setting of each policy, got 2; give one value of each key"),
    ],
)  # fmt: skip
def test_a_mistake_at_the_command_line_of_capacity(options: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    asked = ["--model", "mixtral-8x7b", "--hardware", "rtx3090-epyc7532", "--policies", "lru", "--trace", "mini-mixtral"]
    assert main(["capacity", *asked, *options]) == 2
    assert capsys.readouterr().err == f"moesim: {words}\n"
