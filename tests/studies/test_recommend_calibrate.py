"""`recommend --calibrate`: the curve over llama.cpp's settings on an identified machine, and where memory ends."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pandas as pd
import pytest

from moesim.cli.main import main
from moesim.core.table import Format
from moesim.experiment.config import load_config
from moesim.hardware import load_hardware
from moesim.plots.identified import calibrated_curve
from moesim.studies.advice.observed import (
    best,
    curve,
    curve_records,
    curve_text,
    measured_records,
)
from moesim.studies.advice.question import Asked, Setting, look_up
from moesim.studies.identify.bench import read_observations
from moesim.studies.identify.identify import Identified, identify

ROWS = Path(__file__).resolve().parents[2] / "experiments" / "calibrate" / "rtx2070super.csv"
MACHINE = "rtx2070s-i5-12400f"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> tuple[Setting, Identified]:
    asked = Asked("qwen3-30b-a3b", MACHINE, None, None, 4.85, 1, 64, 8, 4096, None, False)
    found = identify(MACHINE, read_observations(ROWS), intervals=False, leave_out=False)
    return look_up(asked, tmp_path_factory.mktemp("model")), found


def test_more_layers_on_the_cpu_are_slower_and_smaller(known: tuple[Setting, Identified]):
    points = curve(*known)
    for context in (4096, 16384, 65536):
        for ubatch in (512, 1024, 2048):
            line = [one for one in points if (one.context, one.ubatch) == (context, ubatch)]
            assert [one.n_cpu_moe for one in line] == sorted({one.n_cpu_moe for one in line})
            assert all(a.speed > b.speed for a, b in pairwise(line))
            sizes = [one.gpu_bytes for one in line if one.n_cpu_moe]  # with none on the CPU nothing is copied
            assert sizes == sorted(sizes, reverse=True)
            assert all(one.low < one.speed < one.high for one in line)
            fits = [one.fits for one in line]
            assert fits == sorted(fits) and fits == [one.gpu_bytes <= known[0].vram_bytes for one in line]


def test_the_best_is_the_first_beyond_the_cliff(known: tuple[Setting, Identified]):
    points = curve(*known)
    least = []
    for context, ubatch in ((4096, 512), (4096, 2048), (16384, 512), (16384, 2048)):
        chosen = best(points, context, ubatch)
        assert chosen is not None
        before = next(
            one for one in points if (one.n_cpu_moe, one.context, one.ubatch) == (chosen.n_cpu_moe - 1, context, ubatch)
        )
        assert chosen.fits and not before.fits
        least.append(chosen.n_cpu_moe)
    assert least[0] < least[1] and least[0] < least[2] < least[3], "context and -ub move the cliff"
    text = curve_text(points, known[0], Format.TABLE)
    assert f"--n-cpu-moe {least[0]} -c 4096 -ub 512" in text and "nothing fits" in text


def test_the_observed_setting_is_predicted_as_by_the_identification(known: tuple[Setting, Identified]):
    setting, found = known
    row = next(one for one in found.predictions if one.case.observation.row == "q4-48")
    point = next(one for one in curve(setting, found) if (one.n_cpu_moe, one.context) == (48, 4096))
    assert 0.85 < point.speed / row.predicted < 1, "4096 tokens of context are slower than 64, and little else differs"


def test_the_figure_has_line_cliff_best_and_what_was_measured(known: tuple[Setting, Identified]):
    setting, found = known
    points = curve(setting, found)
    rows = measured_records(points, setting, found)
    assert [(row["row"], row["n_cpu_moe"], row["context"], row["status"]) for row in rows] == [
        ("q4-48", 48, 4096, "used"), ("q4-40", 40, 4096, "check"), ("q4-32", 32, 4096, "used"),
    ], "experts of other bits are no points of this line"  # fmt: skip
    assert [row["tokens_per_s"] for row in rows] == pytest.approx([27.67, 32.48, 37.62])
    figure = calibrated_curve(pd.DataFrame(curve_records(points)), pd.DataFrame(rows), "")
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["4,096 tokens", "16,384 tokens", "65,536 tokens"]
    for axes, context in zip(figure.axes, (4096, 16384, 65536), strict=True):
        chosen = best(points, context, 512)
        edges = [patch.get_x() + patch.get_width() for patch in axes.patches]  # the largest -ub first
        solid = [line for line in axes.lines if line.get_linestyle() == "-"]
        (text,) = (text.get_text() for text in axes.texts)
        if chosen is None:
            assert not solid and text == "nothing fits at -ub 512" and edges[-1] > 48
            continue
        assert edges == sorted(edges, reverse=True) and edges[-1] == chosen.n_cpu_moe - 0.5
        assert solid[0].get_xdata()[0] == chosen.n_cpu_moe and solid[0].get_ydata()[0] == chosen.speed
        stars = [offset for marks in axes.collections for offset in marks.get_offsets().tolist()]
        assert [chosen.n_cpu_moe, chosen.speed] in stars and f"--n-cpu-moe {chosen.n_cpu_moe}\n" in text
    assert len(figure.axes[0].collections) == len(figure.axes[1].collections) + 2, "used and check rows, in one panel"


@pytest.mark.long
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "advice"
    sizes = ["--bits", "4.85", "--prompt", "8", "--decode", "2", "--context", "2048"]
    arguments = ["recommend", "--model", "qwen3-30b-a3b", "--hardware", MACHINE, "--calibrate", str(ROWS), *sizes]
    assert main([*arguments, "-o", "json", "--out", str(out)]) == 0
    answer, progress = capsys.readouterr()
    told = json.loads(answer)
    assert {"which constants matter", "placements", "settings of llama.cpp"} <= set(progress.splitlines())
    assert re.search(r"^all requests: \d+ % done", progress, re.M)
    assert told["hardware"]["name"] == f"{MACHINE}-identified"
    assert {one["context"] for one in told["curve"]} == {2048, 8192, 32768}
    assert any("cpu" in line or "rows" in line for line in told["identified"])
    assert "/moesim." not in json.dumps(told), "a folder that is gone"
    assert load_hardware(out / "identified.yaml").numbers["devices.cpu0.memory_bytes_per_s"].interval is not None
    assert load_config(out / "best.yaml", []).hardware["base"] == str(out / "identified.yaml")
    assert (out / "curve.csv").read_text().count("\n") == len(told["curve"]) + 1
    assert json.loads((out / "recommendation.json").read_text()) == told
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG") and (out / "curve.pdf").read_bytes().startswith(b"%PDF")
    assert "](curve.png)" in (out / "recommendation.md").read_text()
    page = (out / "recommendation.md").read_text()
    parts = ["on rtx2070s-i5-12400f-identified with", "## llama.cpp, whose speeds were observed", "Best of --n-cpu-moe"]
    parts += ["](curve.png)", "## Placements for any engine", "## You can run this now", "Engines that can place experts so: "]
    assert [page.index(part) for part in parts] == sorted(page.index(part) for part in parts)
    least = min(one["n_cpu_moe"] for one in told["curve"] if one["fits"] and (one["context"], one["ubatch"]) == (2048, 512))
    typed = [int(n) for n in re.findall(r"--n-cpu-moe (\d+)", json.dumps(told))]
    assert typed and all(n >= least for n in typed), "what is to be typed fits"
