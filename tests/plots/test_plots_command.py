"""``moesim plot`` and ``plots:`` on a real small sweep: every kind, its files, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from matplotlib.text import Text

from moesim.cli.plot import plot, split_names
from moesim.core.files import FILE
from moesim.errors import ConfigError
from moesim.experiment import Results, run_experiment
from moesim.experiment.folder import draw, read_plots
from moesim.metrics.frames import frame_bytes, layer_frame, step_frame
from moesim.plots import decode_speed, drawing, save
from moesim.plots.catalogue import KINDS, SOURCES, figures_of, options_of
from moesim.plots.drawing import read_frames
from moesim.plots.style import COLUMN, SMALL, TEXT, Kind, Look, drawn_for, drawn_wide, looks_of, parse_width
from tests.experiment.experiment_kit import resolve

ROOT = Path(__file__).resolve().parents[2]
VALIDATION = ROOT / "hardware_profiles" / "zen4-2core" / "validation"
DAOP = "daop-paper"
POLICIES = ["lru", "fiddler", DAOP, "belady", {"name": "dali", "w_size": [1, 2], "u_size": [1, 2]}]
SERVED = ("latency_by_load", "goodput")  # of served workloads, which have tests of their own
MINE = [name for name, kind in KINDS.items() if kind.source == "rows" and name not in SERVED]


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Eight policies at two batch sizes, two caches and two seeds."""
    folder = tmp_path_factory.mktemp("sweep")
    workload = {"prompt_tokens": 3, "decode_tokens": 2, "batch_size": [1, 2]}
    sweep = resolve(folder, policies=POLICIES, workload=workload, cache={"ratio": [0.25, 0.5]}, repeat=2)
    return run_experiment(sweep, jobs=1, keep=lambda index: index < 8)


