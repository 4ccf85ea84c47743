"""Every shipped experiment runs, made small."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moesim.cli.main import main
from moesim.experiment.config import load_config
from moesim.trace import trace_names
from tests.experiment.experiment_kit import write_trace

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for path in (ROOT / "experiments").rglob("*.yaml") if not path.name.startswith("_"))  # shared parts


# Dozens of systems, which have goldens of their own; papers, whose first settings differ little; what draws many figures.
LONG = {
    "quickstart",  # the wheel runs it
    "league",
    "equal-memory",
    "qwen3",
    "fiddler-a6000",
    "deepseek-v2-lite",
    "dali-two-gpus",
    "zen4-2core",
}


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.long] if path.stem in LONG or "papers" in path.parts else []) for path in FILES],
    ids=lambda path: path.relative_to(ROOT / "experiments").with_suffix("").as_posix(),
)
def test_quick(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    config = load_config(path)
    monkeypatch.chdir(tmp_path)
    named = [t for t in (config.trace if isinstance(config.trace, list) else [config.trace]) if isinstance(t, str)]
    missing = {t for t in named if t not in trace_names()}
    if missing:
        pytest.skip(f"the traces {sorted(missing)} are not there")
    assert main(["run", str(path), "--quick", "--out", "out", "-o", "json"]) == 0, capsys.readouterr().err
    rows = json.loads(capsys.readouterr().out)
    assert all(row["error"] is None for row in rows)
    assert (tmp_path / "out" / "timeline.json").is_file() == (config.timeline is not None)
    for asked in config.plots:
        name = asked if isinstance(asked, str) else asked["kind"]
        assert list((tmp_path / "out" / "plots").glob(f"{name}*.png")), name


def test_the_quickstart_runs_on_made_up_routing_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    signals = dict.fromkeys(("gate_next1", "gate_next2", "gate_next3", "residual", "learned", "shadow-int8:T1:KV1"), 0.8)
    write_trace(
        tmp_path / "traces" / "mini-mixtral.safetensors", prompt=64, decode=64, n_requests=3, signals=signals, scores=True
    )
    monkeypatch.chdir(tmp_path)
    path = ROOT / "experiments" / "quickstart.yaml"
    assert main(["run", str(path), "--quick", "--set", "plots=[]", "-o", "md"]) == 0, capsys.readouterr().err
    assert capsys.readouterr().out.count("\n|") == 11
