"""The pages of commands, keys and rules say what the program says."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

import moesim
from moesim.cli.main import _app
from moesim.experiment.config import json_schema, parse_config
from moesim.experiment.sweep import expand
from moesim.hardware import LABELS
from moesim.policy import Copy, Fetch, Routed, Run
from tests.engine.engine_kit import Script, crossings, link, machine, play, tasks, transfers, workload

DOCS = Path(__file__).resolve().parents[2] / "docs"


def page(name: str) -> str:
    return (DOCS / "reference" / f"{name}.md").read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))] for line in lines]


# ---------------------------------------------------------------------------------------------------------------- YAML


def keys() -> dict[str, dict[str, Any]]:
    """Give all keys of an experiment file with their schema, those of sections as ``section.key``."""
    schema = json.loads(json_schema())
    found: dict[str, dict[str, Any]] = {}
    for name, one in schema["properties"].items():
        (section, *_) = [*re.findall(r"#/\$defs/(\w+Config)", json.dumps(one)), None]
        if section is None or name == "timeline":
            found[name] = one
        if section is not None:
            found |= {f"{name}.{key}": inner for key, inner in schema["$defs"][section]["properties"].items()}
    return found


KEYS = keys()
ON_PAGE = {row[0].strip("`"): row for row in rows(page("yaml")) if row[0].startswith("`")}


def test_the_page_has_every_key_of_the_schema_and_no_other():
    assert set(ON_PAGE) == set(KEYS)
    assert len(KEYS) > 30


@pytest.mark.parametrize("key", sorted(KEYS))
def test_a_key_has_its_default_and_says_if_it_is_swept(key: str):
    _, kind, default, meaning = ON_PAGE[key]
    schema = KEYS[key]
    assert meaning
    if "default" in schema and key != "timeline":
        assert yaml.safe_load(default.strip("`")) == schema["default"]
    assert ("sweep" in kind) == ("oneOf" in json.dumps(schema)), "a list of values is a oneOf of one and many"


def test_the_example_of_the_page_is_valid():
    (block,) = re.findall(r"```yaml\n(.*?)```", page("yaml"), flags=re.DOTALL)
    raw = yaml.safe_load(block)
    assert raw.pop("include") == []
    points = expand(parse_config(raw, "yaml.md"), "yaml.md")
    assert len(points) == 2 * 2 * 3 - 2


# ------------------------------------------------------------------------------------------------------------- commands


def test_the_site_gets_a_page_a_command_with_its_options_and_their_list():
    spec = importlib.util.spec_from_file_location("docs_commands", DOCS / "commands.py")
    assert spec is not None and spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    text = hook.on_page_markdown(page("cli"), None, None, None)
    assert hook.MARK not in text
    names = [one.name or one.callback.__name__.replace("_", "-") for one in _app.registered_commands if one.callback]
    names += [str(group.name) for group in _app.registered_groups]
    assert sorted(hook.commands()) == sorted(names) and len(names) > 15
    for name in names:
        assert re.search(rf"^\| \[`{name}`\]\(cli/{name}\.md\) \| \w.+ \|$", text, re.M), name
        assert hook.commands()[name].startswith(f"# `moesim {name}`\n")
    assert "## `moesim trace record`\n" in hook.commands()["trace"].replace("###", "##")
    assert "`--set KEY=VALUE`" in hook.commands()["run"]


# ---------------------------------------------------------------------------------------------------------------- rules


def test_the_timeline_of_the_page_is_the_engine_s():
    (block,) = re.findall(r"```python\n(.*?)```", page("engine"), flags=re.DOTALL)

    def split(event: Routed, view: Any) -> Any:
        return eval(block)

    def on_gpu(event: Routed, view: Any) -> list[Any]:
        return [Run(event.layer, event.active, "gpu0")]

    two = workload([[[[0, 1], [2, 3]]], [[[1, 2], [2, 3]]]])
    copies = [Copy(0, [0], "gpu0"), Copy(1, range(4), "gpu0")]
    toy = machine(links={"cpu0->gpu0": link(5), "gpu0->cpu0": link()})
    records = play(Script({("Routed", 0, 0, 0): split}, copies=copies, routed=on_gpu), two, toy)
    assert records.layers[0].end == 540
    assert {Fetch, Run} <= {type(action) for action in split(None, None)}  # type: ignore[arg-type]
    happened = sorted(one[:3] for one in [*tasks(records), *transfers(records), *crossings(records)] if one[0] < 540)
    told = [(int(row[0]), int(row[1]), row[2].strip("`")) for row in rows(page("engine")) if row[0].isdigit() and len(row) == 5]
    assert sorted(told) == happened


def test_the_example_in_python_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    table_of, _, figure, errors, logs = re.findall(r"```python\n(.*?)```", page("python"), flags=re.DOTALL)
    exec(table_of, known := {})
    table, frame = capsys.readouterr().out.split("policy", 2)[1:]
    exec(figure + errors, known)
    assert "compare(): unknown argument 'batch_size'; did you mean 'batch'?" in capsys.readouterr().out
    assert "setLevel(logging.INFO)" in logs
    assert [path.suffix for path in sorted((tmp_path / "figures").glob("speedup*"))] == [".csv", ".pdf", ".png", ".txt"]
    policies = ["lru", "fiddler", "dali(w_size=2)"] * 2
    assert [line.split()[0] for line in table.splitlines()[1:7]] == policies
    assert [line.split()[1] for line in frame.splitlines()[1:7]] == policies
    assert (tmp_path / "speedup.png").is_file() and (tmp_path / "results" / "first" / "summary.json").is_file()


@pytest.mark.long
def test_the_answers_in_python_are_given(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(DOCS.parent / "experiments" / "calibrate" / "rtx2070super.csv", "speeds.csv")
    _, block, *_ = re.findall(r"```python\n(.*?)```", page("python"), flags=re.DOTALL)
    exec(block, {"moesim": moesim})
    told = capsys.readouterr().out
    assert "llama-server --model" in told and "Speed(value=" in told and "cpu_read_rate" in told
    assert (tmp_path / "advice" / "best.yaml").is_file()


def test_every_file_of_the_engine_is_named_with_its_rules():
    section = page("engine").partition("## Where the rules are")[2]
    named = {name for row in rows(section) for name in re.findall(r"`(\w+\.py)`", row[0])}
    assert named == {file.name for file in (DOCS.parent / "moesim" / "engine").glob("*.py")} - {"__init__.py"}
    assert {int(n) for row in rows(section) for n in re.findall(r"\d+", row[-1])} == set(range(1, 11))


def test_the_glossary_has_the_labels_from_strongest_to_weakest():
    section = page("glossary").partition("## Sources and labels")[2]
    assert [row[0].strip("`") for row in rows(section) if row[0].startswith("`")] == list(LABELS)
