"""Sweeps of public machines: the table, the runs, what is summed up, and what is refused."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from moesim.core.table import Format
from moesim.errors import ConfigError, MoesimError
from moesim.hardware import load_hardware
from moesim.model import load_model
from moesim.plots.validation import sweeps
from moesim.studies.validation.public import group_table, groups, predict_sweep, run_public, summarise_sweeps
from moesim.studies.validation.public_tables import SWEEP_COLUMNS, Sweep, read_sweeps, sweeps_file

SHIPPED = read_sweeps(sweeps_file())
RUN = [sweep for sweep in SHIPPED if sweep.status == "predicted"]


def write(path: Path, *changes: dict[str, str]) -> Path:
    """A table with a row for each of some changes."""
    row = {
        "check": "x", "machine": "box", "rate": "measured", "thin": "no", "model": "M", "weights": "16 bit", "engine": "e",
        "setting": "-ncmoe 4 of 48", "context": "tg128", "kind": "tg", "measured": "10", "status": "predicted", "place": "mixed",
        "layers_on_cpu": "4", "layers": "48", "spec": "{base: qwen3-30b-a3b, expert_bits: 4}", "hardware": "a10-xeon8358",
        "routing": "qwen3-30b-a3b", "policy": "{name: llama-cpp, n_cpu_moe: 4}", "depth": "4", "source": "someone",
        "how": "bytes",
    }  # fmt: skip
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, SWEEP_COLUMNS)
        writer.writeheader()
        for change in changes:
            writer.writerow(row | change)
    return path


def test_every_row_of_the_source_is_there_with_a_prediction_or_a_reason() -> None:
    assert len(SHIPPED) == 199
    assert len(RUN) == 100 and all(sweep.how for sweep in SHIPPED)
    for sweep in RUN:
        assert 0 <= sweep.layers_on_cpu <= sweep.layers and sweep.kind == "tg"
        assert load_model(sweep.spec).n_layers + load_model(sweep.spec).n_dense_layers == sweep.layers, sweep.check


def test_no_speed_of_a_machine_is_in_its_profile() -> None:
    """A number whose reference is the row's own source is a rate, a copy or a size, never a speed of decoding."""
    for sweep in RUN:
        numbers = load_hardware(sweep.hardware).numbers
        for key, number in numbers.items():
            if "(prefill on a 7950X" in number.ref:  # how fast cores unpack, from another machine
                assert key.endswith("flops") and ".cpu0." in key and "7950x" not in sweep.machine
                continue
            assert not any(word in number.ref for word in ("tokens/s", "t/s", f"{sweep.measured:.2f}")), (sweep.check, key)


def test_machines_with_a_measured_rate_have_one_that_their_source_gives() -> None:
    for machine in {sweep.machine for sweep in RUN if sweep.rate == "measured"}:
        number = load_hardware(machine).numbers["devices.cpu0.memory_bytes_per_s"]
        assert number.source in ("published", "derived") and "taken over" not in number.ref, machine


def sweep(**changes: Any) -> Sweep:
    """A setting of the A10."""
    return SHIPPED[10].__class__(**(vars(SHIPPED[10]) | changes))


def test_a_layer_on_the_cpu_costs_what_its_parts_say(tmp_path: Path) -> None:
    """Each further layer on the CPU takes the same time more: a line, as the sources measure."""
    policy = {"name": "llama-cpp", "op_offload": False}
    times = [1e3 / predict_sweep(sweep(policy={**policy, "n_cpu_moe": n}), tmp_path)["predicted"] for n in (12, 24, 36)]
    assert times[1] - times[0] == pytest.approx(times[2] - times[1], rel=1e-3)
    model = load_model(SHIPPED[10].spec)
    read = model.top_k * model.expert_bytes() / load_hardware("a10-xeon8358").devices["cpu0"].memory_bytes_per_s
    assert (times[1] - times[0]) / 12 > 1e3 * read  # more than its reading, which the GPU's saved time does not outweigh


def test_a_setting_that_exceeds_the_memory_is_refused_and_has_no_speed(tmp_path: Path) -> None:
    small = {"base": "a10-xeon8358", "devices.gpu0.memory_bytes": "12 GiB"}
    assert predict_sweep(sweep(status="cliff", hardware=small), tmp_path) == {"refused": True}
    assert predict_sweep(sweep(status="cliff"), tmp_path) == {"refused": False}
    with pytest.raises(MoesimError):
        predict_sweep(sweep(hardware=small), tmp_path)


def frame(errors: list[float], **columns: list[Any]) -> pd.DataFrame:
    n = len(errors)
    base = {
        "check": [str(i) for i in range(n)], "machine": ["box"] * n, "rate": ["measured"] * n, "thin": [False] * n,
        "curve": ["M 4 bit"] * n, "setting": ["-ncmoe"] * n, "place": ["mixed"] * n, "status": ["predicted"] * n,
        "refused": [None] * n, "layers_on_cpu": list(range(n)), "layers": [n] * n, "label": ["derived"] * n,
    }  # fmt: skip
    found = pd.DataFrame({**base, "error": errors, **columns})
    found["measured"], found["predicted"] = 10.0, 10 * (1 + found["error"])
    return found


def test_errors_are_summed_up_by_group() -> None:
    found = frame(
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


def test_the_figure_has_a_panel_for_each_machine_of_three_rows() -> None:
    found = frame([0.1] * 7, machine=["a"] * 3 + ["b"] * 3 + ["c"])
    titles = [axes.get_title(loc="left") for axes in sweeps(found).axes]
    assert titles[:2] == ["a", "b"] and "c" not in titles
    with pytest.raises(ConfigError, match="at least one result"):
        sweeps(found.assign(status="cliff"))


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
def test_a_wrong_line_is_named(changes: dict[str, str], expected: str, tmp_path: Path) -> None:
    path = write(tmp_path / "sweeps.csv", changes)
    with pytest.raises(ConfigError) as caught:
        read_sweeps(path)
    assert str(caught.value).startswith(f"{path}:2: ") and expected in str(caught.value) and "\n" not in str(caught.value)


def test_names_are_unique(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected each name once, got 'x' 2 times"):
        read_sweeps(write(tmp_path / "sweeps.csv", {}, {}))
