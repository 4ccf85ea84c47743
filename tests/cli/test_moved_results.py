"""Results that are read where none of their inputs are, and results that name code which must not run."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import moesim
from moesim.cli.main import main
from moesim.errors import ConfigError
from moesim.experiment.store import INPUTS
from moesim.plots.catalogue import KINDS
from moesim.trace.synthesis.parameter_set import data_file
from tests.experiment.experiment_kit import write_trace

POLICY = """
from pathlib import Path

from moesim.policies.systems.caches import LRU

Path(__file__).with_name("imported").write_text("yes")


class Mine(LRU):
    \"\"\"One like LRU.\"\"\"
"""
CONFIG = {
    "architectures": ["MixtralForCausalLM"], "num_hidden_layers": 32, "num_local_experts": 8, "num_experts_per_tok": 2,
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}  # fmt: skip
EXPERIMENT: dict[str, Any] = {
    "model": {"base": "models/mine", "expert_bits": 4},
    "hardware": {"base": "machines/near.yaml", "devices.cpu0.idle_w": [60, 65]},
    "trace": "data/small.safetensors",
    "workload": {"prompt_tokens": 6, "decode_tokens": 2},
    "cache": {"ratio": 0.25},
    "policies": ["on-demand", {"name": "composed", "replacement": "moved_policy:Part"}, "moved_policy:Mine", "moved-by-entry"],
    "timeline": None,
}
PART = """

from moesim.policies.parts.replacement import LRU as Replacement


class Part(Replacement):
    \"\"\"One like LRU.\"\"\"
"""
"""Everything by relative paths; the policies are moesim's own, a part, a class, and an entry point."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Make a folder with three results, their inputs, and what studies wrote; modules of policies in a folder of their own."""
    folder = tmp_path_factory.mktemp("moved")
    (folder / "a" / "data").mkdir(parents=True)
    write_trace(folder / "a" / "data" / "small.safetensors")
    for path, text in {
        "models/mine/config.json": json.dumps(CONFIG),
        "machines/near.yaml": "base: machines/far.yaml\nname: near\ndescription: Near.\n",
        "machines/far.yaml": "base: rtx3090-epyc7532\nname: far\ndescription: Far.\n",
        "kept.yaml": yaml.safe_dump(EXPERIMENT | {"frames": True, "repeat": 2}),
        "bare.yaml": yaml.safe_dump(EXPERIMENT | {"intervals": True}),
        "made.yaml": yaml.safe_dump(
            EXPERIMENT
            | {
                "trace": {"synthesize": "made/parameters.yaml", "requests": 2, "prompt": 6, "decode": 2},
                "policies": ["lru", "fifo"],
            }
        ),
        "made/parameters.yaml": data_file("parameters", "mixtral-8x7b")[0],
        "one.yaml": yaml.safe_dump(EXPERIMENT | {"hardware": "machines/near.yaml", "policies": ["lru"]}),
        "code/moved_policy.py": POLICY + PART,
        "code/moved-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: moved\nVersion: 1.0\n",
        "code/moved-1.0.dist-info/entry_points.txt": "[moesim.policies]\nmoved-by-entry = moved_policy:Mine\n",
    }.items():
        (folder / "a" / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / "a" / path).write_text(text)
    shutil.move(folder / "a" / "code", folder / "code")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "a")
        patch.syspath_prepend(str(folder / "code"))
        for name in ("kept", "bare", "made"):
            assert main(["run", f"{name}.yaml", "--out", f"results/{name}", "--jobs", "1"]) == 0
        for study, more in {"whatif": ["--no-next", "--vary", "link.bytes_per_s x2"], "regret": []}.items():
            assert main([study, "one.yaml", "--quick", *more, "--jobs", "1", "--out", f"results/{study}"]) == 0
        sys.modules.pop("moved_policy")
    (folder / "code" / "imported").unlink()
    return folder


