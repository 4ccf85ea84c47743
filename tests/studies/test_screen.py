"""`moesim recommend` for llama.cpp: one screen, speeds as simulated, what fits, what would help, flags that exist."""

from __future__ import annotations

import csv
import json
import math
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from moesim.cli.recommend import recommend as command
from moesim.core.files import FILE
from moesim.core.table import Format
from moesim.core.units import digits
from moesim.errors import ConfigError, InputError
from moesim.experiment import run_experiment
from moesim.experiment.config import load_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.runner import initial_placement
from moesim.fits import required_bytes
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.policies.registry import make_policy
from moesim.studies.advice.engines import engines
from moesim.studies.advice.llama_cpp import Gain, LlamaCpp, Place, Speed
from moesim.studies.advice.question import Asked, look_up
from moesim.studies.advice.recommend import Recommendation, recommend
from moesim.studies.advice.screen import COVERAGE, LINES, WIDTH, output, text, write_folder
from moesim.studies.identify.cases import decode_workload
from moesim.studies.identify.predictor import engine_log_time
from tests.studies.recommend_kit import asked, four_layer_gguf

ROOT = Path(__file__).resolve().parents[2]
BOX, SMALL, TWO = "rtx4070-i5-12600k", "rtx2070s-i5-12400f", "rtx3090x2-epyc7532"
VULKAN = {"base": "rtx3090-epyc7532", "machine.backend": "vulkan"}
QUESTIONS: dict[str, Asked] = {
    "experts of some layers on the CPU": Asked("qwen3-30b-a3b", BOX),
    "dense layers at the start, parts": Asked("glm-4.5-air", "RTX 3060 + Ryzen 5 5600 + 64GB DDR4-3200"),
    "bits of the model": Asked("gpt-oss-120b", "rtx3090-epyc7532", context=65536, prompt=2000),
    "all on the GPU": Asked("gpt-oss-20b", "rtx3090-epyc7532"),
    "whole layers": Asked("mixtral-8x7b", SMALL, "3GiB", "64GiB"),
    "two GPUs": Asked("qwen3-235b-a22b", TWO),
    "no GPU": Asked("qwen3-30b-a3b", "ryzen5900x"),
    "one memory": Asked("gpt-oss-120b", "ryzen-ai-max-395"),
    "Apple, four requests": Asked("gpt-oss-20b", "m4-max", batch=4),
    "nothing fits": Asked("deepseek-v3", SMALL),
    "no RAM for any": Asked("kimi-k2", "xeon-e5-2683v4"),
    "Vulkan, many requests": Asked("qwen3-30b-a3b", VULKAN, "6GiB", batch=16, context=1234),
    "another engine": asked(engine="ktransformers"),
}
NOTHING = ("nothing fits", "no RAM")


@cache
def setting_of(name: str) -> LlamaCpp:
    return LlamaCpp(look_up(QUESTIONS[name], Path()))


@cache
def answer_of(name: str) -> Recommendation:
    return recommend(QUESTIONS[name], quick=name != "experts of some layers on the CPU")


@pytest.fixture(scope="module")
def answer() -> Recommendation:
    return answer_of("experts of some layers on the CPU")


# ---- the screen


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_answer_is_one_screen(name: str):
    found = answer_of(name)
    lines = text(found).splitlines()
    assert len(lines) <= LINES and max(map(len, lines)) <= WIDTH
    assert all(line == line.rstrip() for line in lines)
    if found.point is not None and len(found.points) > 1:  # the recommended row and the cliff are among those that are printed
        assert any(re.match(rf" *{found.point.place.number} +\S", line) for line in lines)
    fits = found.command is not None
    assert ("It does not fit" in text(found)) == (not fits) == name.startswith(NOTHING)
    assert sum(found.limits.values()) == pytest.approx(1.0 if fits else 0.0)


