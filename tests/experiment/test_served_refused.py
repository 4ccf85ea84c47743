"""Commands and policies that need all steps beforehand refuse requests that arrive, before anything is read or written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moesim
from moesim.cli.main import main
from moesim.errors import ConfigError
from tests.experiment.experiment_kit import small, write_yaml

SERVED: dict[str, Any] = {"arrivals": "poisson", "rate": 0.5, "n_requests": 2, "prompt_tokens": 4, "answer_tokens": 3}


@pytest.mark.parametrize("verb", ["whatif", "regret", "replay", "validate"])
def test_a_command_that_needs_all_steps_refuses_at_once(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file, out = write_yaml(tmp_path, workload=SERVED, trace="no-such-trace"), tmp_path / "out"
    assert main([verb, str(file), "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        f"moesim: {file}: workload.arrivals: expected batches for moesim {verb}, which needs all steps beforehand, got 'poisson'; "
        "set batch_size and decode_tokens instead, or take moesim run\n"
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
        f"moesim: {file}: policies[1]: {name}: expected a policy that does not need the future, which is not known where requests "
        "arrive, got an oracle; take lru or any other but belady, min-bypass, windowed-belady\n"
    )
    assert not out.exists()
    batches = write_yaml(tmp_path, policies=["lru", policy])
    assert main(["run", str(batches), "--out", str(out), *options]) == 0
