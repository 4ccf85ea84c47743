"""Every command, its exit codes, and its errors: one line on stderr, nothing written when the input is wrong."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from moesim import __version__
from moesim.cli.main import main
from moesim.core.files import FILE
from moesim.experiment.config import parse_config
from moesim.metrics.naming import model_label
from moesim.model import load_model
from moesim.policies.registry import policy_names
from moesim.policies.systems.caches import LRU
from moesim.studies.bench import CASES
from tests.experiment.experiment_kit import write_trace, write_yaml

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def fails(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail; give its one line."""
    before = files(Path.cwd())
    assert main(arguments) == code
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("moesim: ")
    if code == 2:
        assert captured.out == ""
        assert files(Path.cwd()) == before, "nothing is written if the input is wrong"
    return lines[0].removeprefix("moesim: ")


def test_run_prints_a_table_and_writes_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_yaml(tmp_path, plots=["decode_speed"])
    assert main(["run", str(path)]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].split()[:4] == ["policy", "tok/s", "TTFT", "TPOT"]
    assert lines[1].split()[0] == "on-demand"
    assert "cache 0.25, batch 1" in captured.out
    assert "simulated; " in lines[-1] and "synthetic" in captured.out
    assert captured.err == "wrote results/small\n"
    written = (
        "summary.json",
        "runs.parquet",
        "config.resolved.yaml",
        "inputs.json",
        "timeline.json",
        "plots",
        "dataset",
        "records",
    )
    assert {*written, FILE} == {p.name for p in Path("results/small").iterdir()}


def test_run_takes_overrides_a_folder_and_a_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_yaml(tmp_path)
    arguments = ["--set", "cache.ratio=[0.25, 0.5]", "--set", "policies=[lru]", "--out", "there", "-o", "json", "--jobs", "2"]
    assert main(["run", str(path), *arguments]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["policy"], row["cache_ratio"]) for row in rows] == [("lru", 0.25), ("lru", 0.5)]
    assert Path("there/summary.json").is_file()


