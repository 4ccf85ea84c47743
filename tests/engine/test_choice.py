"""Which engine carries a run out, and how it is forced."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from moesim.cli.main import main
from moesim.engine import chosen, entry, native
from moesim.errors import ConfigError, SimulationError
from moesim.policies.registry import make_policy
from moesim.testing.runs import run_inputs, tiny_workload
from tests.engine.engine_kit import ALL, ONE, Script, on_gpu, play

routing = import_module("moesim.trace.workload.compose")  # the package has a function of that name

built = pytest.mark.skipif(not native.AVAILABLE, reason="the native engine is not built")


def test_the_native_engine_runs_where_it_is_built(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(entry.VARIABLE)
    assert chosen() == ("native" if native.AVAILABLE else "simpy")
    monkeypatch.setattr(native, "AVAILABLE", False)
    assert chosen() == "simpy"
    monkeypatch.setattr(native, "AVAILABLE", True)
    assert chosen() == "native"


def test_a_forced_engine_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(native, "AVAILABLE", False)
    with pytest.raises(ConfigError, match=r"^engine: the native engine is not built here; install moesim with a C\+\+ compiler"):
        play(Script(copies=ALL, routed=on_gpu), ONE, engine="native")
    monkeypatch.setenv(entry.VARIABLE, "cpp")
    with pytest.raises(ConfigError, match=r"^MOESIM_ENGINE: expected simpy or native, got 'cpp'; leave it out"):
        play(Script(copies=ALL, routed=on_gpu), ONE)
    assert main(["bench", "--simulator", "fast"]) == 2
    assert (
        capsys.readouterr().err
        == "moesim: engine: expected simpy or native, got 'fast'; leave it out for the fastest that is there\n"
    )


def compared(engine: str, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, object]]:
    options = [
        "--policies",
        "lru,fiddler",
        "--cache",
        "0.5",
        "--prompt",
        "4",
        "--decode",
        "2",
        "--simulator",
        engine,
        *more,
        "-o",
        "json",
    ]
    assert main(["compare", *options, "--simulator", engine, *more]) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


@built
def test_a_row_says_which_engine_ran_and_all_else_is_equal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv(entry.VARIABLE, "")
    python, compiled = compared("simpy", capsys), compared("native", capsys)
    assert {row.pop("engine") for row in python} == {"simpy"}
    assert {row.pop("engine") for row in compiled} == {"native"}
    assert python == compiled and len(python) == 2


@built
def test_a_verified_run_is_played_on_both_engines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv(entry.VARIABLE, "")
    monkeypatch.setenv(entry.VERIFY, "")
    plain = compared("simpy", capsys)
    played = []
    for name, engine in list(entry._ENGINES.items()):
        monkeypatch.setitem(entry._ENGINES, name, lambda state, name=name, engine=engine: played.append(name) or engine(state))
    verified = compared("simpy", capsys, "--verify", "1")
    assert verified == plain and played == ["simpy", "native"] * 2
    assert compared("native", capsys, "--verify", "0") and played[4:] == ["native", "simpy"] * 2  # 0 changes nothing


@built
def test_the_first_record_that_differs_stops_a_verified_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv(entry.VARIABLE, "")
    monkeypatch.setenv(entry.VERIFY, "1")

    def wrong(state: Any) -> Any:
        records = entry._run_simpy(state)
        layers = list(records.layers)
        layers[1] = layers[1]._replace(end=7)
        records.layers.clear()
        records.layers.extend(layers)
        return records

    monkeypatch.setitem(entry._ENGINES, "native", wrong)
    says = r"simpy LayerRecord\(begin=\d+, end=\d+, step=0, layer=1\), native LayerRecord\(begin=\d+, end=7, "
    with pytest.raises(SimulationError, match=r"^engines differ: layers\[1\]: " + says):
        play(Script(copies=ALL, routed=on_gpu), ONE)


def test_the_verified_share_depends_on_the_runs_alone(monkeypatch: pytest.MonkeyPatch):
    runs = [("lru", n) for n in range(2000)]
    found = {}
    for share in (0, 0.25, 1):
        monkeypatch.setenv(entry.VERIFY, str(share))
        found[share] = [run for run in runs if entry.among_verified(run)]
    assert (len(found[0]), len(found[1])) == (0, 2000)
    assert 430 < len(found[0.25]) < 570  # four standard deviations


@built
def test_the_view_that_a_policy_keeps_outlives_its_run():
    script = Script(copies=ALL, routed=on_gpu)
    kept = []
    script.place, place = lambda view: kept.append(view) or place(view), script.place  # type: ignore[method-assign, func-returns-value]
    records = play(script, ONE, engine="native")
    (view,) = kept
    assert view.now_ns == records.makespan_ns and view.is_resident(0, 1, "gpu0") and not view.is_pending(0, 1, "gpu0")


@built
def test_only_who_reads_the_routing_by_layer_has_it_prepared(monkeypatch: pytest.MonkeyPatch):
    prepared: list[int] = []
    count = routing._count
    monkeypatch.setattr(routing, "_count", lambda *args: prepared.append(1) or count(*args))
    for engine, policy, read in (("native", "lru", False), ("native", "fiddler", False), ("simpy", "lru", True)):
        deciding = make_policy(policy)
        inputs = run_inputs(deciding, tiny_workload(deciding), 16, None, {})
        prepared.clear()
        entry.simulate(**inputs, engine=engine)
        assert bool(prepared) == read, (engine, policy)


def test_every_python_file_of_the_rules_has_its_namesake():
    folder = Path(native.__file__).parent
    compiled = {path.stem for path in folder.glob("*.cpp")}
    rules = {
        "actions",
        "clock",
        "lanes",
        "links",
        "loop",
        "memory",
        "setup",
        "state",
        "steps",
        "streams",
        "view",
        "visit",
    }
    assert rules <= compiled
    assert rules <= {path.stem for path in folder.parent.glob("*.py")}
