"""`moesim.recommend` and `moesim.calibrate` give what the commands of the same names print and write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import moesim
from moesim.api.answers import Advice
from moesim.cli.main import main
from moesim.errors import ConfigError
from tests.studies.recommend_kit import MODEL, four_layers

ROWS = (
    "model,bits,setting,batch,context,decode,value,unit,kind\n"
    "qwen3-30b-a3b,Q4_K_M,n_cpu_moe=48,1,0,1,30,tokens/s,decode\n"
    "qwen3-30b-a3b,Q4_K_M,n_cpu_moe=40,1,0,1,33,tokens/s,decode\n"
)
BOX = "rtx2070s-i5-12400f"
QUESTION: dict[str, Any] = {"vram": "3GiB", "ram": "64GiB", "prompt": 8, "decode": 6, "context": 14}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        one.name: one.read_bytes().replace(str(folder).encode(), b"DIR") for one in folder.iterdir() if one.suffix != ".jsonl"
    }


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return four_layers(tmp_path_factory.mktemp("traces"))


@pytest.fixture(scope="module")
def advice(trace: str) -> Advice:
    return moesim.recommend(MODEL, "rtx3090-epyc7532", trace=trace, jobs=1, progress=False, **QUESTION)


def test_an_advice_is_that_of_the_command(advice: Advice, trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [word for name, value in QUESTION.items() for word in (f"--{name}", str(value))]
    line = ["recommend", "--model", yaml.safe_dump(MODEL, default_flow_style=True).strip(), "--hardware", "rtx3090-epyc7532"]
    assert main([*line, *options, "--trace", trace, "--jobs", "1", "--out", str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == advice.text() == f"{advice}\n"
    assert advice.save(tmp_path / "b") == tmp_path / "b"
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert json.loads(advice.text("json"))["command"] == str(advice.command)
    with pytest.raises(ConfigError, match="unknown format 'pdf'"):
        advice.text("pdf")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="expected a new folder or a result of `moesim recommend`"):
        advice.save(tmp_path / "mine")


def test_an_advice_as_a_table(advice: Advice) -> None:
    table = advice.table
    assert advice.point is not None and advice.decode is not None
    first = table.iloc[0]
    assert (first.options, first.context_tokens, first.tokens_per_s) == (advice.point.place.title, 14, advice.decode.value)
    assert ((table.low_tokens_per_s < table.tokens_per_s) & (table.tokens_per_s < table.high_tokens_per_s)).all()
    assert repr(advice).startswith("<Advice: llama.cpp: experts of the first ")
    assert repr(advice).endswith(" tokens/s for mixtral-8x7b on rtx3090-epyc7532>")
    html = advice._repr_html_()
    assert html.count("<tr") == 1 + len(table) and f"<td>{advice.point.place.title}</td>" in html


def test_an_identification_is_that_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    line = ["calibrate", str(tmp_path / "rows.csv"), "--hardware", BOX, "--free", "cpu_read_rate", "--free", "cpu_layer"]
    assert main(line) == 0
    printed = capsys.readouterr().out
    found = moesim.calibrate(tmp_path / "rows.csv", BOX, free=["cpu_read_rate", "cpu_layer"], name="mybox", progress=False)
    assert found.text() == printed == f"{found}\n"
    assert list(found.table.constant) == [one.constant.name for one in found.constants]
    n = list(found.table.verdict).count("identified")
    assert repr(found) == f"<Identified: mybox, {n} of 2 constants identified>"
    assert "<td>cpu_read_rate</td>" in found._repr_html_()
    assert moesim.load_hardware(found.raw).name == "mybox"


@pytest.mark.long
def test_a_folder_keeps_what_was_simulated_and_names_the_machine(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS)
    options: dict[str, Any] = {"free": ["cpu_read_rate"], "progress": False}
    found = moesim.calibrate(tmp_path / "rows.csv", BOX, out=tmp_path / "box2", **options)
    assert found.profile.name == "box2" and (tmp_path / "box2" / "box2.yaml").is_file()
    before = contents(tmp_path / "box2"), (tmp_path / "box2" / "engine.jsonl").read_bytes()
    moesim.calibrate(tmp_path / "rows.csv", BOX, out=tmp_path / "box2", **options)
    assert before == (contents(tmp_path / "box2"), (tmp_path / "box2" / "engine.jsonl").read_bytes())
    line = ["calibrate", str(tmp_path / "rows.csv"), "--hardware", BOX, "--free", "cpu_read_rate"]
    assert main([*line, "--out", str(tmp_path / "other" / "box2")]) == 0
    assert before[0] == contents(tmp_path / "other" / "box2")
    with pytest.raises(ConfigError, match="expected a name of letters, digits, dots and dashes"):
        moesim.calibrate(tmp_path / "rows.csv", BOX, out=tmp_path / "my box")
    assert not (tmp_path / "my box").exists()


@pytest.mark.parametrize(
    ("call", "given", "expected"),
    [
        ("recommend", {"batch": [1, 4]}, "recommend: batch: expected a whole number of at least 1, got [1, 4]"),
        ("recommend", {"prompt": "8"}, "recommend: prompt: expected a whole number"),
        ("recommend", {"batch": True}, "recommend: batch: expected a whole number"),
        ("recommend", {"jobs": 0}, "recommend: jobs: expected a whole number of at least 1, got 0"),
        ("recommend", {"bits": 4.5}, "recommend: bits: expected a text, got 4.5"),
        ("recommend", {"vram": 24}, "recommend: vram: expected a text with a unit, such as '12GiB', got 24"),
        ("recommend", {"all_engines": "no"}, "recommend: all_engines: expected True or False, got 'no'"),
        ("calibrate", {"free": "cpu_rate"}, "calibrate: free: expected a list of texts, got 'cpu_rate'"),
        ("calibrate", {"out": 5}, "calibrate: out: expected a path, got 5"),
        ("compare", {"quick": "no"}, "compare: quick: expected True or False, got 'no'"),
        ("compare", {"jobs": -1}, "compare: jobs: expected a whole number of at least 1, got -1"),
        ("compare", {"overrides": 5}, "compare: overrides: expected a mapping, or a list of 'key=value', got 5"),
    ],
)
def test_another_type_is_refused_in_one_line(call: str, given: dict[str, Any], expected: str) -> None:
    needed = {"recommend": ("mixtral-8x7b", BOX), "calibrate": ("rows.csv", BOX), "compare": ("lru",)}
    with pytest.raises(ConfigError) as found:
        getattr(moesim, call)(*needed[call], **given)
    assert str(found.value).startswith(expected) and "\n" not in str(found.value)


def test_paths_and_experiments_of_another_type() -> None:
    with pytest.raises(ConfigError, match="load: folder: expected a path, got 5"):
        moesim.load(5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="run: experiment: expected a path or a mapping, got"):
        moesim.run(["a.yaml"])  # type: ignore[arg-type]
    result = moesim.Result([], None)
    for wrong, expected in (({"where": ["x"]}, "where: expected a mapping"), ({"policies": "lru"}, "policies: expected a list")):
        with pytest.raises(ConfigError, match=f"plot: {expected}"):
            result.plot("speedup", **wrong)  # type: ignore[arg-type]


def test_a_machine_says_in_a_line_what_it_is() -> None:
    assert repr(moesim.load_hardware("rtx3090-epyc7532")) == "<Hardware: rtx3090-epyc7532, gpu0, cpu0>"


SMALL = {
    "model": {"base": "mixtral-8x7b", "expert_bits": 4}, "hardware": "rtx3090-epyc7532", "trace": "mini-mixtral",
    "workload": {"prompt_tokens": 4, "decode_tokens": 2}, "cache": {"ratio": 0.25}, "policies": ["lru", "fiddler"],
}  # fmt: skip


def test_studies_are_those_of_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, ran = tmp_path / "small.yaml", tmp_path / "ran"
    file.write_text(yaml.safe_dump(SMALL))
    moesim.run(SMALL, out=ran, jobs=1, progress=False)
    vary = ["batch 2"]
    given: list[tuple[list[str], Any]] = [
        (["whatif", str(file), "--vary", *vary, "--no-next"], moesim.whatif(SMALL, vary, look=False, jobs=1, progress=False)),
        (["regret", str(file), "--policies", "lru"], moesim.regret(str(file), ["lru"], jobs=1, progress=False)),
    ]
    for line, found in given:
        assert main([*line, "--jobs", "1", "--out", str(tmp_path / line[0])]) == 0
        printed = capsys.readouterr().out.replace(str(file), "whatif")
        assert found.text().replace(str(file), "whatif") == printed and not found.failures
        assert contents(found.save(tmp_path / f"{line[0]}-2")) == contents(tmp_path / line[0])
        assert len(found.table) and repr(found).startswith("<") and "<table" in found._repr_html_()
    both = moesim.diff(f"{ran}:lru", f"{ran}:fiddler")
    assert main(["diff", f"{ran}:0", f"{ran}:1", "-o", "csv"]) == 0
    assert capsys.readouterr().out.replace(":0", ":lru").replace(":1", ":fiddler") == both.text("csv")
    assert (both.save(tmp_path / "diff") / "diff.csv").read_text() == both.text("csv")
    assert len(both.table) and repr(both).startswith("<Study: diff, ")