@pytest.fixture(scope="session")
def folder(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A result folder, as far as figures read it; 100 J a token, whatever the profile says."""
    made = tmp_path_factory.mktemp("result")
    rows = [row | {"energy_j_per_token": 100.0, "energy_label": "assumed"} for row in results.rows]
    (made / "runs.parquet").write_bytes(frame_bytes(rows))
    kept = [outcome for outcome in results.outcomes if outcome.records is not None]
    (made / "frames").mkdir()
    (made / "frames" / "steps.parquet").write_bytes(frame_bytes([row for outcome in kept for row in step_frame(outcome)]))
    (made / "frames" / "layers.parquet").write_bytes(frame_bytes([row for outcome in kept for row in layer_frame(outcome)]))
    return made


@pytest.fixture
def run() -> Callable[..., Any]:
    app = typer.Typer()
    app.command()(plot)
    return lambda *arguments: app(args=[str(a) for a in arguments], standalone_mode=False)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {FILE}


# ---------------------------------------------------------------------------------------------------------------- every figure
def test_the_catalogue_is_whole():
    assert {"decode_speed", "prefill_speed", "speedup", "hit_rate", "breakdown", "ladder", "heatmap", "energy", "vram",
            "best_setting", "tornado",
            "regret", "validation", "hit_rate_by_token", "balance_cdf", "gantt", "signal_accuracy", "signal_accuracy_by_layer",
            "speedup_lines", "throughput", "speed_by_context", "reuse_map", "coactivation", "latency_cdf", "time_by_layer",
            "popularity_drift", "printed", "crossover", "lookahead", "coactivation_ranks", "latency_by_load", "goodput",
            "request_gantt", "slots_over_time", "capacity"} == set(KINDS)  # fmt: skip
    for name, kind in KINDS.items():
        assert isinstance(kind, Kind)
        assert kind.source in SOURCES
        assert re.fullmatch(r"[^.\n]+", kind.title), name


# Every second each time; the others with `make test-long`.
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] if n % 2 else []) for n, name in enumerate(MINE)])
@pytest.mark.parametrize(("medium", "width"), [pytest.param("screen", None, marks=pytest.mark.long), ("paper", "column")])
def test_figures_of_a_real_sweep(name: str, medium: Any, width: str | None, folder: Path):
    """Nothing is too small, nothing is cut off, and on paper there is no provenance but the mark of what is not exact."""
    frame = pd.read_parquet(folder / "runs.parquet")
    kind = KINDS[name]
    file, part = next(figures_of(name, frame, {}))
    with drawn_for(medium), drawn_wide(parse_width(width, "width") if width else None):
        data, figure, caption = kind.drawing(part)
    assert file.startswith(name)
    assert figure.get_figwidth() in ((COLUMN,) if width else (COLUMN, TEXT))
    figure.draw_without_rendering()
    shown = [text for text in figure.findobj(Text) if text.get_text() and text.get_visible()]
    assert min(text.get_fontsize() for text in shown) >= SMALL
    box, whole = figure.get_tightbbox(), figure.bbox_inches
    assert (box.x0 > -0.02, box.y0 > -0.02, box.x1 < whole.x1 + 0.02, box.y1 < whole.y1 + 0.02) == (True,) * 4
    said = " ".join(text.get_text().replace("\n", " ") for text in shown)
    assert ("weakest source" in said) == (medium == "screen")
    assert "weakest source" in caption
    if "daop-paper" in said:
        assert "daop-paper*" in said
        assert re.search(r"gate weight computed as routed: daop-paper \d[\d.]*( to \d[\d.]*)? %", said)
        assert "%*" not in said
        assert "as routed: daop-paper" in caption
    assert not data.empty


def test_the_same_figure_has_the_same_bytes_and_embeds_its_fonts(folder: Path, run: Callable[..., Any], tmp_path: Path):
    for out in ("a", "b"):
        run("decode_speed", "vram", folder, "--out", tmp_path / out, "--for", "paper", "--policies", "fiddler,lru")
    drawn = ("decode_speed", "vram.batch_size=1", "vram.batch_size=2")
    assert names(tmp_path / "a") == {f"{name}.{suffix}" for name in drawn for suffix in ("png", "pdf", "csv", "txt")}
    for name in names(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    pdf = (tmp_path / "a" / "decode_speed.pdf").read_bytes()
    assert b"/FontFile2" in pdf
    assert b"/Type3" not in pdf
    data = pd.read_csv(tmp_path / "a" / "decode_speed.csv")
    assert data["policy"].tolist()[:2] == ["fiddler", "lru"]  # in the order asked for
    assert data["n"].tolist() == [2] * 8


@pytest.mark.long
def test_a_figure_can_be_saved_twice(folder: Path, tmp_path: Path):
    figure = decode_speed(pd.read_parquet(folder / "runs.parquet"))
    first, second = (save(figure, tmp_path / name) for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.long
def test_a_validation_folder(run: Callable[..., Any], tmp_path: Path):
    run("validation", VALIDATION, "--out", tmp_path)
    data = pd.read_csv(tmp_path / "validation.csv")
    assert len(data) == len(pd.read_csv(VALIDATION / "results.csv"))
    assert "median absolute error" in (tmp_path / "validation.txt").read_text().lower()


def test_a_trace(run: Callable[..., Any], folder: Path, tmp_path: Path):
    run("reuse_map", "mini-mixtral", "--out", tmp_path, "--option", "lags=4")
    assert "reuse_map.pdf" in names(tmp_path)


# ------------------------------------------------------------------------------------------------------------------- the command
def test_several_folders_are_one_frame_without_what_is_there_twice(folder: Path, results: Results, tmp_path: Path):
    rows = [row | {"decode_tokens_per_s": 1.0, "prompt_tokens": 7, "key": f"other-{row['run']}"} for row in results.rows[:3]]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "runs.parquet").write_bytes(frame_bytes([*results.rows[:5], *rows]))
    frame = read_frames("rows", [folder, tmp_path / "more", folder], "x")
    assert len(frame) == len(results.rows) + 3
    assert frame["run"].is_unique
    assert frame["decode_tokens_per_s"].dtype == float


@pytest.mark.long
def test_rows_are_chosen_by_value_and_options_reach_the_figure(folder: Path, run: Callable[..., Any], tmp_path: Path):
    run("speedup", folder, "--out", tmp_path, "--where", "batch_size=2", "--where", "cache_ratio=0.5", "--baseline", "fiddler",
        "--policies", "lru,fiddler,dali(w_size=1,u_size=2)", "--metric", "ttft_mean_ns")  # fmt: skip
    frame = pd.read_parquet(folder / "runs.parquet").query("batch_size == 2 and cache_ratio == 0.5").set_index(["policy", "seed"])
    ratios = frame.loc["fiddler"]["ttft_mean_ns"] / frame.loc["lru"]["ttft_mean_ns"]
    data = pd.read_csv(tmp_path / "speedup.csv").set_index("policy")
    assert set(data.index) == {"lru", "dali(w_size=1,u_size=2)"}
    assert data.loc["lru"]["speedup"] == pytest.approx((ratios[0] * ratios[1]) ** 0.5)


@pytest.mark.long
def test_what_a_heat_map_shows_does_not_depend_on_the_order_of_its_axes(folder: Path, run: Callable[..., Any], tmp_path: Path):
    for out, x, y in (("a", "w_size", "u_size"), ("b", "u_size", "w_size")):
        run("heatmap", folder, "--out", tmp_path / out, "--x", x, "--y", y, "--where", "policy_name=dali")
    assert len(names(tmp_path / "a")) == 4 * 4  # a figure for each batch size and cache
    one, other = (pd.read_csv(next((tmp_path / out).glob("*.csv"))) for out in "ab")
    assert sorted(one["decode_tokens_per_s"]) == sorted(other["decode_tokens_per_s"])
    assert len(one) == 4


def test_the_list_names_every_kind_and_what_it_needs(run: Callable[..., Any], capsys: pytest.CaptureFixture[str]):
    run("list")
    first = capsys.readouterr().out
    run("--list")
    assert capsys.readouterr().out == first
    lines = first.splitlines()
    assert [line.split()[0] for line in lines[1:]] == list(KINDS)
    assert "frames: true" in next(line for line in lines if line.startswith("balance_cdf"))
    assert "--baseline --metric" in next(line for line in lines if line.startswith("speedup"))
    assert set(options_of(KINDS["heatmap"])) == {"x", "y", "metric"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", "expected a kind of figure, got nothing; `moesim plot list` says"),
        ("decode_sped RESULT", "unknown kind of figure 'decode_sped'; did you mean 'decode_speed'"),
        ("decode_speed", "expected a folder of `moesim run --out`, got nothing"),
        (
            "decode_speed nowhere",
            "nowhere: plot decode_speed: expected a folder with runs.parquet, got nothing there; name a",
        ),
        ("tornado RESULT", "expected a folder with whatif.parquet, got no such file in it; name a folder of `moesim whatif"),
        ("regret RESULT", "expected a folder with regret.csv, got no such file in it; name a folder of `moesim regret"),
        ("decode_speed RESULT --baseline lru", "expected no option baseline, which changes nothing in it; its options: x"),
        ("hit_rate vram RESULT --baseline lru", "hit_rate: expected no option baseline"),
        ("vram RESULT --option layers=2", "vram: expected no option layers, which changes nothing in it; its options: panel"),
        ("reuse_map mini-mixtral --option phase", "--option: expected KEY=VALUE, got 'phase'"),
        ("reuse_map mini-mixtral --where a=b", "expected no --policies and no --where"),
        ("decode_speed RESULT --policies lru,dalli", "--policies: unknown policy of these results 'dalli'"),
        ("decode_speed RESULT --where batch_size=9", "--where: expected batch_size to be one of 1, 2, got '9'"),
        ("decode_speed RESULT --where batch=9", "--where: expected batch_size to be one of 1, 2, got '9'"),
        ("decode_speed RESULT --where cache=9", "--where: expected cache_ratio to be one of"),
        ("decode_speed RESULT --where bach_size=9", "unknown column 'bach_size'; did you mean 'batch_size'? known: answer"),
        ("speedup_lines RESULT --baseline none", "plot speedup_lines: --baseline: unknown policy of these results 'none'"),
        ("speedup_lines RESULT --policies lru", "plot speedup_lines: expected another policy at a setting of lru, got none"),
        ("decode_speed RESULT --x bach_size", "unknown setting 'bach_size'; did you mean 'batch_size'"),
        ("ladder RESULT --metric nothing", "expected the columns nothing in the results"),
        ("ladder RESULT --metric policy", "expected a run with a value of policy, got none"),
        ("decode_speed RESULT --for web", "--for: unknown medium 'web'"),
        ("breakdown RESULT --metric decode", "plot breakdown: unknown metric 'decode'"),
        ("decode_speed RESULT --width wide", "--width: expected column, page, slide, or 2.5 to 20 inches, got 'wide'"),
        ("decode_speed RESULT --width 25", "--width: expected column, page, slide, or 2.5 to 20 inches, got '25'"),
    ],
)
def test_what_is_refused_and_why(words: str, expected: str, folder: Path, run: Callable[..., Any], tmp_path: Path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError) as failure:
        run(*[str(folder) if word == "RESULT" else word for word in words.split()], "--out", out)
    assert expected in (failure.value.of_command or str(failure.value))
    assert "\n" not in str(failure.value)
    assert not out.exists()


@pytest.mark.long
def test_an_option_goes_to_the_kinds_that_take_it(folder: Path, run: Callable[..., Any], tmp_path: Path):
    run("speedup", "vram", folder, "--baseline", "fiddler", "--out", tmp_path / "both")
    run("speedup", folder, "--baseline", "fiddler", "--out", tmp_path / "one")
    assert {"speedup.csv", "vram.batch_size=1.csv"} <= names(tmp_path / "both")
    assert (tmp_path / "both" / "speedup.csv").read_bytes() == (tmp_path / "one" / "speedup.csv").read_bytes()


def test_a_policy_keeps_its_colour_when_others_are_left_out(
    folder: Path, run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):  # fmt: skip
    """Also in a figure of steps, of which policies that failed have none."""
    seen: list[Look] = []
    monkeypatch.setattr(drawing, "files_of", lambda *_: seen.append(looks_of(["belady", DAOP])[DAOP]) or {"a": b""})
    run("decode_speed", "latency_cdf", folder, "--policies", DAOP, "--out", tmp_path / "out")
    steps = tmp_path / "steps"
    (steps / "frames").mkdir(parents=True)
    whole = pd.read_parquet(folder / "frames" / "steps.parquet")
    whole[whole["policy"] != "lru"].to_parquet(steps / "frames" / "steps.parquet")
    (steps / "runs.parquet").write_bytes((folder / "runs.parquet").read_bytes())
    run("latency_cdf", steps, "--out", tmp_path / "more")
    assert len(seen) > 2 and len(set(seen)) == 1


def test_figures_are_as_wide_as_they_are_asked_to_be(folder: Path, run: Callable[..., Any], tmp_path: Path):
    run("vram", folder, "--width", "4.5", "--out", tmp_path, "--where", "batch_size=1")
    assert int.from_bytes((tmp_path / "vram.png").read_bytes()[16:20]) == 4.5 * 240  # pixels
    widths = [parse_width(name, "x") for name in ("column", "page", "slide", 4)]
    assert widths == [3.35, 7, pytest.approx(13.33 / 2, abs=0.002), 4]


def test_frames_that_were_not_kept_are_asked_for(folder: Path, run: Callable[..., Any], tmp_path: Path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "runs.parquet").write_bytes((folder / "runs.parquet").read_bytes())
    with pytest.raises(ConfigError, match=r"a folder with frames/layers.parquet, got no such file in it; .* with `frames: true`"):
        run("balance_cdf", bare, "--out", tmp_path / "out")
    (bare / "runs.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ConfigError, match=r"runs.parquet: plot vram: expected a table that can be read, got: "):
        run("vram", bare, "--out", tmp_path / "out")
    with pytest.raises(ConfigError, match="expected --out FOLDER, got nothing"):
        run("vram", folder)


# ------------------------------------------------------------------------------------------------------------------ experiments
@pytest.mark.long
def test_experiments_draw_what_they_ask_for_and_say_what_they_cannot(results: Results, tmp_path: Path):
    first = {str(outcome.row["policy"]): outcome for outcome in results.outcomes[:2]}
    powerless = [replace(outcome, row=outcome.row | {"energy_j_per_token": None}) for outcome in results.outcomes]
    lost = first | {"lfu": replace(next(iter(first.values())), records=None)}
    files, left_out = draw(read_plots(["decode_speed", "energy", "gantt", "balance_cdf"], "x"), powerless, lost)
    assert {"decode_speed.txt", "decode_speed.csv", "decode_speed.png", "gantt.pdf", "balance_cdf.png"} <= set(files)
    assert [line.partition(" is left out: ")[0] for line in left_out] == ["plots: energy"]
    assert draw([], results.outcomes, first) == ({}, [])
    assert b"did not run here: lfu" in files["gantt.txt"]


def test_names_of_plots_are_checked_before_anything_runs():
    read_plots(["decode_speed", "hit_rate", "breakdown", "gantt", "balance_cdf"], "a.yaml")
    assert split_names("lru,{a,b}, x(y=[1,2],z=3),") == ["lru", "{a,b}", "x(y=[1,2],z=3)"]
    with pytest.raises(ConfigError, match=r"a.yaml: plots\[1\]: unknown plot 'hit_rat'; did you mean 'hit_rate'"):
        read_plots(["gantt", "hit_rat"], "a.yaml")
    with pytest.raises(ConfigError, match=r"plots\[0\]: expected a figure of runs, got 'regret'; `moesim plot regret` draws a"):
        read_plots(["regret"], "a.yaml")
    with pytest.raises(ConfigError, match=r"plots\[0\]: expected frames for 'balance_cdf', got none; set `frames: true`"):
        read_plots(["balance_cdf"], "a.yaml", frames=False)


def test_policies_get_the_names_that_figures_show(folder: Path, tmp_path: Path, run: Callable[..., Any]):
    run("decode_speed", folder, "--out", tmp_path / "a", "--label", "lru=Baseline", "--policies", "lru,fiddler")
    drawn = [pd.read_csv(one) for one in (tmp_path / "a").glob("*.csv")]
    assert drawn
    assert all(set(one["policy"]) == {"Baseline", "fiddler"} for one in drawn)
    with pytest.raises(ConfigError, match=r"label: unknown policy of these results 'lur'; did you mean 'lru'"):
        run("decode_speed", folder, "--out", tmp_path / "b", "--label", "lur=Ours")
    with pytest.raises(ConfigError, match="a name of its own for each policy"):
        run("decode_speed", folder, "--out", tmp_path / "c", "--label", "lru=fiddler")
