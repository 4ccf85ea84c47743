"""Public measurements: the table, the predictions, what is counted, and what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moesim.core.files import FILE
from moesim.core.table import Format
from moesim.errors import ConfigError, MoesimError
from moesim.hardware import load_hardware
from moesim.hardware.costs.operations import operations
from moesim.model import load_model
from moesim.plots.validation import public
from moesim.studies.validation.public import FACTOR, LOOSE, predict, run_public, summarise, table
from moesim.studies.validation.public_tables import COLUMNS, checks_file, read_checks

SHIPPED = read_checks(checks_file())
BY_NAME = {check.check: check for check in SHIPPED}
RUN = [check for check in SHIPPED if check.status != "not predicted"]


def write(path: Path, **changes: str) -> Path:
    """A table with one check, of which some fields are changed."""
    row = {
        "check": "x", "row": "1", "model": "M", "weights": "16 bit", "machine": "box", "setting": "all on the CPU",
        "measured": "10", "unit": "tokens/s", "mark": "M", "source": "someone", "status": "predicted", "spec": "mixtral-8x7b",
        "hardware": "xeon-e5-2683v4", "routing": "mixtral-8x7b", "policy": "all-cpu", "cache": "{ratio: 1.0}", "prompt": "4",
        "decode": "4", "metric": "decode_tokens_per_s", "how": "bytes",
    }  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerow(row | changes)
    return path


def test_every_row_of_the_source_is_there():
    known = "1 3 5 6 7 8 9 12 13 14 15 17 18 19 20 21"
    assert {check.row for check in SHIPPED} == set(known.split())
    assert {check.row for check in RUN} == {"1", "3", "5", "6", "7", "8", "9", "12", "13", "15", "19", "20", "21"}
    assert all(check.how for check in SHIPPED)
    assert {check.row for check in SHIPPED} >= LOOSE


def test_only_the_runs_that_their_profile_comes_from_are_calibration():
    assert [check.check for check in SHIPPED if check.status == "calibration"] == ["1c", "3"]
    told = Path(load_hardware(BY_NAME["3"].profile).path).read_text()
    assert "must not be checked on that run (row 3" in told
    for check in RUN:
        numbers = load_hardware(check.hardware).numbers
        # How much memory the machine has says nothing of its speed.
        own = [key for key, number in numbers.items() if check.source in number.ref and not key.endswith(".memory_bytes")]
        if check.check in ("1a", "1b"):  # the prefill beside them gives how fast cores unpack, which is no limit of theirs
            own = [key for key in own if "(prefill on a 7950X" not in numbers[key].ref and not key.endswith("crossover_rows")]
        assert bool(own) == (check.status == "calibration"), (check.check, own)


@pytest.mark.parametrize("check", RUN, ids=lambda check: check.check)
def test_profiles_and_models_can_be_read(check: Any):
    assert load_hardware(check.hardware).numbers
    assert load_model(check.spec).n_experts > 1


def test_two_sockets_are_twice_one():
    one, two = (load_hardware(BY_NAME[name].hardware).devices["cpu0"] for name in ("15a", "15b"))
    assert (two.memory_bytes_per_s, two.flops) == (2 * one.memory_bytes_per_s, 2 * one.flops)
    assert one.expert_cost and two.expert_cost
    for key in ("few_row_flops", "many_row_flops"):
        assert getattr(two.expert_cost, key) == 2 * getattr(one.expert_cost, key)
    together = "devices.cpu0.expert_cost.crossover_rows"
    assert {**BY_NAME["15b"].hardware, together: BY_NAME["15c"].hardware[together]} == BY_NAME["15d"].hardware


@pytest.mark.parametrize("name", ["12", "15a"])
def test_waiting_that_is_not_known_is_an_assumption(name: str):
    numbers = load_hardware(BY_NAME[name].hardware).numbers
    waits = [numbers[f"devices.cpu0.{key}"] for key in ("launch_us", "first_extra_us")]
    assert [(number.value, number.source) for number in waits] == [(0, "assumed")] * 2


def test_deepseek_v3_has_the_published_size():
    assert load_model(BY_NAME["15a"].spec).total_params == pytest.approx(671.03e9, rel=1e-4)


def test_decode_on_a_cpu_is_bytes_over_the_memory_rate_and_waiting(tmp_path: Path):
    check = BY_NAME["6"]
    model, profile = load_model(check.spec), load_hardware(check.hardware)
    found = predict(check, tmp_path)
    read = model.non_expert_bytes - model.embedding_bytes + model.n_layers * model.top_k * model.expert_bytes()
    cpu = profile.devices["cpu0"]
    counted = operations("llama.cpp", "cpu", model)
    each_layer = counted["attention"] + counted["dense"] + counted["experts"]
    waiting = float(cpu.operation_us) * (model.n_layers * each_layer + counted["embedding"] + counted["head"]) / 1e6
    seconds = read / cpu.memory_bytes_per_s + waiting
    # Keys and values of a few tokens, and the embedding of one, are all that is left.
    assert found["predicted"] == pytest.approx(1 / seconds, rel=2e-3)
    assert found["predicted"] < 1 / seconds
    assert found["share_cpu_experts"] > 0.8


def test_rows_of_big_experts_are_within_ten_per_cent_and_a_ratio_is_predicted_over_measured():
    result = run_public(rows=["6", "7"], progress=False)
    assert list(result.frame["check"]) == ["6", "7a", "7b"]
    assert (result.frame["predicted"] / result.frame["measured"]).tolist() == pytest.approx(result.frame["ratio"].tolist())
    assert result.frame["error"].abs().max() < 0.10
    assert set(result.frame["label"]) == {"derived"}


def test_the_calibration_run_of_a_token_meets_what_it_was_taken_from(tmp_path: Path):
    found = predict(replace(BY_NAME["3"], prompt=1), tmp_path)  # the shares are of the whole run
    # 2.94 ms of switches of 18.02 ms, and 13.16 ms of experts (the split); what the GPU takes is predicted.
    assert found["share_activation"] * 1000 / found["predicted"] == pytest.approx(2.94, rel=0.1)
    assert found["predicted"] == pytest.approx(BY_NAME["3"].value, rel=0.1)


def test_the_same_inputs_give_the_same_prediction(tmp_path: Path):
    first, second = (predict(BY_NAME["6"], folder) for folder in (tmp_path, tmp_path))
    (tmp_path / "other").mkdir()
    assert first == second == predict(BY_NAME["6"], tmp_path / "other")


def frame(**columns: Any) -> pd.DataFrame:
    n = len(columns["ratio"])
    base = {key: ["?"] * n for key in ("model", "machine", "setting", "label")}
    filled = {"check": [str(i) for i in range(n)], "status": ["predicted"] * n, "loose": [False] * n, **base, **columns}
    found = pd.DataFrame(filled)
    found["error"] = found["ratio"] - 1
    return found


def test_the_summary_counts_predictions_only():
    found = frame(
        ratio=[1.05, 0.5, 1.25, 9.0, float("nan")],
        loose=[False, False, True, False, False],
        status=["predicted", "predicted", "predicted", "calibration", "not predicted"],
    )
    everything, described, rest = summarise(found).splitlines()
    assert everything.startswith("all predictions: 3, median absolute error 25 %, worst -50 % (1: ")
    assert f"within 10 %: 1, within a factor of {FACTOR:g}: 2" in everything
    assert ": 2, median absolute error 28 %, worst -50 %" in described
    assert rest == "not counted: 1 for calibration, 1 that say too little to be predicted"


def test_nothing_predicted_has_a_summary_too():
    assert "all predictions: none" in run_public(rows=["17"], progress=False).summary


def test_results_are_written_whole_and_replaced(tmp_path: Path):
    out = tmp_path / "public"
    for rows in (["6", "17"], ["6"]):
        result = run_public(out, rows=rows, progress=False)
        assert {path.name for path in out.iterdir()} == {
            "public.csv",
            "public.md",
            "public.pdf",
            "public.png",
            "summary.json",
            FILE,
        }
        assert json.loads((out / "summary.json").read_text())[0]["ratio"] == pytest.approx(result.frame["ratio"].iloc[0])
    text = (out / "public.md").read_text()
    assert result.summary in text
    assert "| 6 | Mixtral 8x7B |" in text and "| 17a |" not in text
    assert str(tmp_path) not in (out / "public.csv").read_text()


def test_the_table_says_why_there_is_no_prediction():
    found = run_public(rows=["18"], progress=False)
    text = table(found.frame, Format.MD)
    assert "| 14.9 | - | - |  | layers and widths of the model not known here" in text
    assert [row["predicted"] for row in json.loads(table(found.frame, Format.JSON))] == [None, None]


def test_a_folder_with_other_files_is_refused_before_anything_runs(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="got a folder with other files"):
        run_public(tmp_path, progress=False)


def test_an_unknown_row_is_named():
    with pytest.raises(ConfigError, match="unknown row '2'"):
        run_public(rows=["2"], progress=False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"measured": "fast"}, "measured: expected numbers above 0 with | between them, got 'fast'"),
        ({"measured": "1|-2"}, "measured: expected numbers above 0"),
        ({"status": "predict"}, "status: unknown status 'predict'; did you mean 'predicted'?"),
        ({"mark": "x"}, "mark: unknown mark 'x'"),
        ({"metric": "speed"}, "metric: unknown metric 'speed'"),
        ({"prompt": "0"}, "prompt: expected a whole number of at least 1, got '0'"),
        ({"how": ""}, "how: expected a value, got nothing"),
        ({"policy": ""}, "policy: expected a value, got nothing"),
        ({"status": "not predicted"}, "spec: expected nothing where nothing is predicted, got 'mixtral-8x7b'"),
        ({"cache": "{ratio"}, "cache: "),
    ],
)
def test_a_wrong_line_is_named(changes: dict[str, str], expected: str, tmp_path: Path):
    path = write(tmp_path / "checks.csv", **changes)
    with pytest.raises(ConfigError) as caught:
        run_public(path=path, progress=False)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hardware": "xeon-e5"}, "unknown hardware profile 'xeon-e5'; did you mean 'xeon-e5-2683v4'?"),
        ({"policy": "all-cpus"}, "did you mean 'all-cpu'?"),
        ({"routing": "mixtral"}, "check x: routing: unknown parameters file 'mixtral'"),
        ({"spec": "mixtral"}, "check x: spec: unknown model 'mixtral'"),
        ({"policy": "all-gpu"}, "check x"),
    ],
)
def test_what_cannot_run_names_the_check_and_writes_nothing(changes: dict[str, str], expected: str, tmp_path: Path):
    path = write(tmp_path / "checks.csv", **changes)
    with pytest.raises(MoesimError) as caught:
        run_public(tmp_path / "out", path=path, progress=False)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_names_are_unique_and_columns_complete(tmp_path: Path):
    path = write(tmp_path / "checks.csv")
    path.write_text(path.read_text() + path.read_text().splitlines()[1] + "\n")
    with pytest.raises(ConfigError, match="expected each name once, got 'x' 2 times"):
        read_checks(path)
    path.write_text("check,row\n")
    with pytest.raises(ConfigError, match="expected the columns check,row,model"):
        read_checks(path)
    with pytest.raises(ConfigError, match="No such file"):
        read_checks(tmp_path / "none.csv")


def test_the_figure_shows_each_check_and_both_bands():
    found = frame(ratio=[1.05, 2.0, 0.9], loose=[False, True, False], status=["predicted", "predicted", "calibration"])
    found["measured"] = [10.0, 100.0, 5.0]
    found["measured_low"], found["measured_high"] = [8.0, 100.0, 5.0], [12.0, 100.0, 5.0]
    found["predicted"], found["label"] = found["measured"] * found["ratio"], "derived"
    speeds, ratios = public(found).axes
    assert speeds.get_xscale() == speeds.get_yscale() == "log"
    assert [label.get_text() for label in ratios.get_yticklabels()] == ["0", "1", "2"]
    words = {text.get_text() for text in ratios.get_legend().get_texts()}
    assert words == {
        "well described",
        "thinly described",
        "calibration (not a prediction)",
        "within 10 %",
        "within a factor of 1.3",
    }
    with pytest.raises(ConfigError, match="at least one result"):
        public(found.assign(predicted=None))
