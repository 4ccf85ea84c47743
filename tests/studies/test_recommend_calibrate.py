"""`recommend --calibrate`: settings of llama.cpp on an identified machine, and where memory ends."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from moesim.cli.main import main
from moesim.errors import ConfigError
from moesim.experiment.config import load_config
from moesim.hardware import load_hardware
from moesim.plots.identified import calibrated_curve
from moesim.studies.advice.engines import engines
from moesim.studies.advice.llama_cpp import TIMES, UBATCHES, LlamaCpp, Place
from moesim.studies.advice.question import Asked, look_up
from moesim.studies.advice.recommend import Recommendation, _of_llama_cpp, recommend
from moesim.studies.advice.screen import curve_records, measured_records, text
from moesim.studies.identify.bench import read_observations
from moesim.studies.identify.identify import identify
from moesim.studies.identify.predictor import Predictor

ROWS = Path(__file__).resolve().parents[2] / "experiments" / "calibrate" / "rtx2070super.csv"
MACHINE = "rtx2070s-i5-12400f"


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Recommendation:
    found = identify(MACHINE, read_observations(ROWS), intervals=False, leave_out=False)
    setting = look_up(Asked("qwen3-30b-a3b", MACHINE, prompt=64, decode=8), tmp_path_factory.mktemp("model"))
    return replace(_of_llama_cpp(LlamaCpp(setting, found), engines()[0], quick=True), identified=found)


def test_context_and_ubatch_move_the_least_that_fits(answer: Recommendation):
    first = {(context, ubatch): place for context, ubatch, place in answer.ubatches}
    assert [*first] == [(round(16384 * times), ubatch) for times in TIMES for ubatch in UBATCHES]
    numbers = [place.number for place in (first[4096, 512], first[4096, 2048], first[16384, 2048]) if place and not place.whole]
    assert len(numbers) == 3 and numbers == sorted({*numbers})
    assert first[4096, 512] == min((one.place for one in answer.points if not one.misfit), key=lambda one: one.number)
    assert answer.point is not None and first[16384, 512] == answer.point.place


def test_the_observed_setting_is_predicted_as_by_the_identification(answer: Recommendation):
    assert answer.identified is not None
    row = next(one for one in answer.identified.predictions if one.case.observation.row == "q4-48")
    llama = LlamaCpp(answer.setting, answer.identified)
    (same, longer), plain = llama.points([(Place(False, 48), 64), (Place(False, 48), 4096)]), LlamaCpp(answer.setting)
    assert same.decode.value == pytest.approx(row.predicted, rel=0.02) and 0.85 < longer.decode.value / row.predicted < 1
    (before,) = plain.points([(Place(False, 48), 64)])
    wide = [math.log(one.decode.high / one.decode.low) for one in (same, before)]
    assert wide[0] < 0.6 * wide[1], "speeds narrow the interval"


def test_observed_prompts_move_and_narrow_the_prompt(answer: Recommendation, tmp_path: Path):
    file = tmp_path / "rows.csv"
    head = "row,model,bits,setting,context,kind,value,unit"
    file.write_text(f"{head}\na,qwen3-30b-a3b,Q4_K_M,n_cpu_moe=48,64,prefill,70,tokens/s\n", encoding="utf-8")
    found = identify(MACHINE, read_observations(file), intervals=False, leave_out=False)
    (row,) = found.predictions
    same, plain = (LlamaCpp(answer.setting, one).prompt(Place(False, 48)) for one in (found, None))
    assert same.value == pytest.approx(row.predicted, rel=1e-3), "as calibrate says"
    assert (same.low, same.high) == pytest.approx((row.low, row.high), rel=1e-3)
    assert abs(math.log(same.value / 70)) < 0.5 * abs(math.log(plain.value / 70))
    assert same.high / same.low < plain.high / plain.low


def test_a_prompt_is_as_uncertain_as_what_no_observed_prompt_used(
    answer: Recommendation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "rows.csv"  # 8 tokens are computed where the experts are: nothing crosses the link
    file.write_text("row,model,bits,setting,context,kind,value,unit\na,qwen3-30b-a3b,Q4_K_M,n_cpu_moe=48,8,prefill,40,tokens/s\n")
    found = identify(MACHINE, read_observations(file), intervals=False, leave_out=False)
    assert "link_rate" not in [one.name for one in found.predictor.machine.constants]
    longer = LlamaCpp(answer.setting, found).prompt(Place(False, 48))
    monkeypatch.setattr(Predictor, "by_others", lambda self, machine: np.zeros((len(self.cases), len(machine.constants))))
    without = LlamaCpp(answer.setting, found).prompt(Place(False, 48))
    assert longer.value == without.value and longer.high / longer.low > 1.05 * without.high / without.low


def test_the_figure_has_line_cliff_best_and_what_was_measured(answer: Recommendation):
    rows = measured_records(answer)
    assert [(row["row"], row["n_cpu_moe"], row["context_tokens"], row["status"]) for row in rows] == [
        ("q4-48", 48, 4096, "used"), ("q4-40", 40, 4096, "check"), ("q4-32", 32, 4096, "used"),
    ], "experts of other bits are no points of this line"  # fmt: skip
    assert [row["tokens_per_s"] for row in rows] == pytest.approx([27.67, 32.48, 37.62])
    figure = calibrated_curve(pd.DataFrame(curve_records(answer)), pd.DataFrame(rows), "")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["4,096 tokens", "16,384 tokens", "65,536 tokens"]
    first = {context: place for context, ubatch, place in answer.ubatches if ubatch == 512}
    for axes, (context, place) in zip(figure.axes, first.items(), strict=True):
        edges = [patch.get_x() + patch.get_width() for patch in axes.patches]  # the largest -ub first
        solid = [line for line in axes.lines if line.get_linestyle() == "-"]
        (words,) = (text.get_text() for text in axes.texts)
        if place is None or place.whole:
            assert not solid and words == "nothing fits at -ub 512" and edges[-1] > 48
            continue
        speed = next(one.decode.value for one in answer.points if (one.place, one.context) == (place, context))
        assert edges == sorted(edges, reverse=True) and edges[-1] == place.number - 0.5
        assert solid[0].get_xdata()[0] == place.number and solid[0].get_ydata()[0] == speed
        stars = [offset for marks in axes.collections for offset in marks.get_offsets().tolist()]
        assert [place.number, speed] in stars and f"--n-cpu-moe {place.number}\n" in words
    assert len(figure.axes[0].collections) == len(figure.axes[1].collections) + 2, "used and check rows, in one panel"
    assert len(text(answer).splitlines()) <= 40


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "advice"
    sizes = ["--bits", "4.85", "--prompt", "8", "--decode", "2", "--context", "2048"]
    arguments = ["recommend", "--model", "qwen3-30b-a3b", "--hardware", MACHINE, "--calibrate", str(ROWS), *sizes]
    assert main([*arguments, "-o", "json", "--out", str(out)]) == 0
    printed, progress = capsys.readouterr()
    values = json.loads(printed)
    assert {"which constants matter", "settings of llama.cpp"} <= set(progress.splitlines())
    assert values["hardware"]["name"] == f"{MACHINE}-identified" and values["asked"]["hardware"] == "identified.yaml"
    assert {one["context_tokens"] for one in values["settings"]} == {512, 2048, 8192}
    assert any("cpu" in line or "rows" in line for line in values["identified"])
    assert "/moesim." not in printed, "a folder that is gone"
    assert load_hardware(out / "identified.yaml").numbers["devices.cpu0.memory_bytes_per_s"].interval is not None
    assert load_config(out / "best.yaml", []).hardware["base"] == str(out / "identified.yaml")
    assert json.loads((out / "recommendation.json").read_text()) == values
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG") and "](curve.png)" in (out / "recommendation.md").read_text()
    least = min(one["number"] for one in values["settings"] if one["fits"] and one["context_tokens"] == 2048)
    assert [int(n) for n in re.findall(r"--n-cpu-moe (\d+)", values["command"])] == [least]


def test_upgrades_may_be_of_what_no_observed_row_depends_on(answer: Recommendation):
    assert answer.identified is not None
    llama = LlamaCpp(answer.setting, answer.identified)
    assert "link_rate" not in {one.name for one in answer.identified.predictor.machine.constants}
    gains = {one.change: one for one in llama.gains()}
    assert gains["PCIe twice as fast"].prompt is not None and gains["PCIe twice as fast"].prompt > 1.2
    assert gains["RAM 1.5 times as fast"].decode > 1.2


def test_what_was_measured_is_not_asked_for_again(answer: Recommendation):
    assert answer.point is not None and answer.point.place.number != 48
    assert f"-ncmoe {answer.point.place.number} -p" in text(answer), "48 was observed"


def test_model_of_the_observed_speeds_and_a_disk_that_is_left_out(tmp_path: Path):
    speeds, box = tmp_path / "speeds.csv", "RTX 4070 + Ryzen 7 5700X + 32GB DDR4-3600 + NVMe gen4"
    line = "{},Q4_K_M,n_cpu_moe=48,33,tokens/s\n"
    speeds.write_text("model,bits,setting,value,unit\n" + line.format("qwen3-30b-a3b"))
    found = recommend(Asked(None, box), calibrate=speeds, quick=True)
    assert found.setting.model.name == "qwen3-30b-a3b" and "the disk is left out" in text(found)
    with speeds.open("a") as file:
        file.write(line.format("gpt-oss-20b"))
    with pytest.raises(ConfigError, match="--model: expected one, as the speeds are of qwen3-30b-a3b, gpt-oss-20b"):
        recommend(Asked(None, box), calibrate=speeds)