@pytest.mark.parametrize("name", ["experts of some layers on the CPU", "all on the GPU", "two GPUs", "Apple, four requests"])
def test_numbers_of_the_screen_are_those_of_the_document(name: str):
    found = answer_of(name)
    values, shown = json.loads(output(found, Format.JSON)), " ".join(text(found).split())
    assert values["command"] in shown.replace(" \\ ", " ")
    for key in ("decode_tokens_per_s", "decode_tokens_per_s_after_prompt", "prompt_tokens_per_s"):
        assert f"{digits(values[key]['value'])} ({digits(values[key]['low'])} to {digits(values[key]['high'])})" in shown
    for one in values["settings"][1:]:
        speeds = [digits(one[key], 2) for key in ("tokens_per_s", "low_tokens_per_s", "high_tokens_per_s")]
        assert ("{} ({} to {})".format(*speeds) in shown) or not one["fits"]
    for one in values["gains"]:
        assert one["change"] in shown
        if one["decode"] >= 1.03:
            assert re.search(rf"{one['change']} +decode \+{100 * one['decode'] - 100:.0f} %", shown)
    for one in values["quantisations"]:
        assert f"{one['name']} " in shown and (one["misfit"] or digits(one["tokens_per_s"]) in shown)
    assert values["settings"][0]["tokens_per_s"] == values["decode_tokens_per_s"]["value"]


@pytest.mark.parametrize("name", [name for name in QUESTIONS if not name.startswith(NOTHING)])
def test_the_command_has_known_flags_and_the_context_asked_for(name: str):
    found = answer_of(name)
    assert found.command is not None
    words, (engine,) = found.command.words, [one for one in engines() if one.name == found.engine.name]
    assert {word for word in words if word.startswith("-") and word != "-m"} <= set(engine.flags)
    size = "--ctx-size" if engine.name == "llama.cpp" else "--context-length"
    batch = found.setting.asked.batch if engine.name == "llama.cpp" else 1
    assert words[words.index(size) + 1] == str(QUESTIONS[name].room * batch)
    printed = set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text(found)))
    known = {word for one in engines() for flag, facts in one.flags.items() for word in (flag, *facts["short"])}
    assert printed - known <= {"-p", "-n", "--calibrate", "--all-engines", "--long"}, "llama-bench's, and ours"


def test_the_coverage_that_is_printed_is_that_of_the_table():
    with (ROOT / "docs" / "background" / "public_coverage.csv").open() as file:
        (row,) = [one for one in csv.DictReader(file) if (one["intervals"], one["level"]) == ("recommend", "0.9")]
    assert (int(row["rows"]), int(row["machines"]), round(float(row["inside"]), 2)) == COVERAGE


# ---- speeds


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("experts of some layers on the CPU", None), ("dense layers at the start, parts", Place(False, 46)),
        ("bits of the model", None), ("all on the GPU", None), ("whole layers", None), ("no GPU", None),
        ("Apple, four requests", None), ("Vulkan, many requests", Place(False, 48)),
    ],
)  # fmt: skip
def test_speeds_are_those_that_the_engine_simulates(name: str, place: Place | None):
    llama = setting_of(name)
    assert llama.best is not None
    for context in (64, llama.setting.context):
        case = llama.case(place or llama.best.place, context)
        (speed,) = llama.decode([case])
        raw = llama.machine.changed([0.0] * len(llama.machine.constants))
        simulated = llama.setting.asked.batch / math.exp(engine_log_time(case, raw, "test")) * 1e9
        assert speed.value == pytest.approx(simulated, rel=0.01)
        assert speed.low < speed.value < speed.high


def test_an_interval_is_as_wide_as_the_rate_is_unsure():
    wide: list[Speed] = []
    rate = load_hardware(SMALL).numbers["devices.cpu0.memory_bytes_per_s"].value
    for part in (0.05, 0.5):
        number = {"value": rate, "source": "identified", "how": "test", "interval": [rate * (1 - part), rate * (1 + part)]}
        llama = LlamaCpp(look_up(Asked("qwen3-30b-a3b", {"base": SMALL, "devices.cpu0.memory_bytes_per_s": number}), Path()))
        assert llama.best is not None
        wide.append(llama.best.decode)
    assert wide[0].value == pytest.approx(wide[1].value)
    assert wide[1].low < 0.9 * wide[0].low and 1.1 * wide[0].high < wide[1].high