OF_STUDIES = {"tornado": "./whatif", "regret": "./regret"}
READ_AS_THEY_ARE = {
    **{f"plot {kind}": ["plot", kind, OF_STUDIES.get(kind, "kept"), "--out", "OUT"]
       for kind in KINDS if KINDS[kind].source in ("rows", "steps", "layers") or kind in OF_STUDIES},
    "plot gantt": ["plot", "gantt", "kept", "--out", "OUT"],
    "plot of a file": ["plot", "hit_rate", "kept/runs.parquet", "--out", "OUT"],
    "plot heatmap of numbers": [
        "plot", "heatmap", "bare", "--x", "hardware", "--y", "cache_ratio", "--policies", "moved_policy:Mine", "--out", "OUT",
    ],
    "report": ["report", "kept", "--out", "OUT/page.html"],
    "diff": ["diff", "kept:0", "kept:2"],
    "diff of runs on routing that is made up": ["diff", "made:0", "made:1"],
    "diff by number": ["diff", "kept:0", "kept:1", "-o", "json"],
}  # fmt: skip
"""Commands that find all they read in a result."""
OF_SWEEPS = {"plot heatmap"}
"""Kinds of figures that need other results."""
SIMULATED = {
    "diff": ["diff", "bare:0", "bare:4"],
    "plot gantt": ["plot", "gantt", "bare", "--policies", "on-demand", "--out", "OUT"],
}
"""Commands that simulate a run again, whose policy is moesim's."""
OF_CODE = {
    "diff": ["diff", "bare:0", "bare:2"],
    "diff of a part": ["diff", "bare:1", "bare:0"],
    "diff of an entry point": ["diff", "bare:3", "bare:0"],
    "plot gantt": ["plot", "gantt", "bare", "--out", "OUT"],
}
"""Commands that simulate a run again, whose policy is somebody's."""


