"""From samples to curves and pictures, and profiles put before a reader; nothing here measures."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from moesim.cli.main import main
from moesim.core.table import Format
from moesim.errors import InputError
from moesim.hardware import HardwareProfile, build_profile, hardware_names, load_hardware
from moesim.live.profiler.figure import draw
from moesim.live.profiler.fits import COLUMNS, FORMS, Fit, fit_all, fit_form, fitted_us, medians, pair_rates
from moesim.live.profiler.profile import FEW, Curve, Line, linear
from moesim.live.profiler.show import Row, compare, facts, page, table
from moesim.model import builtin_models, load_model

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
BYTES = tuple(2**power for power in range(12, 28))
Time = Callable[[float], float]


def samples(time_us: Time, sizes: Sequence[int] = ROWS, *, noise: float = 0.0, repeats: int = 9, **more: Any) -> pd.DataFrame:
    """Make samples of a curve; the noise is a share of the time, seeded."""
    draws = np.random.default_rng(7)
    said = {
        "kind": "expert",
        "device": "core0",
        "subject": "64x128",
        "bits": 16.0,
        "threads": 1,
        "variant": "",
        "unit": "rows",
    } | more
    rows = [
        {**said, "size": size, "repeat": repeat, "order": 0, "time_us": time_us(size) * (1 + noise * draws.standard_normal())}
        for size in sizes
        for repeat in range(repeats)
    ]
    return pd.DataFrame(rows)[list(COLUMNS)]


def copies(time_us: Time, sizes: Sequence[int] = BYTES, **more: Any) -> pd.DataFrame:
    said = {"kind": "copy", "device": "core1->core0", "subject": "", "bits": None, "threads": None, "unit": "bytes"}
    return samples(time_us, sizes, **(said | more))


def fits_of(frame: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Fit one curve, by form."""
    return {row["form"]: row for row in fit_all(frame).to_dict("records")}


def best_of(found: dict[str, dict[str, Any]]) -> str:
    (best,) = [form for form, row in found.items() if row["best"]]
    return best


def test_medians_of_repeats() -> None:
    frame = samples(lambda n: n, [2, 5], repeats=5)
    frame["time_us"] = [10, 20, 30, 40, 1000, 7, 7, 7, 7, 7]
    found = medians(frame)
    assert found[["size", "n", "median_us", "q25_us", "q75_us"]].to_numpy().tolist() == [[2, 5, 30, 20, 40], [5, 5, 7, 7, 7]]
    assert found["spread"].tolist() == pytest.approx([20 / 30, 0])