def test_more_layers_on_the_cpu_and_longer_contexts_are_slower(answer: Recommendation):
    at = {(one.place.number, one.context): one.decode.value for one in answer.points}
    numbers, contexts = sorted({number for number, _ in at}), sorted({context for _, context in at})
    assert contexts == [4096, 16384, 65536] and len(numbers) == 5
    for context in contexts:
        speeds = [at[number, context] for number in numbers]
        assert speeds == sorted(speeds, reverse=True) and len({*speeds}) == 5
    assert all(at[number, 4096] > at[number, 16384] > at[number, 65536] for number in numbers)


@pytest.mark.parametrize(
    ("change", "number", "factor"),
    [
        ("RAM 1.5 times as fast", "devices.cpu0.memory_bytes_per_s", 1.5),
        ("GPU twice as fast, same memory", "devices.gpu0.memory_bytes_per_s", 2.0),
        ("16 GiB on the GPU, same speed", "devices.gpu0.memory_bytes", 16 / 12),
    ],
)
def test_a_gain_is_that_of_the_changed_machine(answer: Recommendation, change: str, number: str, factor: float):
    gain = next(one for one in answer.gains if one.change == change)
    value = factor * load_hardware(BOX).numbers[number].value
    changed = LlamaCpp(look_up(Asked("qwen3-30b-a3b", {"base": BOX, number: value}), Path()))
    assert changed.best is not None and answer.decode is not None and answer.point is not None
    assert changed.best.place == (gain.place or answer.point.place)
    case = changed.case(changed.best.place, 16384)
    raw = changed.machine.changed([0.0] * len(changed.machine.constants))
    assert gain.decode == pytest.approx(1e9 / math.exp(engine_log_time(case, raw, "test")) / answer.decode.value, rel=0.02)


def test_without_prompts_nothing_is_said_of_them(answer: Recommendation):
    """A link is no gain for decoding, and much for prompts."""
    (link,) = [one for one in answer.gains if one.change.startswith("PCIe")]
    assert link.decode < 1.03 < 1.5 < (link.prompt or 0) and "PCIe" not in text(answer).partition("no gain")[2]
    assert "no gain for decoding: " in text(answer_of("bits of the model"))


# ---- what fits


def needed(llama: LlamaCpp, policy: dict[str, Any], context: int) -> dict[str, int]:
    """Count the bytes of a setting of llama.cpp by hand, with the buffers of a prompt's 512 tokens."""
    setting, made = llama.setting, make_policy(policy)
    case = llama.case(Place(False, 0), context)
    slots = dict.fromkeys(setting.gpus, setting.model.n_layers * setting.model.n_experts)
    costs = CostModel(setting.model, llama.machine.base, extrapolate=True)
    placement = initial_placement(setting.model, costs, decode_workload(case), made, slots, {})
    batch = setting.asked.batch
    found = required_bytes(setting.model, llama.machine.base, context * batch, placement, batch)
    return {name: sum(parts.values()) for name, parts in found.items()}


@pytest.mark.parametrize(
    ("name", "times"),
    [*((name, times) for name in (*QUESTIONS,)[:3] for times in (0.25, 1)), ("experts of some layers on the CPU", 2)],
)
def test_one_layer_more_on_the_gpu_does_not_fit(name: str, times: float):
    llama = setting_of(name)
    context = round(times * llama.setting.context)
    place = llama.least(context)
    assert place is not None and not place.whole
    for number, fits in ((place.number, True), (place.number - 1, False)):
        total = needed(llama, {"name": "llama-cpp", "n_cpu_moe": number}, context)
        assert (total["gpu0"] <= llama.setting.vram_bytes) == fits
        assert llama.memory(Place(False, number), context)[0] == total["gpu0"]
    shown = {(one.place.number, one.context): not one.misfit for one in answer_of(name).points}
    assert all(fits == (number >= place.number) for (number, at), fits in shown.items() if at == context)


def test_a_gpu_without_room_for_all_layers_has_some_as_a_whole():
    llama = setting_of("whole layers")
    assert llama.best is not None and llama.best.place == Place(True, 2)
    assert llama.memory(Place(False, llama.last), 16384)[2], "all experts on the CPU do not fit"
    assert [bool(llama.memory(Place(True, n), 16384)[2]) for n in (2, 3)] == [False, True]
    assert "--n-gpu-layers 2" in str(answer_of("whole layers").command)


