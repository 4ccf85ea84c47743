"""Public measurements: the tables, the predictions, sweeps of llama.cpp's options, what is counted, and what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import moesim
from moesim.core.files import FILE
from moesim.core.table import Format
from moesim.errors import ConfigError, MoesimError
from moesim.hardware import load_hardware
from moesim.hardware.costs.operations import operations
from moesim.model import load_model
from moesim.plots.validation import public
from moesim.studies.validation.public import (
    FACTOR,
    Check,
    Sweep,
    checks_file,
    group_table,
    groups,
    predict,
    predict_sweep,
    read_checks,
    read_sweeps,
    run_public,
    summarise,
    summarise_sweeps,
    sweeps_file,
)

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
        writer = csv.DictWriter(file, [one.name for one in fields(Check)])
        writer.writeheader()
        writer.writerow(row | changes)
    return path


def test_only_the_runs_that_their_profile_comes_from_are_calibration():
    assert [check.check for check in SHIPPED if check.status == "calibration"] == ["1c", "3"]
    told = Path(load_hardware(BY_NAME["3"].profile).path).read_text()
    assert "must not be checked on that run (row 3" in told
    for check in RUN:
        numbers = load_hardware(check.hardware).numbers
        # How much memory the machine has says nothing of its speed.
        own = [key for key, number in numbers.items() if check.source in number.ref and not key.endswith(".memory_bytes")]
        if check.check in ("1a", "1b"):  # the prefill next to them gives how fast cores unpack, which is no limit of theirs
            own = [key for key in own if "(prefill on a 7950X" not in numbers[key].ref and not key.endswith("crossover_rows")]
        own = [key for key in own if not key.endswith(".token_us")]  # the host's part, of another machine of the same author
        assert bool(own) == (check.status == "calibration"), (check.check, own)


def test_two_sockets_are_one_and_a_half_at_most():
    one, two = (load_hardware(BY_NAME[name].hardware).devices["cpu0"] for name in ("15a", "15b"))
    assert one.memory_bytes_per_s < two.memory_bytes_per_s < 1.5 * one.memory_bytes_per_s
    assert one.expert_cost and two.expert_cost
    for first, second in ((one, two), (one.expert_cost, two.expert_cost)):
        for key in ("flops", "few_row_flops", "many_row_flops"):
            assert getattr(second, key, 0) == pytest.approx(1.5 * getattr(first, key, 0), rel=0.001)
    together = "devices.cpu0.expert_cost.crossover_rows"
    assert {**BY_NAME["15b"].hardware, together: BY_NAME["15c"].hardware[together]} == BY_NAME["15d"].hardware


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
    assert set(result.frame["label"]) == {"assumed"}  # how long the thread pool takes to wake


def test_the_calibration_run_of_a_token_meets_what_it_was_taken_from(tmp_path: Path):
    found = predict(replace(BY_NAME["3"], prompt=1), tmp_path)  # the shares are of the whole run
    # 2.94 ms of switches of 18.02 ms, and 13.16 ms of experts (the split); what the GPU takes is predicted.
    assert found["share_activation"] * 1000 / found["predicted"] == pytest.approx(2.94, rel=0.1)
    assert found["predicted"] == pytest.approx(BY_NAME["3"].value, rel=0.1)


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


def test_a_folder_with_other_files_is_refused_before_anything_runs(tmp_path: Path):
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="got a folder with other files"):
        run_public(tmp_path, progress=False)


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


SWEEPS = read_sweeps(sweeps_file())
SWEEPS_RUN = [sweep for sweep in SWEEPS if sweep.status == "predicted"]


def write_sweeps(path: Path, *changes: dict[str, str]) -> Path:
    """A table with a row for each of some changes."""
    row = {
        "check": "x", "machine": "box", "rate": "measured", "thin": "no", "model": "M", "weights": "16 bit", "engine": "e",
        "setting": "-ncmoe 4 of 48", "context": "tg128", "kind": "tg", "measured": "10", "status": "predicted", "place": "mixed",
        "layers_on_cpu": "4", "layers": "48", "spec": "{base: qwen3-30b-a3b, expert_bits: 4}", "hardware": "a10-xeon8358",
        "routing": "qwen3-30b-a3b", "policy": "{name: llama-cpp, n_cpu_moe: 4}", "depth": "4", "ubatch": "0", "source": "someone",
        "how": "bytes",
    }  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [one.name for one in fields(Sweep)])
        writer.writeheader()
        for change in changes:
            writer.writerow(row | change)
    return path


def test_no_speed_of_a_machine_is_in_its_profile() -> None:
    """A number whose reference is the row's own source is a rate, a copy or a size, never a speed of decoding."""
    for sweep in SWEEPS_RUN:
        numbers = load_hardware(sweep.hardware).numbers
        for key, number in numbers.items():
            if "(prefill on a 7950X" in number.ref:  # how fast cores unpack, from another machine
                assert key.endswith("flops") and ".cpu0." in key and "7950x" not in sweep.machine
                continue
            assert not any(word in number.ref for word in ("tokens/s", "t/s", f"{sweep.measured:.2f}")), (sweep.check, key)


