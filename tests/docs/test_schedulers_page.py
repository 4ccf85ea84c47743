"""The page of schedulers has all of them with their options, and its example runs."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from moesim.cli.main import main
from moesim.serving import SCHEDULERS
from moesim.serving.scheduler import options_of
from tests.docs.test_reference_pages import page, rows
from tests.experiment.experiment_kit import write_yaml
from tests.serving.serving_kit import own_module
from tests.serving.stepping_kit import Asked, run, table

TEXT = page("schedulers")
TABLES = rows(TEXT)
(CODE,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
OWN = "my_module:ShortestFirst"


def test_every_scheduler_is_in_both_tables():
    named = [row[0].strip("`") for row in TABLES if row[0].startswith("`")]
    assert sorted(named) == sorted([*SCHEDULERS, *SCHEDULERS])


def test_options_have_their_defaults():
    for row in TABLES:
        if len(row) == 2 and row[0].startswith("`"):
            given = {
                key: str(one.default) for key, one in options_of(SCHEDULERS[row[0].strip("`")]).items() if key != "kv_tokens"
            }
            assert re.findall(r"`(\w+)` ([\w.]+)", row[1]) == [(key, value.lower()) for key, value in given.items()]


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "static"])
def test_a_scheduler_says_what_was_read_and_what_is_missing(name: str):
    text = sys.modules[SCHEDULERS[name].__module__].__doc__ or ""
    assert re.search(r"^Read: .* at [0-9a-f]{8}", text, re.MULTILINE | re.DOTALL)
    assert "\nMissing: " in text


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own_module(tmp_path, monkeypatch, CODE)
    found = run({"name": OWN, "chunk": 4}, [Asked(0, 5, 2), Asked(0, 3, 1), Asked(1, 2, 1)])
    assert table(found) == [("B3", "B1"), ("C2", "C1"), ("A4", ""), ("A1", "A1"), ("A1", "A2")]


def test_the_example_is_named_in_an_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    own_module(tmp_path, monkeypatch, CODE + "\nopen('ran', 'w').close()\n")
    (written,) = re.findall(r"```yaml\n(workload:\n  closed: 8\n  scheduler: \[vllm.*?)```", TEXT, re.DOTALL)
    workload = yaml.safe_load(written)["workload"] | {"closed": 2, "n_requests": 3, "prompt_tokens": 5, "answer_tokens": 2}
    trace = {"synthesize": "mixtral-8x7b", "requests": 3, "prompt": 6, "decode": 5}
    write_yaml(
        tmp_path, cache={"ratio": 0.125}, model="mixtral-8x7b", trace=trace, workload=workload, policies=["on-demand", "lru"]
    )
    assert main(["run", "small.yaml", "--dry-run"]) == 0
    dry = capsys.readouterr().out
    assert f"would import and run my_module ({tmp_path / 'my_module.py'})" in dry and not (tmp_path / "ran").exists()
    assert main(["run", "small.yaml", "--jobs", "2", "--out", "out"]) == 0
    rows = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert [row["scheduler"] for row in rows] == ["vllm", "vllm", f"{OWN}(chunk=256)", f"{OWN}(chunk=256)"]
    assert [row["error"] for row in rows] == [None] * 4
    assert OWN in (tmp_path / "out" / "config.resolved.yaml").read_text()
    assert main(["list", "schedulers", OWN]) == 0
    assert "tokens of a prompt in a step" in capsys.readouterr().out