def test_layers_of_two_gpus_are_divided_by_their_bytes():
    found = answer_of("two GPUs")
    assert found.point is not None and found.command is not None
    place = found.point.place
    assert sum(place.split) == len(found.setting.model.blocks) + 1
    assert f"--tensor-split {','.join(map(str, place.split))}" in str(found.command)
    llama = setting_of("two GPUs")
    assert not llama.memory(place, 16384)[2] and llama.memory(Place(False, place.number), 16384)[2]
    assert "--calibrate" not in text(found), "which takes machines with one GPU"


def test_where_nothing_fits_the_quantisation_that_would_is_named():
    found = recommend(Asked("glm-4.5-air", BOX, "12GiB", "44GiB", "Q8_0"), quick=True)
    assert found.command is None and "of the 44 GiB of RAM" in found.misfit
    assert "Q2_K would" in " ".join(text(found).split()) and "--bits Q2_K" in text(found)
    assert [one.name for one in found.quants] == ["Q8_0", "Q4_K_M", "Q2_K"] and found.point is None
    (fits,) = [one for one in found.quants if one.point is not None]
    other = recommend(Asked("glm-4.5-air", BOX, "12GiB", "44GiB", fits.name), quick=True)
    assert other.point is not None and other.point == fits.point


# ---- other engines


def test_where_ram_is_short_the_least_that_does_is_named():
    found = recommend(Asked("gpt-oss-120b", "RTX 4060 laptop + i7-13700H + 32GB DDR5-5200 + windows"), quick=True)
    with_64 = LlamaCpp(look_up(Asked("gpt-oss-120b", "RTX 4060 laptop + i7-13700H + 64GB DDR5-5200 + windows"), Path())).best
    assert found.command is None and with_64 is not None and found.setting.quant == "MXFP4"
    assert found.fits_with.startswith("64 GiB of RAM: ") and found.fits_with in text(found)
    speed = float(found.fits_with.partition(": ")[2].partition(" ")[0])
    assert speed == pytest.approx(with_64.decode.value, rel=0.01)


def test_the_best_other_engine_fits_and_is_compared_on_the_same_requests(answer: Recommendation):
    assert answer.others is not None and answer.point is not None
    best, setting = answer.others.best("llama.cpp"), answer.setting
    assert best is not None and best.command is not None and best.engine.name != "llama.cpp"
    assert best.candidate.gpu_bytes <= setting.vram_bytes and best.candidate.host_bytes <= setting.ram_bytes
    (own,) = [one for one in answer.others.placed if one.engine.name == "llama.cpp"]
    assert own.ratio == 1.0 and best.ratio == pytest.approx(best.decode.value / own.decode.value)
    assert own.candidate.policy == answer.point.place.policy
    assert f"best other engine: {best.engine.name} (" in text(answer) and f"x{best.ratio:.2f}" in text(answer)


# ---- the folder and the command