def sweep(**changes: Any) -> Sweep:
    """A setting of the A10."""
    return SWEEPS[10].__class__(**(vars(SWEEPS[10]) | changes))


def test_a_layer_on_the_cpu_costs_what_its_parts_say(tmp_path: Path) -> None:
    """Each further layer on the CPU takes the same time more: a line, as the sources measure."""
    policy = {"name": "llama-cpp", "op_offload": False}
    times = [1e3 / predict_sweep(sweep(policy={**policy, "n_cpu_moe": n}), tmp_path)["predicted"] for n in (12, 24, 36)]
    assert times[1] - times[0] == pytest.approx(times[2] - times[1], rel=1e-3)
    model = load_model(SWEEPS[10].spec)
    cpu, gpu = (load_hardware("a10-xeon8358").devices[name].memory_bytes_per_s for name in ("cpu0", "gpu0"))
    read, saved = (model.top_k * model.expert_bytes() / rate for rate in (cpu, gpu))
    assert (times[1] - times[0]) / 12 > 1e3 * (read - saved)  # more than its reading less the GPU's


def test_a_setting_that_exceeds_the_memory_is_refused_and_has_no_speed(tmp_path: Path) -> None:
    small = {"base": "a10-xeon8358", "devices.gpu0.memory_bytes": "12 GiB"}
    assert predict_sweep(sweep(status="cliff", hardware=small), tmp_path) == {"refused": True}
    assert predict_sweep(sweep(status="cliff"), tmp_path) == {"refused": False}
    with pytest.raises(MoesimError):
        predict_sweep(sweep(hardware=small), tmp_path)


def test_a_long_context_costs_what_it_costs_with_its_whole_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the last rows of a prompt are made, yet decoding reads the keys and values of all."""
    found = []
    for rows, depth in ((8, 600), (600, 600), (600, 8)):
        monkeypatch.setattr("moesim.studies.validation.public._LAST_ROWS", rows)
        (tmp_path / str(rows)).mkdir(exist_ok=True)
        found.append(predict_sweep(sweep(depth=depth), tmp_path / str(rows))["predicted"])
    assert found[0] == found[1] < found[2]


def sweep_frame(errors: list[float], **columns: list[Any]) -> pd.DataFrame:
    n = len(errors)
    base = {
        "check": [str(i) for i in range(n)], "machine": ["box"] * n, "rate": ["measured"] * n, "thin": [False] * n,
        "curve": ["M 4 bit"] * n, "setting": ["-ncmoe"] * n, "place": ["mixed"] * n, "status": ["predicted"] * n,
        "refused": [None] * n, "ubatch": [0] * n, "layers_on_cpu": list(range(n)), "layers": [n] * n, "label": ["derived"] * n,
    }  # fmt: skip
    found = pd.DataFrame({**base, "error": errors, **columns})
    found["measured"], found["predicted"] = 10.0, 10 * (1 + found["error"])
    return found


def test_a_prompt_is_predicted_in_steps_of_its_rows(tmp_path: Path) -> None:
    """Copies of a layer's experts are paid once a step: fewer, larger steps are faster, and the CPU alone is slower."""
    on_cpu = {"name": "llama-cpp", "n_cpu_moe": 48}
    speeds = [
        predict_sweep(sweep(policy={**on_cpu, **more}, depth=256, ubatch=rows), tmp_path)
        for rows, more in ((64, {}), (128, {}), (256, {}), (256, {"op_offload": False}))
    ]
    small, middle, large, cpu = (one["predicted"] for one in speeds)
    assert small < middle < large and cpu < large
    decode = predict_sweep(sweep(policy=on_cpu), tmp_path)
    wide, narrow = (one["high"] / one["low"] for one in (speeds[2], decode))
    assert wide > narrow  # less is known of prompts