@pytest.fixture
def away(results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Move the results alone to another folder, which becomes the current one; nothing else of the experiments is there."""
    shutil.copytree(results / "a" / "results", tmp_path / "b")
    monkeypatch.chdir(tmp_path / "b")
    (results / "a").rename(results / "gone")
    yield tmp_path / "b"
    (results / "gone").rename(results / "a")


class Told:
    """What a command did: exit code, what it printed, and the files that it wrote."""

    def __init__(self, words: list[str], out: Path, capsys: pytest.CaptureFixture[str]) -> None:
        sys.modules.pop("moved_policy", None)
        capsys.readouterr()
        self.code = main([word.replace("OUT", str(out)) for word in words])
        self.out, err = capsys.readouterr()
        self.err = [line.replace(str(out), "OUT") for line in err.splitlines() if "% done" not in line]  # shown when it is slow
        self.files = {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()} if out.is_dir() else {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Told) and vars(self) == vars(other)


@pytest.fixture
def tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """Give what runs a command and collects what it did; pictures are left out, since their CSV has all that they show."""
    monkeypatch.setattr("moesim.plots.style.rendered", lambda _, suffixes=("png", "pdf"): dict.fromkeys(suffixes, PICTURE))
    made: list[Path] = []

    def run(*words: str) -> Told:
        made.append(tmp_path / "out" / str(len(made)))
        return Told(list(words), made[-1], capsys)

    return run


PICTURE = b"\x89PNG\r\n\x1a\n" + bytes(32)


def before(results: Path, tell: Callable[..., Told], words: list[str], monkeypatch: pytest.MonkeyPatch) -> Told:
    """Run a command where the results were made, with the code that they name on the path, and see that it is not run."""
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(results / "code"))
        patch.chdir(results / "a" / "results")
        told = tell(*words)
    assert not (results / "code" / "imported").exists() and "moved_policy" not in sys.modules
    return told


# ----------------------------------------------------------------------------------------------------------------------- moved
ALIKE = [f"plot {kind}" for kind in KINDS if KINDS[kind].source == "rows" and kind not in ("decode_speed", "heatmap")]
ALIKE += ["report", "plot time_by_layer"]
"""What is read as the other kinds that are drawn here; it is left to -m long."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if name in ALIKE else []) for name in READ_AS_THEY_ARE]
)
def test_what_a_moved_result_holds_is_read_as_before(
    name: str, results: Path, tell: Callable[..., Told], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    words = READ_AS_THEY_ARE[name]
    told = before(results, tell, words, monkeypatch)
    request.getfixturevalue("away")
    after = tell(*words)
    assert (after.code, after.out, after.err) == (told.code, told.out, told.err)
    assert [name for name in {**after.files, **told.files} if after.files.get(name) != told.files.get(name)] == []
    assert told.code == (2 if name in OF_SWEEPS else 0), told.err


@pytest.mark.parametrize("name", SIMULATED)
def test_a_run_of_a_moved_result_is_simulated_on_the_trace_that_it_had(
    name: str, results: Path, tell: Callable[..., Told], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    words = SIMULATED[name]
    told = before(results, tell, words, monkeypatch)
    assert told.code == 0
    away = request.getfixturevalue("away")
    digest = yaml.safe_load((away / "bare" / "config.resolved.yaml").read_text())["inputs"]["traces"][EXPERIMENT["trace"]][
        "sha256"
    ]
    asked = f"expected the trace data/small.safetensors (sha256 {digest[:16]}) to simulate it again, got"
    remedy = "put it next to bare, or name its folder with --inputs DIR (in Python inputs=DIR)"

    def refused(got: str) -> None:
        missing = tell(*words)
        assert (missing.code, missing.out, missing.files) == (2, "", {})
        assert missing.err == [f"moesim: bare: run 0 (on-demand): {asked} {got}; {remedy}"]

    refused("none of that name")
    write_trace(away / "small.safetensors", seed=1)
    refused(f"another in {away / 'small.safetensors'}")
    (away / "small.safetensors").write_bytes(b"damaged")
    refused(f"another in {away / 'small.safetensors'}")
    assert tell(*words, "--inputs", str(results / "gone" / "data")) == told
    assert tell(*words, "--inputs", str(results / "gone")) == told
    shutil.copy(results / "gone" / "data" / "small.safetensors", away / "small.safetensors")
    assert tell(*words) == told


def test_a_moved_result_in_python(results: Path, away: Path) -> None:
    kept, bare = moesim.load("kept"), moesim.load("bare")
    assert len(kept.table) == 16 and not kept.failures and "on-demand" in str(kept) and kept._repr_html_()
    assert kept.records(2).makespan_ns == kept.rows[2]["makespan_ns"]
    assert set(kept.timeline("moved-by-entry").events[0])
    for kind in ("gantt", "latency_cdf", "time_by_layer", "speedup"):
        assert kept.plots(kind)
    assert list(bare.plots("decode_speed"))
    simulated = {
        "records": lambda: bare.records(0),
        "frames": lambda: bare.plots("latency_cdf", policies=["on-demand"]),
        "timeline": lambda: bare.timeline("on-demand"),
    }
    for read in simulated.values():
        with pytest.raises(ConfigError, match=r"^bare: run 0 \(on-demand\): expected the trace data/small.safetensors \(sha256 "):
            read()
    with pytest.raises(ConfigError, match=r"^bare: run 2 .*: expected its records .* add --trust \(in Python trust=True\) if "):
        bare.records(2)
    again = moesim.load("bare", inputs=results / "gone" / "data")
    assert again.records(4).makespan_ns == again.rows[4]["makespan_ns"]


def test_runs_of_a_moved_sweep_are_not_done_again(
    results: Path, tmp_path: Path, tell: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a run depends on has no path in it: neither where the experiment lies, nor how its inputs are called."""
    shutil.copytree(results / "a", tmp_path / "c" / "deep")
    monkeypatch.syspath_prepend(str(results / "code"))
    monkeypatch.chdir(tmp_path / "c" / "deep")
    there = (Path("results/bare/summary.json").read_bytes(), Path("results/bare", INPUTS).read_bytes())
    assert tell("run", "bare.yaml", "--out", "results/bare").err[0] == "8 of 8 runs were in results/bare already"
    assert there == (Path("results/bare/summary.json").read_bytes(), Path("results/bare", INPUTS).read_bytes())
    Path("data").rename("elsewhere")
    moved = tell("run", "bare.yaml", "--out", "results/bare", "--set", f"trace={Path('elsewhere/small.safetensors').absolute()}")
    assert moved.err[0] == "8 of 8 runs were in results/bare already"
    (results / "code" / "imported").unlink()


# ----------------------------------------------------------------------------------------------------------------- not trusted
@pytest.mark.parametrize("name", OF_CODE)
def test_what_needs_the_code_of_a_result_is_refused_unless_it_is_trusted(
    name: str, results: Path, tell: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = before(results, tell, OF_CODE[name], monkeypatch)
    assert told.code == 2 and len(told.err) == 1 and not told.files and not told.out
    assert ": expected its records in the folder, got none, and to simulate it again takes moved" in told.err[0]
    assert told.err[0].endswith(
        ", whose code is not imported to read a result; add --trust (in Python trust=True) if you trust it"
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(results / "code")])
    monkeypatch.chdir(results / "a" / "results")
    trusted = tell(*OF_CODE[name], "--trust")
    assert trusted.code == 0, trusted.err
    (results / "code" / "imported").unlink()


def test_trusted_code_may_lie_with_the_inputs(
    results: Path, away: Path, tell: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    shutil.copytree(results / "code", away / "both")
    shutil.copy(results / "gone" / "data" / "small.safetensors", away / "both")
    told = tell("diff", "bare:0", "bare:2", "--trust")
    assert told.code == 2 and "cannot import module 'moved_policy' of 'moved_policy:" in told.err[0] and len(told.err) == 1
    assert tell("diff", "bare:0", "bare:2", "--trust", "--inputs", "both").code == 0
    assert (away / "both" / "imported").exists()


def test_what_is_left_out_for_lack_of_trust_is_said(
    results: Path, tell: Callable[..., Told], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = READ_AS_THEY_ARE["plot heatmap of numbers"]
    told = before(results, tell, words, monkeypatch)
    assert told.err[0] == "moesim: not imported: moved_policy:Mine, of whose options no default is shown; --trust imports it"
    left_out = b"Defaults of moved_policy:Mine are not shown, for its code was not imported."
    assert [name for name, text in told.files.items() if left_out in text] == ["heatmap.txt"]
    monkeypatch.syspath_prepend(str(results / "code"))
    monkeypatch.chdir(results / "a" / "results")
    trusted = tell(*words, "--trust")
    assert trusted.code == 0 and "not imported" not in str(trusted.err)
    assert not [name for name, text in trusted.files.items() if b"not imported" in text]
    (results / "code" / "imported").unlink()


SCRIPT = """
import moesim
from moesim.errors import ConfigError

bare, kept = moesim.load("bare"), moesim.load("kept")
for read in (
    lambda: bare.records(2), lambda: bare.timeline(), lambda: bare.plots("gantt"), lambda: bare.plots("latency_cdf"),
    lambda: bare.plots("time_by_layer"), lambda: bare.records(3),
):
    try:
        read()
    except ConfigError as error:
        print("refused" if str(error).endswith("add --trust (in Python trust=True) if you trust it") else error)
bare.plots("heatmap", x="hardware", y="cache_ratio", policies=["moved_policy:Mine"])
bare.plots("decode_speed"), bare.table, bare._repr_html_()
kept.timeline(), kept.records(2), kept.plots("gantt")
"""


@pytest.mark.parametrize("name", ["diff of an entry point", "plot heatmap of numbers", "python"])
def test_a_process_of_its_own_does_not_run_the_code_of_a_result(name: str, results: Path, tmp_path: Path) -> None:
    """In the folder of the module, which is on Python's path as well."""
    words = [word.replace("OUT", str(tmp_path)) for word in {**READ_AS_THEY_ARE, **OF_CODE}.get(name, [])]
    here = tmp_path / "here"
    shutil.copytree(results / "a" / "results", here)
    shutil.copytree(results / "code", here, dirs_exist_ok=True)
    (here / "small.safetensors").symlink_to(results / "a" / "data" / "small.safetensors")
    command = [sys.executable, "-c", SCRIPT] if name == "python" else [sys.executable, "-m", "moesim", *words]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, timeout=300, check=False)
    assert not (here / "imported").exists()
    assert done.returncode == (2 if name in OF_CODE else 0), done.stderr
    assert ("whose code is not imported to read a result" in done.stderr) == (name in OF_CODE)
    assert name != "python" or done.stdout.splitlines() == ["refused"] * 6