def test_run_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_yaml(
        tmp_path, cache={"ratio": [0.5, 0.25]}, workload={"batch_size": [2, 1], "prompt_tokens": 6, "decode_tokens": 4}
    )
    assert main(["run", str(path), "--quick", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(r["policy"], r["batch_size"], r["cache_ratio"], r["decode_tokens"]) for r in rows] == [
        ("on-demand", 2, 0.5, 4),
        ("lru", 2, 0.5, 4),
    ]


def test_compare_needs_no_file_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = write_trace(tmp_path / "t.safetensors")
    arguments = ["--trace", str(trace), "--cache", "0.25,0.5", "--batch", "1,2", "--prompt", "6", "--decode", "3"]
    assert main(["compare", "--policies", "lru, {name: fiddler, rule: code}", *arguments, "-o", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert len(rows) == 8
    assert {row["policy"] for row in rows} == {"lru", "fiddler(rule=code)"}
    assert files(tmp_path) == {"t.safetensors"}


def test_compare_alone_asks_for_model_and_machine_of_the_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = write_trace(tmp_path / "t.safetensors")
    arguments = ["--trace", str(trace), "--cache", "0.25", "--prompt", "4", "--decode", "2", "-o", "json"]
    assert main(["compare", "--policies", "lru", *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    quickstart = parse_config(yaml.safe_load((ROOT / "experiments" / "quickstart.yaml").read_text()), "quickstart")
    assert row["model"] == model_label(load_model(quickstart.model)) == "mixtral-8x7b (expert_bits=4)"
    assert row["hardware"] == quickstart.hardware
    assert "no curve for experts" not in row["notes"]


def test_a_failed_run_is_a_row_and_exit_code_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_yaml(tmp_path, model="mixtral-8x7b", cache={"ratio": 1.0})
    assert main(["run", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines()[2].split() == ["lru", "failed"]
    assert captured.out.splitlines()[-1].startswith("failed: lru: gpu0 of rtx3090-epyc7532: needs ")
    assert captured.err.splitlines()[1].startswith("moesim: run 1 (lru, cache 1, batch 1): gpu0 of rtx3090-epyc7532: needs ")
    rows = json.loads(Path("results/small/summary.json").read_text())["runs"]
    assert [bool(row["error"]) for row in rows] == [False, True]


class Stuck(LRU):  # type: ignore[misc, valid-type]
    """A cache that never gives anything up."""

    def evict(self, fetch: Any, view: Any) -> None:
        """Wait."""


@pytest.mark.long
def test_of_runs_that_all_fail_the_error_is_all_that_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = write_yaml(tmp_path, policies=[f"{__name__}:Stuck"], cache={"ratio": 0.25}, plots=["hit_rate", "gantt"])
    assert main(["run", str(path)]) == 1
    told = capsys.readouterr().err.splitlines()
    assert [line.partition("(")[0] for line in told] == ["wrote results/small", "moesim: run 0 "]
    assert "nothing can happen and work remains" in told[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policys": ["lru"]}, "small.yaml: policys: unknown key 'policys'; did you mean 'policies'?"),
        ({"cache": {"ratio": [0.5, "half"]}}, "small.yaml: cache.ratio[1]: expected a number in [0, 1], got 'half'"),
        ({"policies": ["fidler"]}, "small.yaml: policies[0]: unknown policy 'fidler'; did you mean 'fiddler'?"),
        ({"model": "phi-3.5-moe"}, "small.yaml: trace: expected 16 experts as model phi-3.5-moe has, got 8 in trace"),
        ({"workload": {"batch_size": 100}}, "small.yaml: workload: expected 100 distinct requests"),
        ({"cache": {"budget": "1 GiB"}}, "small.yaml: cache.budget: expected at least "),
        ({"model": "mixtral-8x7b", "cache": {"ratio": 1}, "policies": ["lru"]}, "small.yaml: gpu0 of rtx3090-epyc7532: needs "),
        (
            {"hardware": {"base": "rtx3090-epyc7532", "devices": {"gpu0": {"memory_bytes": "24"}}}},
            "small.yaml: hardware: devices.gpu0.",
        ),
        ({"plots": ["gant"]}, "small.yaml: plots[0]: unknown plot 'gant'; did you mean 'gantt'?"),
        (
            {"timeline": {"policies": ["dali"]}, "policies": ["lru"]},
            "small.yaml: timeline.policies[0]: unknown policy of this experiment 'dali'; known: lru; name one of these, or set "
            "timeline: null",
        ),
    ],
)
def test_wrong_experiments(tmp_path: Path, changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]):
    write_yaml(tmp_path, **changes)
    assert fails(["run", "small.yaml"], 2, capsys).startswith(message)


def test_a_truncated_and_an_altered_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_yaml(tmp_path)
    trace = tmp_path / "small.safetensors"
    whole = trace.read_bytes()
    trace.write_bytes(whole[:-100])
    assert "small.safetensors" in fails(["run", "small.yaml"], 2, capsys)
    altered = bytearray(whole)
    altered[-50_000] ^= 1
    trace.write_bytes(bytes(altered))
    assert "sha256" in fails(["run", "small.yaml"], 2, capsys) or "checksum" in fails(["run", "small.yaml"], 2, capsys)
    assert "small.safetensors" in fails(["trace", "stats", str(trace)], 2, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing.yaml"], "nothing.yaml: expected an experiment file, got: No such file or directory"),
        (["run", "small.yaml", "--set", "cache"], "--set cache: expected key.path=value, got 'cache'"),
        (["run", "small.yaml", "--set", "cache.ratio=2"], "small.yaml with --set cache.ratio=2: cache.ratio: expected a number"),
        (["run", "small.yaml", "--set", "trace=[1"], "--set trace: expected valid YAML, got "),
        (["run", "small.yaml", "--jobs", "0"], "Invalid value for '--jobs' / '-j': "),
        (["run", "small.yaml", "--out", "small.yaml"], "small.yaml: expected a folder that can be written, got: "),
        (
            ["run", "small.yaml", "--out", "small.yaml/a/b"],
            "small.yaml/a/b: expected a folder that can be written, got: ",
        ),
        (["run", "small.yaml", "--out", "/proc/moesim/a"], "/proc/moesim/a: expected a folder that can be written, got: "),
        (["compare", "--policies", "lru", "--cache", "0.5,8 G"], "compare: --cache: expected a size with a unit"),
        (["compare", "--policies", "lru", "--batch", "1,x", "--trace", "small.safetensors"], "compare: --batch: expected an int"),
        (
            ["compare", "--policies", "lru", "--cache", "half"],
            "compare: --cache: expected shares such as 0.25, 1/4 or 25%, or sizes such as",
        ),
        (["compare", "--policies", "lru", "--cache", "0.5,2"], "compare: --cache: expected a number in [0, 1], got 2"),
        (["compare", "--policies", "lru", "--transfer", "x"], "compare: --transfer: expected 'own', 'pinned', 'pageable' or"),
        (["compare", "--policies", "lru", "--set", "workload.batch_size=0"], "compare: workload.batch_size: expected an integer"),
        (["compare"], "compare: expected --policies NAME,NAME, got none; write --policies lru,dali"),
        (["list", "things"], "unknown kind 'things'; known: engines"),
        (["trace", "stats", "nothing"], "unknown trace 'nothing'"),
        (
            ["trace", "stats", "small.safetensors", "--phase", "x"],
            "trace statistics: expected phase 'prefill' or 'decode', got 'x'",
        ),
        (["profile", "new"], "profile new: expected NAME, got nothing; for example: moesim profile new mybox --gpu"),
        (["gpt-oss-120b"], "unknown command 'gpt-oss-120b'; for a model: moesim recommend --model gpt-oss-120b"),
        (["small.yaml"], "unknown command 'small.yaml'; for an experiment: moesim run small.yaml"),
        (["recommend", "qwen3-30b-a3b"], "recommend: expected options, got qwen3-30b-a3b; write --model qwen3-30b-a3b"),
        (["recommend", "--ctx-size", "1"], "recommend: no such option: --ctx-size; here it is --context"),
        (
            ["recommend", "--hardware", "RTX", "3060"],
            'Got unexpected extra argument(s) (3060); quote what has spaces: --hardware "RTX 3060 ..."',
        ),
        (["list", "models", "quen"], "list models: expected words that a row has, got quen; did you mean qwen?"),
        (["rnu"], "unknown command 'rnu'; did you mean 'run'? known: "),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    write_yaml(tmp_path)
    assert fails(arguments, 2, capsys).startswith(message)


def test_a_syntax_error_names_the_file_and_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "bad.yaml").write_text("name: a\nmodel: [1\ntrace: b\n")
    told = "bad.yaml: expected valid YAML, got an error in line 3, column 6: expected ',' or ']', but got ':'"
    message = fails(["run", "bad.yaml"], 2, capsys)
    assert message.startswith(told) and "unicode" not in message
    (tmp_path / "bad.yaml").write_text("name: \x00\n")
    assert "unicode string" not in fails(["run", "bad.yaml"], 2, capsys)


def test_list_policies_names_all_with_what_they_lack(capsys: pytest.CaptureFixture[str]):
    assert main(["list", "policies", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == policy_names()
    assert all({"exact", "summary", "paper", "missing", "options"} <= set(row) for row in rows)
    assert any(row["missing"] for row in rows)
    assert main(["list", "policies", "--long"]) == 0
    cards = {card.split(":")[0]: " ".join(card.split()) for card in capsys.readouterr().out.split("\n\n")}
    assert main(["list", "policies", *cards]) == 0
    explained = {card.split(":")[0]: " ".join(card.split()) for card in capsys.readouterr().out.split("\n\n")}
    assert list(explained) == policy_names()
    for row in rows:
        for text in (cards[row["name"]], explained[row["name"]]):
            assert row["summary"] in text
            assert all(" ".join(item.split()) in text for item in row["missing"])
            assert (f" paper: {row['paper']}" in text) == (row["paper"] != "-")
            assert (" not exact: what it runs may differ from what was routed" in text) == (not row["exact"])
    assert main(["list", "policies", "daop-paper", "-o", "json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    (row,) = (row for row in rows if row["name"] == "daop-paper")
    assert {key: one[key] for key in ("exact", "paper", "missing")} == {key: row[key] for key in ("exact", "paper", "missing")}


def test_the_list_of_policies_is_a_line_or_two_each(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["list", "policies", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert main(["list", "policies"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    policies = "\n".join(lines).replace("\n  ", " ").splitlines()
    assert len(policies) == len(rows) and len(lines) <= 2 * len(rows)
    assert "--long" in last
    for row, line in zip(rows, policies, strict=True):
        marks = [] if row["exact"] else ["not exact"]
        marks += [f"missing: {len(row['missing'])}"] if row["missing"] else []
        assert line == f"{row['name']}{' (' + ', '.join(marks) + ')' if marks else ''}: {row['summary']}"


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("models", "mixtral-8x7b"),
        ("hardware", "rtx3090-epyc7532"),
        ("predictors", "oracle"),
        ("formats", "sglang"),
        ("policy-parts", "impact-driven"),
        ("parts", "RTX 3060"),
    ],
)
@pytest.mark.parametrize("form", ["table", "md", "csv", "json"])
def test_lists(kind: str, name: str, form: str, capsys: pytest.CaptureFixture[str]):
    assert main(["list", kind, "-o", form]) == 0
    assert name in capsys.readouterr().out


def test_list_traces_finds_those_of_the_current_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_trace(tmp_path / "traces" / "mine.safetensors")
    assert main(["list", "traces", "-o", "json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["mine"]["decode tokens"] == "4"
    assert rows["mine"]["signals"] == ["gate_next1", "residual"]


def test_schema_is_json(capsys: pytest.CaptureFixture[str]):
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "moesim experiment"


@pytest.mark.long
def test_trace_stats(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = write_trace(tmp_path / "t.safetensors")
    assert main(["trace", "stats", str(trace)]) == 0
    assert "lru hit rate at 25 %" in capsys.readouterr().out
    assert main(["trace", "stats", str(trace), "-o", "json", "--plot", "figures"]) == 0
    assert json.loads(capsys.readouterr().out)["shape"] == {"n_layers": 32, "n_experts": 8, "top_k": 2}
    assert {"figures/cache_hit_rate.png", "figures/cache_hit_rate.pdf"} <= files(tmp_path)


def test_bench_tells_ratios(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    assert {(case.model, case.policy) for case in CASES} >= {
        (model, policy) for model in ("mixtral-8x7b", "qwen3-30b-a3b") for policy in ("lru", "dali")
    }
    monkeypatch.setattr("moesim.studies.bench.N_TIMEOUTS", 2_000)
    monkeypatch.setattr("moesim.cli.bench.CASES", (CASES[0], CASES[-1]))
    assert main(["bench", "--repeats", "2", "--tokens", "2", "-o", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["case"] for row in rows] == [CASES[0].name, CASES[-1].name]
    assert all(row["timeouts_per_run_best"] > 0 and row["n_runs"] > 0 for row in rows)
    assert main(["bench", "--repeats", "1", "--tokens", "1"]) == 0
    assert "routing: synthetic" in capsys.readouterr().out


def test_help_and_no_arguments(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    assert "compare" in capsys.readouterr().out
    assert main([]) == 2
    captured = capsys.readouterr()
    assert "compare" in captured.out and captured.err == ""
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"moesim {__version__}\n"


MINE = """
from moesim.policies.systems.caches import LRU


class Mine(LRU):
    \"\"\"Fails where it is told to.\"\"\"

    def __init__(self, *, at: str = "decide") -> None:
        super().__init__()
        self.at = at

    def place(self, view):
        return super().place(view) if self.at != "place" else nothing_p

    def decide(self, event, view):
        return super().decide(event, view) if self.at != "decide" else nothing_d

    def evict(self, fetch, view):
        return super().evict(fetch, view) if self.at != "evict" else nothing_e
"""


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_what_a_policy_of_the_current_folder_raises_fails_its_run_only(
    tmp_path: Path, jobs: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / f"mine{jobs}.py").write_text(MINE)
    name = f"mine{jobs}:Mine"
    write_yaml(tmp_path, policies=[*({"name": name, "at": at} for at in ("place", "decide", "evict", "never")), "lru"])
    assert main(["run", "small.yaml", "--jobs", jobs]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moesim: ")]
    for line, letter, number in zip(lines, "pde", (13, 16, 19), strict=True):
        assert line.endswith(f": policy {name} raised NameError: name 'nothing_{letter}' is not defined (mine{jobs}.py:{number})")
    rows = json.loads(Path("results/small/summary.json").read_text())["runs"]
    assert [bool(row["error"]) for row in rows] == [True, True, True, False, False]
    assert rows[3]["makespan_ns"] == rows[4]["makespan_ns"]
    inputs = yaml.safe_load(Path("results/small/config.resolved.yaml").read_text())["inputs"]
    assert inputs["policies"] == {name: {"sha256": hashlib.sha256(MINE.encode()).hexdigest()}}
    sys.modules.pop(f"mine{jobs}")


@pytest.mark.parametrize("text", ["a\x1b[2Jb", "\x9b31m", "\u202egnp.x", "\u2066x", "x\x00", "\ud800"])
def test_a_message_holds_nothing_that_a_terminal_obeys(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Names in files are quoted in messages, as characters that can be seen."""
    escaped = text.encode("unicode_escape").decode()
    profile = {"name": "x", "devices": {text: {}}}
    (tmp_path / "p.yaml").write_text(yaml.safe_dump(profile).replace('"\\uD800"', '"\\ud800"'))
    for arguments in (["profile", "show", "./p.yaml"], ["list", text.replace("\0", "")], ["report", text.replace("\0", "")]):
        line = fails(arguments, 2, capsys)
        assert line.isprintable()
    assert escaped.replace("\\x00", "") in line


@pytest.mark.parametrize(
    "command",
    [
        ["run", "small.yaml"],
        ["validate", "small.yaml", "--only-compare"],
        ["trace", "export", "./small.safetensors", "--format", "csv"],
    ],
)
def test_a_name_that_no_file_can_have(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_yaml(tmp_path)
    assert "File name too long" in fails([*command, "--out", "x" * 300], 2, capsys)


GARBAGE = """
from moesim.policies.systems.caches import LRU


class Place(LRU):
    def place(self, view):
        return "nonsense"


class Number(LRU):
    def decide(self, event, view):
        return 5


class Words(LRU):
    def decide(self, event, view):
        return ["nonsense"]


class Victim(LRU):
    def evict(self, fetch, view):
        return "nonsense"
"""


def test_what_a_policy_returns_that_cannot_be_done_fails_its_run_and_names_the_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "garbage.py").write_text(GARBAGE)
    names = [f"garbage:{name}" for name in ("Place", "Number", "Words", "Victim")]
    write_yaml(tmp_path, policies=[*names, "lru"])
    assert main(["run", "small.yaml", "--jobs", "1"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("moesim: run")]
    assert [name in line for line, name in zip(lines, names, strict=True)] == [True] * 4
    rows = json.loads(Path("results/small/summary.json").read_text())["runs"]
    assert [name in row["error"] for row, name in zip(rows, names, strict=False)] == [True] * 4
    assert rows[4]["error"] is None
    sys.modules.pop("garbage")