def test_errors_are_summed_up_by_group() -> None:
    found = sweep_frame(
        [0.1, -0.3, 0.5, 9.0], rate=["measured", "measured", "other", "measured"],
        status=["predicted", "predicted", "predicted", "cliff"], refused=[None, None, None, True],
    )  # fmt: skip
    told = groups(found).set_index("group")
    assert told.loc["machines with a measured memory rate", "rows"] == 2
    assert told.loc["machines with a measured memory rate", "median"] == pytest.approx(0.2)
    assert told.loc["machines with a measured memory rate", "within"] == 0.5
    assert told.loc["machines without", "worst"] == 0.5
    text = summarise_sweeps(found)
    assert "median absolute error 20.0 %, nine of ten within 28 %, 50 % within 25 %" in text
    assert "exceed the GPU's memory: 1, of which the simulator refuses 1" in text
    assert "| machines without | 1 | 50.0 % |" in group_table(found, Format.MD)


def test_a_result_has_the_sweeps_of_the_machines_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run_public(out, rows=["epyc9374f-half", "6"], progress=False, plot=False)
    assert list(result.frame["check"]) == ["6"] and list(result.sweeps["machine"]) == ["epyc9374f-half"]
    assert abs(result.sweeps["error"].iloc[0]) < 0.1
    assert pd.read_csv(out / "public_sweeps.csv")["ratio"].iloc[0] == pytest.approx(result.sweeps["ratio"].iloc[0])
    assert "epyc9374f-half" in (out / "public.md").read_text()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"measured": "-3"}, "measured: expected tokens/s above 0, got '-3'"),
        ({"measured": "fast"}, "measured: expected tokens/s above 0, got 'fast'"),
        ({"status": "predict"}, "status: unknown status 'predict'; did you mean 'predicted'?"),
        ({"rate": "guess"}, "rate: unknown rate 'guess'"),
        ({"place": "disk"}, "place: unknown place 'disk'"),
        ({"layers_on_cpu": "49"}, "layers_on_cpu: expected at most the model's layers, got 49 of 48"),
        ({"depth": "x"}, "depth: expected a whole number, got 'x'"),
        ({"policy": ""}, "policy: expected a value, got nothing"),
        ({"status": "not predicted"}, "place: expected nothing where nothing is predicted, got 'mixed'"),
        ({"spec": "{base"}, "spec: "),
    ],
)
def test_a_wrong_line_of_sweeps_is_named(changes: dict[str, str], expected: str, tmp_path: Path) -> None:
    path = write_sweeps(tmp_path / "sweeps.csv", changes)
    with pytest.raises(ConfigError) as caught:
        read_sweeps(path)
    assert str(caught.value).startswith(f"{path}:2: ") and expected in str(caught.value) and "\n" not in str(caught.value)


PUBLISHED = Path(__file__).parents[2] / "experiments" / "validation" / "public_sweeps.csv"


def seconds(setting: str) -> float:
    """Return the published time of a prompt's token in one setting of this machine."""
    with PUBLISHED.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["machine"] == "rx6700xt-ryzen5800x" and row["context"] == "pp512"]
    (found,) = [1 / float(row["measured"]) for row in rows if row["setting"] == setting]
    return found


@pytest.mark.long
@pytest.mark.parametrize(("n_gpu_layers", "on_cpu", "below", "above"), [(8, 41, 40, 48), (16, 33, 32, 40), (20, 29, 24, 32)])
def test_attention_of_cpu_layers_costs_prompts_a_few_percent(n_gpu_layers: int, on_cpu: int, below: int, above: int) -> None:
    """Against as many layers whose experts alone are there, between two that were measured. On the CPU it would cost 80 %."""
    ends = [seconds(f"-ngl 99 -ncmoe {n} of 48") for n in (below, above)]
    without = ends[0] + (ends[1] - ends[0]) * (on_cpu - below) / (above - below)
    published = without / seconds(f"-ngl {n_gpu_layers}")
    results = moesim.run(
        {
            "model": {"base": "qwen3-30b-a3b", "expert_bits": 4.85, "other_bits": 5.35},
            "hardware": "rx6700xt-ryzen5800x",
            "trace": {"synthesize": "qwen3-30b-a3b", "requests": 2, "prompt": 512, "decode": 1},
            "workload": {"prompt_tokens": 512, "decode_tokens": 1},
            "cache": {"ratio": 1},
            "policies": [{"name": "llama-cpp", "n_gpu_layers": n_gpu_layers}, {"name": "llama-cpp", "n_cpu_moe": on_cpu}],
        },
        progress=False,
    )
    whole, experts = results.table["prefill_tokens_per_s"]
    assert 0.94 < published < 0.96
    assert whole / experts == pytest.approx(published, abs=0.03)