def test_samples_from_a_file_are_those_that_were_written() -> None:
    frame = pd.concat([samples(lambda n: 3 * n), copies(lambda n: 9 + n / 1e4)])
    again = pd.read_csv(io.StringIO(frame.to_csv(index=False)))
    assert again["variant"].isna().all()  # as pandas reads an empty text
    pd.testing.assert_frame_equal(fit_all(again), fit_all(frame))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"time_us": 0}, "samples: row 1: time_us: expected a number above 0, got 0; remove the row or measure again"),
        ({"time_us": "fast"}, "samples: row 1: time_us: expected a number above 0, got fast; remove the row or measure again"),
        ({"time_us": np.nan}, "samples: row 1: time_us: expected a number above 0, got nan; remove the row or measure again"),
        ({"time_us": np.inf}, "samples: row 1: time_us: expected a number above 0, got inf; remove the row or measure again"),
        ({"size": -1}, "samples: row 1: size: expected a number of at least 0, got -1; remove the row or measure again"),
        ({"bits": -4}, "samples: row 1: bits: expected a number above 0, got -4; remove the row or measure again"),
    ],
)
def test_bad_samples_are_named(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        fit_all(samples(lambda n: 3 * n).assign(**change))
    assert str(caught.value) == expected


def test_missing_columns_and_mixed_units_are_named() -> None:
    with pytest.raises(InputError, match=r"got no kind, time_us; measure again$"):
        medians(samples(lambda n: n).drop(columns=["kind", "time_us"]))
    mixed = pd.concat([samples(lambda n: n), samples(lambda n: n, unit="tokens")])
    with pytest.raises(
        InputError, match=r"^samples: expert, core0, 64x128, 16 bits, 1 thread: expected sizes in one unit, got rows and"
    ):
        fit_all(mixed)


def test_a_line_is_found_exactly() -> None:
    found = fits_of(samples(lambda n: 40 + 2.5 * n))
    assert (found["linear"]["base_us"], found["linear"]["slope_us"]) == pytest.approx((40, 2.5))
    assert found["linear"]["worst_relative"] < 1e-12
    assert found["linear"]["r2"] == pytest.approx(1)
    assert best_of(found) == "linear"


@settings(max_examples=60)
@given(st.floats(1, 1e4), st.floats(0.01, 100), st.integers(2, 95))
def test_a_knee_between_sizes_is_found_exactly(flat: float, slope: float, knee: int) -> None:
    sizes = np.array(ROWS, float)
    times = flat + slope * np.maximum(0, sizes - knee)
    fit = fit_form("flat_linear", sizes, times)
    assert fit.knee == knee
    assert (fit.base_us, fit.slope_us) == pytest.approx((flat, slope), rel=1e-6)


def test_a_roofline_is_found_exactly_with_its_rates() -> None:
    n_weights = 3 * 64 * 128
    rate, flops = 2e9, 3e9  # the knee is at 1.5 operations a byte, 24 weights of 16 bits: between two sizes
    found = fits_of(samples(lambda n: 5 + 1e6 * max(2 * n_weights / rate, 2 * n * n_weights / flops / 16), sizes=ROWS))
    roofline = found["roofline"]
    assert (roofline["base_us"], roofline["bytes_per_s"], roofline["flops"]) == pytest.approx((5, rate, 16 * flops))
    assert roofline["worst_relative"] < 1e-9


def test_a_roofline_knows_models_by_name() -> None:
    spec = builtin_models()["qwen3-30b-a3b"]
    rate = 1e10
    time = 2 * spec.expert_params / rate * 1e6
    found = fits_of(samples(lambda n: 3 + max(time, time * n / 20.5), subject="qwen3-30b-a3b"))
    assert found["roofline"]["bytes_per_s"] == pytest.approx(rate)
    unknown = fits_of(samples(lambda n: 3 + max(9, n), subject="a-model-of-mine"))
    assert np.isnan(unknown["roofline"]["bytes_per_s"])
    assert unknown["roofline"]["base_us"] == pytest.approx(3)


def test_a_copy_is_latency_and_rate() -> None:
    found = fits_of(copies(lambda n: 12 + n / 8e9 * 1e6))
    assert set(found) == {"linear", "flat_linear"}
    assert (found["linear"]["base_us"], found["linear"]["bytes_per_s"]) == pytest.approx((12, 8e9))
    assert best_of(found) == "linear"


def test_no_form_is_negative() -> None:
    """Times that grow faster than their size would have a negative start on the best line."""
    frame = samples(lambda n: n**1.5)
    found = fits_of(frame)
    assert found["linear"]["base_us"] == 0
    falling = fits_of(samples(lambda n: 100 / n))
    assert all(row["slope_us"] == pytest.approx(0, abs=1e-12) for row in falling.values())


def test_the_largest_residual_is_named() -> None:
    frame = samples(lambda n: 10 + n + (3 if n == 8 else 0) + (8 if n == 128 else 0))
    row = fits_of(frame)["linear"]
    fit = Fit(row["base_us"], row["slope_us"], row["knee"])
    sizes = np.array(ROWS, float)
    times = 10 + sizes + 3 * (sizes == 8) + 8 * (sizes == 128)
    away = np.abs(fitted_us("linear", fit, sizes) - times)
    assert (row["worst_us"], row["worst_us_at"]) == (pytest.approx(away.max()), sizes[away.argmax()])
    assert (row["worst_relative"], row["worst_relative_at"]) == (pytest.approx((away / times).max()), 8)
    assert row["worst_us_at"] == 128
    assert row["r2"] == pytest.approx(1 - (away**2).sum() / ((times - times.mean()) ** 2).sum())


@settings(max_examples=40)
@given(st.lists(st.floats(0.1, 1e6), min_size=3, max_size=10), st.sampled_from(sorted(FORMS)))
def test_no_neighbour_fits_better(times: list[float], form: str) -> None:
    """The sum of squared relative residuals is a minimum: no parameter a little larger or smaller gives less."""
    sizes, us = np.array(ROWS[: len(times)], float), np.array(times)
    fit = fit_form(form, sizes, us)

    def loss(changed: Fit) -> float:
        return float((((fitted_us(form, changed, sizes) - us) / us) ** 2).sum())

    assert min(fit) >= 0
    for name in ("base_us", "slope_us", *(["knee"] if form != "linear" else [])):
        for factor in (0.99, 1.01):
            value = getattr(fit, name) * factor
            if name == "knee":
                value = min(max(round(value + (factor - 1) * 100) if form == "flat_linear" else value, sizes[0]), sizes[-1])
            assert loss(fit._replace(**{name: value})) >= loss(fit) * (1 - 1e-9) - 1e-12


def test_too_few_sizes_are_said() -> None:
    one = fits_of(samples(lambda n: 12, [1], kind="dispatch", unit="calls"))
    assert {form: row["note"] for form, row in one.items()} == {
        "linear": "needs 2 sizes, got 1", "flat_linear": "needs 3 sizes, got 1", "roofline": "needs 3 sizes, got 1",
    }  # fmt: skip
    assert not any(row["best"] for row in one.values())
    assert all(np.isnan(row["base_us"]) for row in one.values())
    two = fits_of(samples(lambda n: 12 + n, [1, 4]))
    assert best_of(two) == "linear"
    assert two["flat_linear"]["note"] == "needs 3 sizes, got 2"


def test_what_is_no_curve_is_left_out() -> None:
    frame = pd.concat([samples(lambda n: 0.0, [0], kind=kind, unit="calls") for kind in ("power", "sentinel", "pair")])
    assert fit_all(frame).empty
    assert list(fit_all(frame).columns)[:6] == ["kind", "device", "subject", "bits", "threads", "variant"]


def pair(a: str, b: str, alone: float, together: float) -> pd.DataFrame:
    said = {"kind": "pair", "device": a, "subject": b, "bits": None, "threads": None, "unit": "calls"}
    return pd.concat(
        [samples(lambda n: alone, [1], **said, variant="alone"), samples(lambda n: together, [1], **said, variant="together")]
    )


def test_pairs_keep_a_share_of_their_speed() -> None:
    frame = pd.concat([pair("core0.experts", "core1->core0", 100, 125), pair("core1->core0", "core0.experts", 90, 120)])
    lone = frame[(frame["device"] == "core0.experts") | (frame["variant"] == "alone")]
    assert pair_rates(frame)[["activity", "beside", "rate", "n"]].to_numpy().tolist() == [
        ["core0.experts", "core1->core0", 0.8, 9], ["core1->core0", "core0.experts", 0.75, 9],
    ]  # fmt: skip
    assert pair_rates(lone)["activity"].tolist() == ["core0.experts"]


def everything() -> pd.DataFrame:
    parts = [samples(lambda n: 20 + n, kind=kind, subject="mixtral-8x7b", bits=None) for kind in ("attention", "dense", "head")]
    context = samples(lambda n: 5 + n / 50, [1, 64, 512, 4096], kind="context", subject="mixtral-8x7b", bits=None, unit="tokens")
    disks = [
        copies(lambda n: 90 + n / 2e3, kind=kind, device=link)
        for kind, link in (("disk_read", "disk0->a"), ("disk_write", "a->disk0"))
    ]
    frames = [
        samples(lambda n: 9 + max(40, 3 * n), noise=0.03), samples(lambda n: 30 + max(40, 3 * n), [1, 2], kind="expert_first"),
        copies(lambda n: 12 + n / 1e4), *disks, *parts, context, pair("core0.experts", "core1->core0", 100, 125),
        samples(lambda n: 30, [1], kind="power", unit="calls"),
    ]  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def titles(figure: Figure) -> list[str]:
    return [axes.get_title(loc="left").replace("\n", " ") for axes in figure.axes]


def test_every_kind_has_its_panel() -> None:
    frame = everything()
    figure = draw(frame, fit_all(frame))
    expert = "core0, 64x128, 16 bits, 1 thread"
    part = "core0, mixtral-8x7b"
    copied = ["Copies", "Copies: rate", "Disk", "Disk: rate"]
    assert titles(figure) == [expert, f"first of a group: {expert}", *copied, part, part, "Two at a time"]
    for axes in figure.axes[:-1]:
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
        assert axes.get_xlabel()
        assert "(" in axes.get_ylabel(), "a unit"
    assert [text.get_text() for text in figure.axes[-1].texts] == ["core0.experts with core1->core0", "80"]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["linear", "flat, then linear", "roofline", "measured"]


def test_the_picture_shows_what_was_measured_and_fitted() -> None:
    frame = pd.concat([samples(lambda n: 9 + max(40, 3 * n)), copies(lambda n: n / 4e3)])
    figure = draw(frame, fit_all(frame))
    expert, times, rates = figure.axes
    lines = {line.get_label(): line for line in expert.get_lines()}
    at = dict(zip(*lines["roofline"].get_data(), strict=True))
    assert at[1.0] == pytest.approx(49)
    assert at[128.0] == pytest.approx(9 + 3 * 128)
    assert times.get_lines()[0].get_ydata()[0] == pytest.approx(4096 / 4e3)
    assert rates.get_lines()[0].get_ydata() == pytest.approx(4.0)  # GB/s
    assert expert.texts[0].get_text().startswith("best: roofline, off by at most ")


def test_no_text_of_the_picture_overlaps_another() -> None:
    frame = everything()
    figure = draw(frame, fit_all(frame))
    figure.draw_without_rendering()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            boxes = [
                tick.label1.get_window_extent()
                for tick in axis.get_major_ticks()
                if tick.label1.get_text() and tick.label1.get_visible()
            ]
            low, high = sorted(axes.get_xlim() if axis is axes.xaxis else axes.get_ylim())
            shown = [box for box, place in zip(boxes, axis.get_majorticklocs(), strict=False) if low <= place <= high]
            assert not any(one.overlaps(two) for i, one in enumerate(shown) for two in shown[:i]), axes.get_title(loc="left")
    tight = [axes.get_tightbbox() for axes in figure.axes]
    assert not any(one.overlaps(two) for i, one in enumerate(tight) for two in tight[:i] if one and two)


def test_nothing_to_draw_is_said() -> None:
    frame = samples(lambda n: 30, [1], kind="power", unit="calls")
    with pytest.raises(InputError, match="expected experts, copies, parts of a layer or pairs to draw, got none"):
        draw(frame, fit_all(frame))


def number(value: Any, source: str = "measured") -> dict[str, Any]:
    measured = {"date": "2025-11-21", "method": "timed; one run", "repeats": 9, "spread": "2 %; quartiles"}
    return {"value": value, "source": source} | (measured if source == "measured" else {"why": "a test"})


def machine(**changes: Any) -> HardwareProfile:
    shape = {"hidden": 4096, "intermediate": 14_336, "bits": 16}
    points = {"shape": shape, "form": "points", "range": [1, 32], "points": number([[1, 500], [16, 800], [32, 1200]])}
    rates = {"memory_bytes": number("8 GB", "assumed"), "memory_bytes_per_s": number(1e10), "flops": number(1e11)}
    copies = {
        "any": {"points": number([[1000, 4], [20_000_000, 2004]])},
        "activation": {"latency_us": number(3), "bytes_per_s": number(1e9)},
    }
    raw = {
        "name": "halves", "description": "two halves of a processor", "machine": {"processor": "a test"},
        "compute": "near", "backing": ["far"],
        "devices": {
            "near": {"kind": "cpu", "role": "accelerator", "cores": [0], **rates, "experts": [points], "busy_w": number(9)},
            "far": {"kind": "cpu", "cores": [1], **rates, "launches": {"expert": number(3, "assumed")}},
        },
        "links": {"far->near": copies, "near->far": copies},
        "contention": [{"a": "near.experts", "b": "far->near", "a_rate": number(0.8), "b_rate": number(0.7)}],
        "platform_w": number(30, "assumed"),
    }  # fmt: skip
    return build_profile(raw | changes, "halves.yaml")


def test_facts_of_a_machine() -> None:
    found = facts(machine(), [load_model("mixtral-8x7b")])
    (curve,) = found["curves"]
    assert (curve["us_at_1"], curve["us_at_16"], curve["us_at_256"]) == (500, 800, None)
    assert (curve["curve"], curve["range"], curve["form"]) == ("expert 4096x14336, 16 bits", [1, 32], "points")
    assert (curve["source"], curve["measured"]) == ("measured", "2025-11-21, 9 repeats, 2 %, quartiles")
    weights, hidden = found["links"][:2]
    small = pytest.approx(4 + 63_000 / 19_999_000 * 2000, abs=1e-3)
    assert weights["us"] == {"64 KB": small, "16 MB": pytest.approx(1604, abs=0.1), "mixtral-8x7b expert": None}
    assert (weights["transfer"], weights["bytes_per_s"]) == ("any", pytest.approx(20e6 / 2004e-6))
    assert (hidden["transfer"], hidden["us"]["64 KB"], hidden["bytes_per_s"]) == ("activation", 67, 1e9)
    assert [(row["activity"], row["beside"], row["rate"]) for row in found["contention"]] == [
        ("near.experts", "far->near", 0.8), ("far->near", "near.experts", 0.7),
    ]  # fmt: skip
    assert found["labels"] == {"measured": 14, "assumed": 4}
    assert found["weakest"]["label"] == "assumed"
    assert set(found["weakest"]["keys"]) == {
        "devices.near.memory_bytes", "devices.far.memory_bytes", "devices.far.launches.expert", "platform_w",
    }  # fmt: skip
    assert json.loads(json.dumps(found)) == found


def test_the_page_tells_everything() -> None:
    text = page(machine(), [load_model("mixtral-8x7b")])
    squeezed = re.sub(r" +", " ", text)
    for line in (
        "halves: two halves of a processor",
        "processor: a test",
        "dense parts on near; all experts on far",
        "near (cpu, accelerator, cores 0) value source",
        "memory_bytes 8 GB (7.45 GiB) assumed",
        "memory_bytes_per_s 10 GB/s measured (2025-11-21, 9 repeats, 2 %, quartiles)",
        "busy_w 9 W measured",
        "launches expert 3 assumed",
        "the rest of the machine: 30 W, assumed",
        "expert 4096x14336, 16 bits near points 1..32 500 800 - measured (2025-11-21",
        "far->near, near->far any 10.3 1,604 - 9.98 measured",
        "near.experts far->near 80 % measured",
    ):
        assert line in squeezed, line
    assert text.splitlines()[-1].startswith("18 numbers: 14 measured, 4 assumed; the weakest are assumed: ")


def test_experts_of_a_named_model_are_costed_where_no_curve_is(capsys: pytest.CaptureFixture[str]) -> None:
    """By hand: 88,080,384 bytes at 65.8 GB/s (cpu0), and over the link at 23.8 GB/s after 28 us."""
    assert main(["profile", "show", "rtx3090-epyc7532", "--model", "{base: mixtral-8x7b, expert_bits: 4}"]) == 0
    squeezed = re.sub(r" +", " ", capsys.readouterr().out)
    assert "mixtral-8x7b (expert_bits=4) cpu0 1,339 " in squeezed and pytest.approx(1339e-6, rel=1e-3) == 88_080_384 / 65.8e9
    assert "mixtral-8x7b (expert_bits=4) expert, us" in squeezed
    assert " 3,729 23.8 derived\n" in squeezed and pytest.approx(3729e-6, rel=1e-3) == 28e-6 + 88_080_384 / 23.8e9
    assert main(["profile", "show", "rtx3090-epyc7532"]) == 0
    assert "an expert of" not in capsys.readouterr().out
    (gpu, cpu) = facts(machine(), [load_model("mixtral-8x7b")])["experts"]
    assert (gpu["device"], gpu["us_at_1"], gpu["us_at_256"], gpu["source"]) == ("near", 500, None, "measured")
    assert cpu["device"] == "far"


@pytest.mark.parametrize(("value", "word"), [(True, "yes"), (False, "no")])
def test_a_switch_is_yes_or_no(value: bool, word: str) -> None:
    told = page(
        load_hardware({"base": "rtx3090-epyc7532", "host_shared": {"value": value, "source": "assumed", "why": "a test"}})
    )
    assert f"thread computes the host's experts too: {word}, assumed" in told


@pytest.mark.parametrize("name", hardware_names())
def test_every_shipped_profile_is_shown(name: str) -> None:
    profile = load_hardware(name)
    found = facts(profile)
    text = page(profile)
    assert text.startswith(f"{name}: ")
    assert sum(found["labels"].values()) == len(found["numbers"])
    assert text.splitlines()[-1].startswith(f"{len(profile.numbers)} numbers: ")
    assert f"the weakest are {profile.labels[-1]}: " in text
    told = {row["source"] for device in found["devices"] for row in device["numbers"]}
    told |= {row["source"] for part in ("curves", "links", "contention") for row in found[part]}
    assert profile.labels[-1] in told | ({found["numbers"]["platform_w"]["source"]} if found["platform_w"] else set())
    json.dumps(found)


def by_quantity(a: HardwareProfile, b: HardwareProfile, model: str = "mixtral-8x7b") -> dict[str, Row]:
    return {row.quantity: row for row in compare(a, b, load_model(model))}


def test_a_machine_beside_itself() -> None:
    for name in ("rtx3090-epyc7532", "odmoe-10x3090"):
        profile = load_hardware(name)
        rows = by_quantity(profile, profile, "deepseek-v2-lite")
        assert all(row.ratio in (1, None) and row.a == row.b is not None for row in rows.values())
        assert "layer without routed experts (attention to 512 tokens, router, shared experts), 1 row" in rows


def test_roles_match_devices_of_other_names() -> None:
    rows = by_quantity(load_hardware("rtx3090-epyc7532"), machine())
    expert = rows["expert, 16 rows, accelerator"]
    assert (expert.a, expert.b, expert.a_source, expert.b_source) == (443.9, 800, "derived", "measured")
    assert expert.ratio == pytest.approx(800 / 443.9)
    assert rows["expert, 64 rows, accelerator"].b is None  # beyond what was measured
    assert rows["expert, 1 row, host"].b == pytest.approx(352_321_536 / 1e10 * 1e6, rel=1e-6)
    assert rows["copy of one expert, pinned, host -> accelerator"].a == pytest.approx(28 + 352_321_536 / 23.8e9 * 1e6, abs=1e-3)
    assert rows["hidden state of 1 row, accelerator -> host"].b == pytest.approx(3 + 8192 / 1e9 * 1e6)
    kept = rows["accelerator.experts with host->accelerator"]
    assert (kept.a, kept.b, kept.unit) == (None, 0.8, "share")
    other = rows["host.experts with host->accelerator"]
    assert (other.a, other.b) == (0.66, None)


def test_a_disk_plays_no_host() -> None:
    copies = {"any": {"latency_us": number(90), "bytes_per_s": number(2e9)}}
    cpu = {
        "kind": "cpu", "role": "accelerator", "memory_bytes": number("8 GB"),
        "memory_bytes_per_s": number(1e10), "flops": number(1e11),
    }  # fmt: skip
    disk = {"cpu0": cpu, "disk0": {"kind": "disk", "memory_bytes": number("1 TB")}}
    links = {"disk0->cpu0": copies, "cpu0->disk0": copies}
    rows = by_quantity(machine(compute="cpu0", backing=["disk0"], devices=disk, links=links, contention=[]), machine())
    assert rows["expert, 1 row, host"].a is None
    assert rows["copy of one expert, storage -> accelerator"].a == pytest.approx(90 + 352_321_536 / 2e9 * 1e6, abs=1e-3)
    assert rows["copy of one expert, storage -> accelerator"].b is None


def test_the_comparison_as_a_table_and_as_records(tmp_path: Path) -> None:
    rows = compare(load_hardware("rtx3090-epyc7532"), machine(), load_model("mixtral-8x7b"))
    text = re.sub(r" +", " ", table(rows, "A1", "B1"))
    assert "A1 B1 B / A source, A1 source, B1" in text
    assert "expert, 1 row, accelerator, us 444 500 1.13 derived measured" in text
    assert "expert, 64 rows, accelerator, us 885 not in B1 derived" in text
    assert "accelerator.experts with host->accelerator, speed kept not in A1 0.8 measured" in text
    file = tmp_path / "a.csv"
    file.write_text(table(rows, "A1", "B1", Format.CSV))
    frame = pd.read_csv(file)
    assert list(frame.columns) == ["quantity", "unit", "a", "b", "a_source", "b_source", "ratio"]
    assert len(frame) == len(rows)
    assert json.loads(table(rows, "A1", "B1", Format.JSON))[0]["ratio"] == pytest.approx(500 / 443.9)


def test_every_shipped_profile_is_compared() -> None:
    first = load_hardware("rtx3090-epyc7532")
    for name in hardware_names():
        rows = by_quantity(first, load_hardware(name))
        assert any(row.b is not None and row.unit == "us" for row in rows.values()), name


FEW_AND_MANY = np.array([1, 2, 3, 4, 6, 8, 16, 32, 64])
LINE = Line(65.0, 40.0, 80e9, 90e9, 900e9)


def curve(n_bytes: int, line: Line = LINE, rows: np.ndarray = FEW_AND_MANY, noise: float = 0.0, seed: int = 0) -> Curve:
    operations = n_bytes  # 16 bits: two operations for every two bytes
    few, many = np.minimum(rows, FEW) - 1, np.maximum(rows - FEW, 0)
    us = (
        line.per_expert_us
        + n_bytes / line.read_bytes_per_s * 1e6
        + few * (line.per_row_us + operations / line.few_row_flops * 1e6)
    )
    us = us + many * operations / (line.many_row_flops or 1.0) * 1e6
    return Curve(n_bytes, operations, rows, us * (1 + noise * np.random.default_rng(seed).standard_normal(len(rows))))


def test_what_made_the_times_is_found_again():
    found = linear([curve(17_000_000), curve(350_000_000)])
    assert found is not None
    for name, value in vars(LINE).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


def test_noise_of_some_per_cent_leaves_the_rates_within_a_tenth():
    found = linear([curve(17_000_000, noise=0.03), curve(350_000_000, noise=0.03, seed=1)])
    assert found is not None
    for name in ("read_bytes_per_s", "few_row_flops", "many_row_flops"):
        assert getattr(found, name) == pytest.approx(getattr(LINE, name), rel=0.1), name


def test_of_one_size_nothing_tells_the_fixed_parts():
    found = linear([curve(17_000_000)])
    assert found is not None
    assert (found.per_expert_us, found.per_row_us) == (0, 0)
    one = curve(17_000_000)
    assert 17_000_000 / found.read_bytes_per_s * 1e6 == pytest.approx(one.us[0], rel=0.02)


def test_few_rows_as_fast_as_one_are_no_slower_than_many():
    flat = Line(0.0, 0.0, 80e9, 1e30, 900e9)
    found = linear([curve(17_000_000, flat)])
    assert found is not None
    assert found.few_row_flops == pytest.approx(found.many_row_flops)


def test_few_rows_alone_have_no_crossover():
    found = linear([curve(17_000_000, rows=FEW_AND_MANY[FEW_AND_MANY <= FEW])])
    assert found is not None
    assert found.many_row_flops is None


@pytest.mark.parametrize("rows", [np.array([1]), np.array([2, 4, 8]), np.array([16, 32])])
def test_without_one_row_and_another_there_is_nothing(rows: np.ndarray):
    assert linear([curve(17_000_000, rows=rows)]) is None
