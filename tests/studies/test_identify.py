"""A machine from a few speeds: reading rows, the closed form against the engine, the fit against true constants, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.cli.main import main
from moesim.errors import InputError
from moesim.hardware import load_hardware, read_profile
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from moesim.studies.identify.bench import read_observations
from moesim.studies.identify.cases import make_cases, read_setting
from moesim.studies.identify.fit import CEILING, PRIOR, Z90, Machine
from moesim.studies.identify.identify import check_agreement, identify, statuses, with_their_engine
from moesim.studies.identify.predictor import Memo, Predictor, Surrogate, engine_log_time
from moesim.studies.identify.report import USEFUL, next_lines
from tests.studies.identify_kit import BASE, NOISE, ROOMY, SETTINGS, Truth, rows

EXAMPLE = Path(__file__).resolve().parents[2] / "experiments" / "calibrate" / "rtx2070super.csv"
HEAD = "model,bits,setting,batch,context,value,unit,kind,spread,role\n"
GOOD = "qwen3-30b-a3b,Q4_K_M,n_cpu_moe=48,1,0,30,tokens/s,decode,,identification\n"

BAD = {
    "no unit": (GOOD.replace("tokens/s", ""), "unit: expected a unit, got nothing"),
    "unknown unit": (GOOD.replace("tokens/s", "token/s"), "did you mean 'tokens/s'"),
    "negative": (GOOD.replace(",30,", ",-30,"), "value: expected a value above 0, got -30"),
    "no number": (GOOD.replace(",30,", ",fast,"), "value: expected a number, got 'fast'; correct it"),
    "a comma": (GOOD.replace(",30,", ',"27,67",'), "value: expected a number, got '27,67'; write 27.67"),
    "half a batch": (GOOD.replace("=48,1,", "=48,0.5,"), "batch: expected an integer, got '0.5'; correct it"),
    "too many layers": (GOOD.replace("=48", "=60"), "expected n_cpu_moe of at most 48"),
    "unknown word": (GOOD.replace("n_cpu_moe", "n_gpu_moe"), "did you mean 'n_cpu_moe'"),
    "unknown policy": (GOOD.replace("n_cpu_moe=48", "policy=lrv"), "did you mean 'lru'"),
    "unknown model": (GOOD.replace("qwen3-30b-a3b", "qwen3-31b"), "qwen3-30b-a3b"),
    "unknown bits": (GOOD.replace("Q4_K_M", "Q9"), "bits: expected bits"),
    "no row": ("", "expected at least one observation, got none"),
    "only checks": (GOOD.replace("identification", "check"), "expected at least one row for identification"),
    "contradiction": (GOOD + GOOD.replace(",30,", ",40,"), "expected rows of one setting to agree"),
    "too many experts": (GOOD.replace("n_cpu_moe=48", "gpu_experts=200"), "expected gpu_experts of at most 128, the experts"),
    "experts are no layers": (GOOD.replace("n_cpu_moe=48", "gpu_experts=129"), "got 129; correct it\n"),
    "bits of no name": (GOOD.replace("Q4_K_M", "Q4_X"), "bits: expected bits"),
    "all too large": (GOOD.replace("n_cpu_moe=48", "all_gpu"), "of gpu0, got none: 1 would page"),
    "a check that contradicts": (GOOD + GOOD.replace(",30,", ",40,").replace("identification", "check"), "rows of one setting"),
    "a ratio to nothing": (GOOD.replace("tokens/s", "ratio:9"), "expected a ratio to another row"),
    "a quote that does not end": (GOOD + '"' + "x" * 200_000, "expected a table of observed speeds, got: field larger"),
    "too few fields": (GOOD + "qwen3-30b-a3b,1\n", "expected 10 fields, got 2"),
    "a role": (
        GOOD.replace("identification", "both"),
        "role: expected 'identification' or 'check', got 'both'; choose one of these",
    ),
    "prefill without prompt": (GOOD.replace("decode", "prefill"), "context: expected the tokens of the prompt"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines, words = BAD[case]
    (tmp_path / "rows.csv").write_text(HEAD + lines)
    assert main(["calibrate", str(tmp_path / "rows.csv"), "--hardware", BASE, "--out", str(tmp_path / "out")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and words in err and "rows.csv" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "spelling", [("n_cpu_moe=48", other) for other in ("n_cpu_moe=99", "cpu_moe", "-ncmoe 48", "ngl=99 n_cpu_moe=48", "all_cpu")]
    + [("Q4_K_M", "4.85/5.35"), ("qwen3-30b-a3b", "{base: qwen3-30b-a3b}")],
)  # fmt: skip
@pytest.mark.parametrize("roles", ["identification identification", "check identification", "identification check"])
def test_another_spelling_is_the_same_setting(spelling: tuple[str, str], roles: str, tmp_path: Path):
    first, second = (GOOD.replace("identification", role) for role in roles.split())
    (tmp_path / "rows.csv").write_text(HEAD + first + second.replace(*spelling).replace(",30,", ",100,"))
    with pytest.raises(InputError, match=r"rows\.csv:3: expected rows of one setting to agree, got 100 .* at .*rows\.csv:2"):
        check_agreement(make_cases(read_observations(tmp_path / "rows.csv")), load_hardware(ROOMY))


@pytest.mark.parametrize("setting", ["n_cpu_moe=0", "all_gpu", "gpu_experts=128", "gpu_experts=126"])
def test_what_does_not_fit_moves_nothing_however_it_is_written(setting: str):
    settings = [("qwen3-30b-a3b", "Q4_K_M", one, 1) for one in ("n_cpu_moe=48", setting, "gpu_experts=64")]
    known = [one.model_copy(update={"value": value}) for one, value in zip(rows(settings), (30.0, 12.0, 40.0), strict=True)]
    found = identify(BASE, known, free=["cpu_read_rate"], intervals=False, leave_out=False)
    assert [one.status for one in found.predictions] == ["used", "beyond memory", "used"]


@pytest.mark.parametrize(
    ("size", "status"), [("0.9", "beyond memory"), ("0.5", "used"), ("20GiB", "beyond memory"), ("12GiB", "used")]
)
@pytest.mark.parametrize("name", ["lru", "dali"])
def test_a_cache_that_does_not_fit_moves_nothing(name: str, size: str, status: str):
    settings = [("mixtral-8x7b", "4.5", one, 1) for one in ("n_cpu_moe=32", f"policy={name} cache={size}")]
    cases = make_cases(rows(settings))
    raw, path, _ = read_profile(BASE)
    assert statuses(cases, Machine(raw, str(path))) == ["used", status]


def test_checks_that_contradict_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    check = GOOD.replace("identification", "check").replace("=48", "=40")
    checks = "".join(check.replace(",30,", f",{value},") for value in (33, 33.3, 44))
    (tmp_path / "rows.csv").write_text(HEAD + GOOD + checks)
    assert main(["calibrate", str(tmp_path / "rows.csv"), "--hardware", BASE, "--free", "cpu_read_rate"]) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "are one setting" in line]
    assert told == [
        f"checks {first} and 4 are one setting, observed {apart} % apart: no prediction meets both"
        for first, apart in ((2, 33), (3, 32))
    ]


@pytest.mark.long
def test_next_lines_repeat_no_row_and_no_line(truth: Truth):
    _, observed = truth.draw(3)
    few = [observed[3], observed[7]]
    lines = next_lines(identify(ROOMY, few, intervals=False, leave_out=False, error=NOISE))
    assert lines and all(line.narrows <= USEFUL for line in lines)
    assert len({line.command for line in lines}) == len({line.constant for line in lines}) == len(lines)
    # what was suggested, observed under another spelling, is not suggested again
    first = lines[0].command.split()
    deep = first[first.index("-d") + 1] if "-d" in first else "0"
    setting = "ngl=0" if first[first.index("-ngl") + 1] == "0" else f"n_cpu_moe={first[first.index('--n-cpu-moe') + 1]}"
    model, bits = ("qwen3-30b-a3b", "Q4_K_M") if "qwen3" in first[2] else ("mixtral-8x7b", "Q4_K_M")
    assert first[2] == f"{model}-{bits}.gguf"
    known = rows([(model, bits, setting, 1)], context=int(deep), decode=64)[0].model_copy(update={"row": "new", "value": 20.0})
    more = next_lines(identify(ROOMY, [*few, known], intervals=False, leave_out=False, error=NOISE))
    assert lines[0].command not in {line.command for line in more}


@pytest.mark.parametrize(
    ("head", "words"), [("model,setting,value\n", "expected the column unit"), (HEAD[:-1] + ",colour\n", "unknown column")]
)
def test_a_bad_head_is_one_line(head: str, words: str, tmp_path: Path):
    (tmp_path / "rows.csv").write_text(head)
    with pytest.raises(InputError, match=words):
        read_observations(tmp_path / "rows.csv")


STATIC = [
    ("qwen3-30b-a3b", "Q4_K_M", "n_cpu_moe=24", 1),
    ("qwen3-30b-a3b", "Q4_K_M", "-ngl 20", 1),
    ("qwen3-30b-a3b", "Q4_K_M", "all_cpu", 8),
    ("deepseek-v2-lite", "Q8_0", "gpu_experts=16", 2),
    ("deepseek-v2-lite", "Q8_0", "-ngl 99 -ncmoe 10", 3),
    ("gpt-oss-20b", "MXFP4", "all_gpu", 4),
]


@pytest.mark.parametrize("setting", STATIC, ids=lambda one: f"{one[0]} {one[2]}")
def test_the_closed_form_is_the_engines_time(setting: tuple[str, str, str, int]):
    raw, path, _ = read_profile(BASE)
    machine = Machine(raw, str(path))
    (case,) = make_cases(rows([setting], context=1000))
    closed = Surrogate(case, machine.with_room).log_time(CostModel(case.model, machine.base, extrapolate=True))
    assert math.exp(closed - engine_log_time(case, machine.raw, "x")) == pytest.approx(1, abs=1e-3)


def test_units_are_the_same_observation():
    speeds = [("tokens/s", 40.0), ("tokens/s/sequence", 10.0), ("ms/token", 100.0), ("s", 12.8)]
    times = {rows([("olmoe", "", "all_cpu", 4)], unit=unit, value=value)[0].log_time for unit, value in speeds}
    assert max(times) - min(times) < 1e-12


@pytest.fixture(scope="module")
def truth() -> Truth:
    return Truth()


@pytest.mark.parametrize(("seed", "next_for"), [(1, ["gpu_read_rate"]), pytest.param(2, [], marks=pytest.mark.long)])
def test_true_constants_are_found_again(truth: Truth, seed: int, next_for: list[str]):
    true, observed = truth.draw(seed)
    found = identify(ROOMY, observed, leave_out=False, error=NOISE)
    told = [one for one in found.constants if one.identified]
    inside = [one.low <= true[one.constant.name] <= one.high for one in told]
    assert len(told) >= 3 and sum(inside) >= len(told) - 1
    assert found.engine_difference < 0.01
    for one in found.predictions:
        assert one.ratio == pytest.approx(1, abs=0.15)
    read = next(one for one in found.constants if one.constant.name == "cpu_read_rate")
    assert read.identified and math.log(read.high / read.low) < 0.5 * math.log(read.prior_high / read.prior_low)
    lines = next_lines(found)  # of these 13 rows little is left to ask
    assert [line.constant for line in lines] == next_for
    assert all(line.command.startswith("llama-bench ") and line.narrows <= USEFUL for line in lines)


def test_without_rows_that_tell_priors_hold(truth: Truth):
    _, observed = truth.draw(3)
    found = identify(ROOMY, observed[:1], error=NOISE)
    known = {one.constant.name: one for one in found.constants}
    assert not known["link_rate"].moves and known["link_rate"].value == known["link_rate"].constant.base
    assert not [one for one in found.constants if one.identified], "one row tells a rate and an operation not apart"
    assert "switch" in [line.constant for line in next_lines(found)]
    assert not known["cpu_read_rate"].moves
    assert found.left_out_by == "nothing"


@pytest.mark.long
def test_a_row_that_nothing_explains_is_set_aside(truth: Truth):
    _, observed = truth.draw(4)
    wrong = [one.model_copy(update={"value": 3 * one.value}) if one.row == "2" else one for one in observed]
    found = identify(ROOMY, wrong, intervals=False, leave_out=False, error=NOISE)
    assert [one.case.name for one in found.predictions if one.status == "set aside"] == ["2"]


def test_a_row_beyond_memory_moves_nothing(truth: Truth):
    _, observed = truth.draw(5)
    found = identify(
        BASE, observed, intervals=False, leave_out=False, error=NOISE
    )  # 16 GiB: Qwen3 at 4.85 bits has 17.5 GB of experts
    beyond = [one.case.name for one in found.predictions if one.status == "beyond memory"]
    assert beyond == ["0"]


@pytest.mark.long
def test_bits_that_are_not_printed_are_chosen(truth: Truth):
    _, observed = truth.draw(6)
    unsure = [one.model_copy(update={"bits": "16|Q8_0|4"}) if one.bits == "Q8_0" else one for one in observed]
    found = identify(ROOMY, unsure, intervals=False, leave_out=False, error=NOISE)
    assert {key: table[0][0] for key, table in found.bits.items()} == {
        ("qwen3-30b-a3b", "16|Q8_0|4"): "8.5", ("deepseek-v2-lite", "16|Q8_0|4"): "8.5",
    }  # fmt: skip


def test_ratios_and_dynamic_policies(truth: Truth):
    raw, path, _ = read_profile(ROOMY)
    machine = Machine(raw, str(path))
    settings = [("mixtral-8x7b", "4.5", "policy=lru cache=0.5", 1), ("mixtral-8x7b", "4.5", "all_cpu", 1)]
    lru, cpu = rows(settings, decode=8)
    slower = [0.0] * len(machine.constants)
    slower[[one.name for one in machine.constants].index("link_rate")] = -0.4
    times = [engine_log_time(case, machine.changed(slower), "x") for case in make_cases([lru, cpu])]
    ratio = lru.model_copy(update={"unit": "ratio:1", "value": math.exp(times[1] - times[0]), "spread": 1e-4})
    speed = cpu.model_copy(update={"value": math.exp(-times[1]) * 1e9, "spread": 1e-4})
    found = identify(ROOMY, [ratio, speed], free=["link_rate"], leave_out=False, error=NOISE)
    (link,) = found.constants
    assert link.identified and math.log(link.value / link.constant.base) == pytest.approx(-0.4, abs=0.06)


@pytest.mark.long
def test_the_command_leaves_a_profile_a_page_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "mybox"
    assert main(["calibrate", str(EXAMPLE), "--hardware", "rtx2070s-i5-12400f", "--out", str(out)]) == 0
    first = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert {"mybox.yaml", "page.md", "constants.csv", "rows.csv", "observations.csv", "identified.png", "summary.json"} <= set(
        first
    )
    told = capsys.readouterr().out
    assert "checks, never used: 4 rows" in told and "next, for " in told
    profile = load_hardware(out / "mybox.yaml")
    number = profile.numbers["devices.cpu0.memory_bytes_per_s"]
    # Two rows cannot tell the rate from what all rows of a machine share.
    assert number.source == "assumed" and number.interval is not None and number.interval[0] < number.value < number.interval[1]
    assert profile.numbers["links.cpu0->gpu0.pinned.bytes_per_s"].source != "identified"
    runs = (out / "engine.jsonl").read_bytes()
    assert main(["calibrate", str(EXAMPLE), "--hardware", "rtx2070s-i5-12400f", "--out", str(out)]) == 0
    assert (out / "engine.jsonl").read_bytes() == runs, "nothing is simulated again"
    again = {path.name: path.read_bytes() for path in out.iterdir() if path.is_file()}
    assert {name for name in first if first[name] != again[name]} <= {".moesim", "moesim.jsonl"}
    checks = [row for row in json.loads(first["summary.json"])["rows"] if row["status"] == "check"]
    assert max(abs(row["ratio"] - 1) for row in checks) < 0.09, "IQ4_XS and a setting between, from two rows of Q4_K_M"


def test_a_machine_without_a_gpu_takes_all_cpu_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "rows.csv").write_text(HEAD + GOOD.replace("n_cpu_moe=48", "all_cpu"))
    assert main(["calibrate", str(tmp_path / "rows.csv"), "--hardware", "ryzen5900x", "-o", "json"]) == 0
    told = {one["constant"]: one["verdict"] for one in json.loads(capsys.readouterr().out)["constants"]}
    assert told["cpu_read_rate"] == "identified" and not any(name.startswith("gpu_") for name in told)
    (tmp_path / "rows.csv").write_text(HEAD + GOOD.replace("n_cpu_moe=48", "ngl=0"))
    assert main(["calibrate", str(tmp_path / "rows.csv"), "--hardware", "ryzen5900x"]) == 2
    error = capsys.readouterr().err
    assert "rows.csv:2: setting: expected all_cpu next to a profile without a GPU" in error and "got 'ngl=0'; write" in error


def sides(**changes: Any) -> dict[str, tuple[float, float]]:
    raw, path, _ = read_profile({**ROOMY, **{key.replace("__", "."): value for key, value in changes.items()}})
    return {one.name: one.sigmas for one in Machine(raw, str(path)).constants}


def test_each_end_of_an_interval_holds_its_own_side():
    number = {"value": 20.0, "source": "assumed", "why": "a test", "interval": [15.0, 60.0]}
    below, above = sides(**{"devices.gpu0.token_us": number})["gpu_step"]
    assert (below, above) == (pytest.approx(math.log(20 / 15) / Z90), pytest.approx(math.log(3) / Z90))
    at_its_end = sides(**{"devices.gpu0.token_us": number | {"interval": [20.0, 60.0]}})["gpu_step"]
    assert at_its_end == (PRIOR["measured"], pytest.approx(above))


def test_a_rate_of_a_data_sheet_is_a_ceiling_and_its_time_is_not():
    sheet = {"source": "spec-sheet", "ref": "a test"}
    found = sides(
        **{"devices.gpu0.memory_bytes_per_s": {"value": 448e9, **sheet}, "devices.gpu0.token_us": {"value": 20.0, **sheet}}
    )
    assert found["gpu_read_rate"] == (PRIOR["spec-sheet"], CEILING)
    assert found["gpu_step"] == (PRIOR["spec-sheet"], PRIOR["spec-sheet"])


def test_a_speed_beyond_the_data_sheet_does_not_lift_its_rate(truth: Truth):
    """Twice the speed that the base predicts would ask for twice the rate; costs that are loose give way instead."""
    sheet = {"value": 448e9, "source": "spec-sheet", "ref": "a test"}
    base = {**ROOMY, "devices.gpu0.memory_bytes_per_s": sheet}
    raw, path, _ = read_profile(base)
    names = ["gpu_read_rate", "gpu_layer"]
    machine = Machine(raw, str(path), names)
    plain = rows(SETTINGS[:1])
    time = Predictor(machine, make_cases(plain), Memo()).engine(np.zeros(2))[0]
    fast = [plain[0].model_copy(update={"value": 2e9 / math.exp(time)})]
    found = {one.constant.name: one for one in identify(base, fast, free=names, leave_out=False, error=NOISE).constants}
    assert found["gpu_read_rate"].value < 448e9 * math.exp(8 * CEILING) < 448e9 * 1.5
    loose = {**base, "devices.gpu0.memory_bytes_per_s": sheet | {"source": "assumed", "why": "a test"}}
    del loose["devices.gpu0.memory_bytes_per_s"]["ref"]
    free = {one.constant.name: one for one in identify(loose, fast, free=names, leave_out=False, error=NOISE).constants}
    assert free["gpu_read_rate"].value > 1.2 * found["gpu_read_rate"].value


@pytest.mark.parametrize(("text", "n"), [("n_cpu_moe=47", 47), ("n_cpu_moe=99", 48), ("n_cpu_moe=0", 1)])
def test_dense_layers_between_those_with_experts_count(text: str, n: int):
    """Maverick has 48 layers, every other one with experts; the first of them is number 1."""
    assert read_setting(text, load_model("llama-4-maverick"), "rows.csv").policy == {"name": "llama-cpp", "n_cpu_moe": n}


def test_a_machine_without_an_engine_has_that_of_the_rows():
    """rtx3090-epyc7532 names none: llama.cpp's operations are freed, not launches of PyTorch."""
    cases = make_cases(rows([("qwen3-30b-a3b", "Q4_K_M", "n_cpu_moe=24", 1), ("qwen3-30b-a3b", "Q4_K_M", "ngl=0", 1)]))
    assert with_their_engine("rtx3090-epyc7532", cases) == {"base": "rtx3090-epyc7532", "engine": "llama.cpp"}
    for named in ("a10-xeon8358", {"base": "rtx3090-epyc7532", "engine": "eager"}):
        assert with_their_engine(named, cases) == named
