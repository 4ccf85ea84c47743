"""What ``moesim whatif`` prints and refuses: shares that are exact, values used, marks at rows, and units."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from moesim.cli.whatif import table
from moesim.cli.whatif import whatif as command
from moesim.core.table import Format
from moesim.errors import InputError
from moesim.experiment.config import parse_config
from moesim.hardware import load_hardware
from moesim.studies.whatif.knobs import change
from moesim.studies.whatif.settings import Base, Changed, parse_vary, single
from moesim.studies.whatif.study import Line, records, whatif
from tests.experiment.experiment_kit import small, write_yaml

LINK = "links.cpu0->gpu0.pinned.bytes_per_s"


def base(folder: Path, **changes: Any) -> Base:
    return single(parse_config(small(folder, **changes), "small.yaml"), "small.yaml")


def settings(*vary: str) -> list[Any]:
    return [together for text in vary for together in parse_vary(text)]


def vary(one: Base, text: str) -> Changed:
    (together,) = parse_vary(text)
    return change(one, together)


def lines_of(one: Base, *texts: str) -> list[Line]:
    return whatif(one, settings(*texts), look=False)


def rows_of(text: str) -> dict[str, str]:
    """Give the lines of a table that begin with a policy, by policy and what was varied."""
    found = [re.split(r"\s{2,}", line) for line in text.splitlines() if re.match(r"(lru|belady|daop|fiddler)", line)]
    return {f"{cells[0]}: {cells[1]}": "  ".join(cells) for cells in found}


# ----------------------------------------------------------------------------------------------- exactness and oracles


def test_a_policy_that_is_not_exact_says_how_much_is(tmp_path: Path):
    lines = lines_of(base(tmp_path, policies=["lru", "daop-paper"]), "link.bytes_per_s x2")
    text = table(lines, Format.TABLE)
    share = {line.policy: line.fresh for line in lines if not line.settings}
    assert share["lru"] == 1
    assert share["daop-paper"] is not None
    assert share["daop-paper"] < 1
    rows = rows_of(text)
    assert f"{math.floor(1000 * share['daop-paper']) / 10:.1f}*" in rows["daop-paper: as it is"]  # rounded down
    assert "  100  " in rows["lru: as it is"]
    assert "fresh %" in text.splitlines()[0]
    assert "* in fresh %: not exact" in text
    (exact, other) = records(lines)
    assert (exact["fidelity_fresh_decode"], other["base_fidelity_fresh_decode"]) == (1, share["daop-paper"])


def test_exact_policies_need_no_such_column(tmp_path: Path):
    text = table(lines_of(base(tmp_path, policies=["lru"])), Format.TABLE)
    assert "fresh %" not in text


def test_an_oracle_is_said_to_be_one(tmp_path: Path):
    rows = rows_of(table(lines_of(base(tmp_path, policies=["lru", "belady"]), "batch 2,99"), Format.TABLE))
    assert set(rows) == {f"{p}: {s}" for p in ("lru", "belady (oracle)") for s in ("as it is", "batch 2", "batch 99")}


# ------------------------------------------------------------------------------------------------------- what it is about


@pytest.fixture
def cli() -> typer.Typer:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("whatif")(command)
    return app


def call(app: typer.Typer, *arguments: str) -> str:
    result = CliRunner().invoke(app, arguments, standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_the_setting_as_it_is_is_named_and_quick_says_so(tmp_path: Path, cli: typer.Typer):
    path = write_yaml(tmp_path, policies=["lru"], cache={"ratio": [0.25, 0.5]}, workload={"prompt_tokens": 5, "decode_tokens": 3})
    arguments = (str(path), "--vary", "batch 2", "--no-next")
    quickly = call(cli, *arguments, "--quick")
    whole = call(cli, *arguments, "--set", "cache.ratio=0.5")
    for text, cache in ((quickly, "0.25"), (whole, "0.5")):
        (line,) = (line for line in text.splitlines() if line.startswith("as it is:"))
        assert set(line.removeprefix("as it is: ").split(", ")) == {"batch 1", f"cache {cache}", "prompt 5", "decode 3"}
    made = "made small by --quick: these numbers say nothing about the experiment"
    assert made in quickly
    assert made not in whole
    assert '"quick":true' in call(cli, *arguments, "--quick", "-o", "jsonl").replace(" ", "")


def test_a_budget_is_a_size(tmp_path: Path):
    text = table(lines_of(base(tmp_path, policies=["lru"], cache={"budget": "8 GB"})), Format.TABLE)
    assert "cache 8 GB" in text


# ------------------------------------------------------------------------------------------------- values that were used


def test_a_factor_of_a_whole_number_says_what_it_came_to(tmp_path: Path):
    lines = lines_of(base(tmp_path, policies=["lru"]), "batch x2,+160%", "cache x2 & batch x4", "batch 6")
    assert [line.name for line in lines] == [
        "as it is", "batch x2 = batch 2", "batch +160% = batch 3", "cache x2 = cache 0.5 & batch x4 = batch 4", "batch 6",
    ]  # fmt: skip
    assert "batch x2 = batch 2" in table(lines, Format.TABLE)
    assert [record["setting"] for record in records(lines)][:2] == ["x2", "+160%"]
    assert [record["value"] for record in records(lines)][:2] == ["batch 2", "batch 3"]


@pytest.mark.parametrize("text", ["batch x1.2", "batch x0.5", "workload.batch_size x1.4", "devices.gpu0.launches.expert x1.01"])
def test_a_factor_that_comes_to_what_is_there_is_refused(tmp_path: Path, text: str):
    with pytest.raises(InputError, match="expected a factor that comes to another whole number than the") as error:
        vary(base(tmp_path), text)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("texts", [["batch x1.6,x2"], ["batch 2", "batch x2"], ["cache 0.5,x2"], ["batch x2 & cache 0.5,x2"]])
def test_two_that_come_to_the_same_are_refused(tmp_path: Path, texts: list[str]):
    with pytest.raises(InputError, match="for both; leave one out"):
        lines_of(base(tmp_path), *texts)


# ------------------------------------------------------------------------------------------------------ figures and marks


def with_row(line: Line, **changes: float) -> Line:
    factors = {key: float(line.base.row[key] or 0) * factor for key, factor in changes.items()}
    return replace(line, shot=replace(line.shot, row={**line.shot.row, **factors}))


def test_what_rounds_to_nothing_has_no_sign(tmp_path: Path):
    _, line = lines_of(base(tmp_path, policies=["lru"]), "link.bytes_per_s x2")
    for tiny in (0.9999, 1.0001):
        text = table([with_row(line, decode_tokens_per_s=tiny, ttft_mean_ns=tiny)], Format.TABLE)
        assert text.count(" 0.0 %") == 2
        assert not re.search(r"[+-]0\.0 %", text)


def test_figures_are_as_many_everywhere(tmp_path: Path):
    _, line = lines_of(base(tmp_path, policies=["lru"]), "link.bytes_per_s x2")
    shown = []
    for speed, ns in ((15.0, 2e9), (14.94, 744.2e6), (9.996, 9.5e6), (1234.0, 0.9e6)):
        row = {**line.shot.row, "decode_tokens_per_s": speed, "ttft_mean_ns": ns}
        (cells,) = rows_of(table([replace(line, shot=replace(line.shot, row=row))], Format.TABLE)).values()
        shown.append((cells.split("  ")[2], cells.split("  ")[4]))
    assert shown == [("15.0", "2.00 s"), ("14.9", "744 ms"), ("10.0", "9.50 ms"), ("1230", "0.900 ms")]


def test_an_anomaly_is_marked_where_it_is(tmp_path: Path):
    as_is, line = lines_of(base(tmp_path, policies=["lru"]), "link.bytes_per_s x2")
    slower = with_row(line, decode_tokens_per_s=0.9, ttft_mean_ns=0.5)
    later = with_row(line, decode_tokens_per_s=1.5, ttft_mean_ns=1.1)
    (first,) = rows_of(table([slower], Format.TABLE)).values()
    (second,) = rows_of(table([later], Format.TABLE)).values()
    assert "-10.0 % !" in first
    assert "-50.0 % !" not in first
    assert "+10.0 % !" in second
    assert second.count("!") == first.count("!") == 1
    assert "!" not in table([as_is, line], Format.TABLE)
    assert slower.record()["anomalies"] == "decode_tokens_per_s"


# ------------------------------------------------------------------------------------------------------ units and bounds


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("link.bytes_per_s 50GB/s", LINK, 50e9),
        ("link.bytes_per_s 50 GB/s", LINK, 50e9),
        (f"{LINK} 20 GiB/s", LINK, 20 * 2**30),
        ("cpu.memory_bandwidth 0.2 TB/s", "devices.cpu0.memory_bytes_per_s", 0.2e12),
        ("hardware.devices.cpu0.memory_bytes 512 GB", "devices.cpu0.memory_bytes", 512e9),
    ],
)
def test_rates_have_their_unit(tmp_path: Path, text: str, key: str, value: float):
    one = base(tmp_path)
    changed = vary(one, text)
    number = load_hardware(changed.raw["hardware"]).numbers[key]
    assert float(number.value) == pytest.approx(value)  # type: ignore[arg-type]
    assert number.source == "assumed"
    before = one.profile.numbers[key].value
    assert not isinstance(before, list)
    assert float(changed.factor or 0) == pytest.approx(value / float(before))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("link.bytes_per_s 1e30", "expected x1/1000 to x1000 of what is there ("),
        ("link.bytes_per_s 50", "expected x1/1000 to x1000 of what is there ("),
        ("link.bytes_per_s x1e9", "expected x1/1000 to x1000"),
        ("link.bytes_per_s x0.0001", "expected x1/1000 to x1000"),
        ("cpu.memory_bandwidth 1 B/s", "expected x1/1000 to x1000"),
        (f"{LINK} 50", "expected x1/1000 to x1000"),
        ("devices.gpu0.launch_us 1e9", "expected x1/1000 to x1000"),
        ("cpu.memory 8xDDR4-99999999", "expected x1/1000 to x1000 of what is there, got"),
        ("batch x5000", "expected x1/1000 to x1000"),
        ("link.bytes_per_s 50GB", "a rate has its unit as in '50 GB/s'"),
        ("link.bytes_per_s 50/s", "expected a size with a unit"),
        ("link.bytes_per_s 50 Gb it/s", "expected a size"),
        ("hardware.devices.cpu0.memory_bytes 5 GeB", "expected a size"),
        ("devices.gpu0.launch_us -1", "--vary devices.gpu0.launch_us -1: small.yaml: hardware: "),
        ("workload.bach 2", "--vary workload.bach 2: "),
    ],
)
def test_what_cannot_be_is_a_wrong_input_before_anything_runs(tmp_path: Path, text: str, words: str):
    with pytest.raises(InputError) as error:
        vary(base(tmp_path), text)
    assert words in str(error.value)
    assert text in str(error.value)
    assert "contention" not in str(error.value)
    assert "\n" not in str(error.value)


def test_a_thousand_times_as_much_is_still_a_machine(tmp_path: Path):
    one = base(tmp_path)
    for factor in (Fraction(1000), Fraction(1, 1000)):
        changed = vary(one, f"link.bytes_per_s x{float(factor):g}")
        assert changed.factor == factor
        assert load_hardware(changed.raw["hardware"]).contention