def test_a_gguf_file_is_the_model(tmp_path: Path):
    pytest.importorskip("gguf")
    path = tmp_path / "four.gguf"
    four_layer_gguf(path)
    question = Asked(str(path), "rtx3090-epyc7532", vram="1.012GiB", context=64, prompt=8, decode=4)
    found = recommend(question, quick=True)
    assert found.setting.model.expert_bytes(0) == 3 * 256 * 512 // 32 * 34
    assert found.command is not None and "--model four.gguf" in str(found.command) and not found.quants
    assert len(text(found).splitlines()) < LINES and "llama-bench -m four.gguf" in text(found)
    write_folder(found, tmp_path / "out")
    assert run_experiment(Experiment(load_config(tmp_path / "out" / "best.yaml"), "best")).rows[0]["error"] is None
    assert json.loads((tmp_path / "out" / "recommendation.json").read_text())["asked"]["model"] == str(path)
    with pytest.raises(ConfigError, match=r"--bits: the tensors of .*four\.gguf have their own bits"):
        recommend(Asked(str(path), BOX, bits="4.5"))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    app = typer.Typer()
    app.command("recommend")(command)
    app.command("other")(lambda: None)
    words = shlex.split(f"recommend --model gpt-oss-20b --hardware {BOX} --context 4096 --prompt 64 --decode 2 --quick")
    out = tmp_path / "out"
    assert app(args=[*words, "-o", "json", "--out", str(out)], standalone_mode=False) == 0
    printed = json.loads(capsys.readouterr().out)
    files = {FILE, "best.yaml", "recommendation.json", "recommendation.md", "settings.csv", "curve.png", "curve.pdf"}
    assert {path.name for path in out.iterdir()} | {"curve.pdf"} == files
    assert json.loads((out / "recommendation.json").read_text()) == printed
    assert (out / "settings.csv").read_text().count("\n") == 1 + len(printed["settings"])
    assert "](curve.png)" in (out / "recommendation.md").read_text()
    row = run_experiment(Experiment(load_config(out / "best.yaml"), "best.yaml")).rows[0]
    assert row["decode_tokens_per_s"] == pytest.approx(printed["decode_tokens_per_s_after_prompt"]["value"], rel=0.02)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="expected a new folder or a result of `moesim recommend`"):
        app(args=[*words, "--out", str(tmp_path / "mine")], standalone_mode=False)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]
    assert app(args=[*words, "--long"], standalone_mode=False) == 0
    long = capsys.readouterr().out
    assert "-ub" in long and "of RAM" in long and len(long.splitlines()) > LINES - 10


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vram": "lots"}, "recommend: --vram: expected a size such as '8 GiB', got 'lots'"),
        ({"vram": "0.1GiB"}, "--vram: expected more than the "),
        ({"ram": "0GiB"}, "recommend: --ram: expected a size of at least 1 byte, got '0GiB'"),
        ({"bits": "0"}, "recommend: --bits"),
        ({"bits": "Q4_K_L"}, "recommend: --bits"),
        ({"context": 10}, "recommend: --context: expected at least --prompt and --decode together, 14, got 10"),
        ({"model": "mixtrall"}, "unknown model 'mixtrall'; did you mean 'mixtral-8x7b'?"),
        ({"hardware": "rtx3091"}, "unknown hardware profile 'rtx3091'"),
        ({"hardware": "ryzen5900x"}, "recommend: --vram: ryzen5900x has no GPU; leave --vram out"),
        ({"hardware": "zen4-2core-disk"}, "--ram: zen4-2core-disk keeps all experts on disk0"),
        ({"engine": "lama.cpp"}, "recommend: --engine: unknown engine 'lama.cpp'; did you mean 'llama.cpp'?"),
        ({"model": "no.gguf", "bits": ""}, "no.gguf: expected a GGUF file, got: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(changes: dict[str, Any], expected: str):
    with pytest.raises(InputError) as caught:
        recommend(asked(**changes))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_pages_that_are_read_again_are_named_under_the_command():
    found = recommend(Asked("gpt-oss-120b", "RTX 4070 + Ryzen 7 5700X + 48GB DDR4-3600"), quick=True)
    assert found.point is not None and found.point.host_bytes > found.setting.ram_bytes
    assert "RAM lacks" in found.paging and "RAM lacks" in "".join(text(found).splitlines(keepends=True)[:6])
    assert f"-ncmoe {found.point.place.number} -p" in text(found), "all on the CPU does not fit"
    short = recommend(Asked("gpt-oss-120b", "RTX 4070 + Ryzen 7 5700X + 32GB DDR4-3600"), quick=True)
    assert short.command is None and short.fits_with.startswith("64 GiB")  # 48 GiB would read pages again


def test_a_limit_that_alone_helps_little_is_explained(answer: Recommendation):
    gains = [Gain("RAM 1.5 times as fast", 1.03), Gain("CPU 1.5 times as fast, same RAM", 1.0)]
    close = replace(answer, limits={"CPU memory": 0.7}, gains=gains)
    assert "only both faster" in " ".join(text(close).split())
    assert "only both" not in text(replace(close, gains=[Gain("RAM 1.5 times as fast", 1.3), gains[1]]))
