"""What no machine, model or workload can be: refused by its key, alone and where thinkable numbers come together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer

from moesim.cli import main as cli
from moesim.cli.main import main
from moesim.core import limits
from moesim.core.units import ceil_div, parse_bytes
from moesim.errors import ConfigError, HardwareError
from moesim.experiment import run
from moesim.experiment.run import chunks, describe_grid, lookups, seconds
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.hardware.costs.model import check_chunk, most_chunks
from moesim.model import load_model
from tests.experiment.experiment_kit import resolve, write_yaml


def refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must be refused, and give its one line."""
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("moesim: ") and error.count("\n") == 1 and "Traceback" not in error
    return error


UNTHINKABLE = {
    "hardware.devices.gpu0.launch_us=1e12": "devices.gpu0.launch_us.value: expected at most 1e+09, got 1000000000000.0",
    "hardware.devices.gpu0.memory_bytes_per_s=1e308": "devices.gpu0.memory_bytes_per_s.value: expected at most 1e+18, got 1e+308",
    "hardware.devices.gpu0.flops=1e22": "devices.gpu0.flops.value: expected at most 1e+21, got 1e+22",
    "hardware.links.cpu0->gpu0.pinned.latency_us=1e300": "pinned.latency_us.value: expected at most 1e+09, got 1e+300",
    "hardware.platform_w=1e10": "platform_w.value: expected at most 1e+09, got 10000000000.0",
    "hardware.devices.gpu0.launches.expert=9999999": "launches.expert.value: expected at most 1e+06, got 9999999",
    "hardware.devices.gpu0.memory_bytes=1e99999999 GB": "expected a size of at most 9007199254740992 bytes (8 PiB), got '1e999",
    "model.expert_bits=1e-300": "model.expert_bits: expected a number of bits from 0.1 to 64, got 1e-300",
    "model.hidden=99999999999999": "model.hidden: expected at most 10000000, got 99999999999999",
    "model.n_layers=20000": "model.n_layers: expected at most 10000, got 20000",
    "cache.ratio=1e-300": "cache.ratio: expected a share of all experts of at least 1e-06, got 1e-300",
    "decision_us=1e10": "decision_us: expected a number of at most 1000000000.0, got 10000000000.0",
    "transfer.chunk=9e99 B": "transfer.chunk: expected a size of at most 9007199254740992 bytes (8 PiB), got '9e99 B'",
}


@pytest.mark.parametrize("change", UNTHINKABLE)
def test_an_unthinkable_number_is_refused_by_its_key(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_yaml(tmp_path)
    assert UNTHINKABLE[change] in refusal(["run", str(file), "--out", str(tmp_path / "out"), "--set", change], capsys)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", ["1e400 GiB", "1e99999999 B", "9" * 4000 + " TB", 2**53 + 1])
def test_no_size_is_larger_than_any_memory(size: Any):
    with pytest.raises(ConfigError, match="expected a size of at most 9007199254740992 bytes"):
        parse_bytes(size, "here")
    assert parse_bytes(2**53) == parse_bytes("8192 TiB") == 2**53
    assert parse_bytes("1e-400 GiB") == 0


# ------------------------------------------------------------------------------------- thinkable numbers that come together

SLOW = {
    "hardware.devices.gpu0.memory_bytes_per_s=1000": "devices.gpu0 (head of mixtral-8x7b)",
    "hardware.devices.gpu0.flops=1e3": "devices.gpu0 (attention of mixtral-8x7b)",
    "hardware.links.cpu0->gpu0.pinned.bytes_per_s=1000": "links.cpu0->gpu0.pinned (88080384 bytes)",
}


@pytest.mark.parametrize("change", SLOW)
def test_a_cost_of_days_names_device_or_curve(change: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    error = refusal(["run", str(write_yaml(tmp_path, policies=["lru"])), "--out", str(tmp_path / "out"), "--set", change], capsys)
    assert f"{SLOW[change]}: expected at most a day for a single task or copy, got " in error
    assert "policy" not in error


def test_a_curve_that_takes_days_is_named(tmp_path: Path):
    model = load_model({"base": "mixtral-8x7b", "expert_bits": 4})
    hardware = load_hardware({"base": "rtx3090-epyc7532", "devices.gpu0.experts.1.per_token_us": 1e9})
    with pytest.raises(HardwareError, match=r"devices\.gpu0\.experts\.1 \(expert curve for .* at 100 rows\): expected at most a"):
        CostModel(model, hardware).expert_ns("gpu0", 100)


def test_a_run_of_years_blames_the_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Each copy takes 0.93 days."""
    changes = ["--set", "hardware.links.cpu0->gpu0.pinned.bytes_per_s=1100"]
    file = write_yaml(tmp_path, policies=["on-demand"], workload={"batch_size": 4, "prompt_tokens": 6, "decode_tokens": 3})
    error = refusal(["run", str(file), "--out", str(tmp_path / "out"), *changes], capsys)
    assert "rtx3090-epyc7532.yaml: expected a run of at most a year of simulated time, got 1." in error
    assert "policy" not in error


# --------------------------------------------------------------------------------------------------------------------- chunks


def test_a_chunk_is_refused_below_the_smallest_that_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = write_yaml(tmp_path, policies=["lru"], workload={"prompt_tokens": 6, "decode_tokens": 0})
    run = ["run", str(file), "--out", str(tmp_path / "out"), "--set"]
    expected = (
        f"{file}: transfer.chunk: expected at least 86016 bytes, as an expert of mixtral-8x7b (88.1 MB) goes in at most 1024 "
        "chunks, or nothing for one piece, got 1"
    )
    assert expected in refusal([*run, "transfer.chunk=1"], capsys)
    assert "got 86015" in refusal([*run, "transfer.chunk=86015"], capsys)
    model = load_model({"base": "mixtral-8x7b", "expert_bits": 4})
    check_chunk(model, 86016, "here")
    assert most_chunks(model, 86016) == limits.CHUNKS
    mixed = load_model({"base": "mixtral-8x7b", "expert_bytes_by_layer": [1024, *[2048 * 1024] * 31]})
    with pytest.raises(HardwareError, match="here: expected at least 2048 bytes"):
        check_chunk(mixed, 2047, "here")


def test_a_policy_may_not_cut_its_own_transfers_smaller(tmp_path: Path):
    model = load_model("mixtral-8x7b")
    with pytest.raises(HardwareError, match="chunk_bytes: expected at least 344064 bytes"):
        CostModel(model, load_hardware("rtx3090-epyc7532"), chunk_bytes=1)


def test_estimates_count_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    changes = {"transfer": {"chunk": [None, 200_000]}, "policies": ["lru"]}
    experiment = resolve(tmp_path, **changes)
    whole, cut = experiment.specs
    assert lookups(experiment, whole) == 32 * (8 + 3 * 2)  # layers; all experts for the prompt, two for each token
    misses = round(lookups(experiment, whole) * 0.75)
    assert chunks(experiment, whole) == (1, misses)
    assert chunks(experiment, cut) == (441, 441 * misses)
    assert seconds(experiment, [cut])[0] > seconds(experiment, [whole])[0]
    monkeypatch.setattr(run, "chosen", lambda: "simpy")
    for per_lookup, tried, expected in ((1e-9, 7.0, lookups(experiment, whole) * 1e-9), (9.0, 7.0, 7.0), (9.0, 0.0, None)):
        monkeypatch.setitem(run._S_PER_LOOKUP, "simpy", per_lookup)
        monkeypatch.setattr(run, "seconds", lambda *_, tried=tried, **__: run.Estimate(tried, 1, ()))
        assert run.before(experiment, [whole]) == pytest.approx(expected or lookups(experiment, whole) * 9.0)
    monkeypatch.setitem(run._S_PER_LOOKUP, "simpy", 2.0 / lookups(experiment, whole))
    with monkeypatch.context() as patch:
        patch.setattr(run, "seconds", lambda _, specs, *, limit_s: run.Estimate({2.0: 9.0}[limit_s] * len(specs), 1, ()))
        assert run.before(experiment, [whole]) == 2.0, "not tried, since a process takes as long to start"
        assert run.before(experiment, [whole, whole]) == 18.0
    told = describe_grid(experiment, None, 1, 1)
    assert f"chunks: 441 a transfer at most, about {441 * misses:,} in all\n" in told
    assert "chunks:" not in describe_grid(resolve(tmp_path, policies=["lru"]), None, 1, 1)


def test_a_tried_run_has_larger_chunks_where_there_are_too_many(tmp_path: Path):
    whole, cut = resolve(tmp_path, transfer={"chunk": [None, 200_000]}, policies=["lru"]).specs
    n_bytes = cut.model.expert_bytes(0)
    assert whole.in_pieces(1) is whole and ceil_div(n_bytes, 200_000) == 441
    for most, larger in (
        (441, 200_000),
        (10**9, 200_000),
        (440, ceil_div(n_bytes, 440)),
        (7, ceil_div(n_bytes, 7)),
        (1, n_bytes),
    ):
        assert cut.in_pieces(most).point == replace(cut.point, chunk_bytes=larger)


def test_a_policy_with_transfers_of_its_own_counts_its_own_chunks(tmp_path: Path):
    changes = {"policies": ["lru", "prescope"], "predictors": {"learned": "oracle"}}
    experiment = resolve(tmp_path, **changes, transfer={"chunk": "1 MB"})
    assert [chunks(experiment, spec)[0] for spec in experiment.specs] == [89, 3]


# ---------------------------------------------------------------------------------------------------------------- command line


def number_options() -> Iterator[tuple[list[str], str, Any]]:
    """Find every option that takes a number: the words of the command, the option, and what Typer knows of it."""

    def walk(app: typer.Typer, words: list[str]) -> Iterator[tuple[list[str], str, Any]]:
        for group in app.registered_groups:
            assert group.typer_instance is not None
            yield from walk(group.typer_instance, [*words, str(group.name)])
        for command in app.registered_commands:
            assert command.callback is not None
            for name, hint in get_type_hints(command.callback, include_extras=True).items():
                kind = get_args(hint)[0] if get_origin(hint) is Annotated else str
                if any(one in (int, float, list[float]) for one in (kind, *get_args(kind))):
                    info = get_args(hint)[1]
                    options = [one for one in info.param_decls or () if one.startswith("--")]
                    yield [*words, str(command.name)], options[0] if options else f"--{name.replace('_', '-')}", info

    return walk(cli._app, [])


OPTIONS = {f"{' '.join(words)} {option}": (words, option, info) for words, option, info in number_options()}


def test_all_options_that_take_numbers_are_found():
    assert {"recommend --batch", "run --jobs", "compare --repeat", "trace synthesize --seed", "profile measure --bits"} <= {
        *OPTIONS
    }
    assert len(OPTIONS) > 30


OWN_WORDS = {"trace import --calibrate", "trace calibrate --share", "trace record --temperature"}
"""Refused with words of their own, by the library behind the command."""


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - OWN_WORDS))
def test_an_unthinkable_number_of_an_option_is_refused(name: str, capsys: pytest.CaptureFixture[str]):
    words, option, info = OPTIONS[name]
    assert None not in (info.min, info.max)
    for text in ("9" * 30, "-1e99", "-99999999999999999999", "1e99", "9" * 5000, "x"):
        assert option.lstrip("-") in refusal([*words, f"{option}={text}"], capsys)


SIZES = {
    "recommend --vram": ["--hardware", "rtx3090-epyc7532", "--model", "mixtral-8x7b"],
    "recommend --ram": ["--hardware", "rtx3090-epyc7532", "--model", "mixtral-8x7b"],
    "profile measure --memory": ["mine", "--dry-run", "--no-gpu"],
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("text", ["1e99999999 GiB", "-8 GiB", "nan", "inf GB", "9" * 4500, "1e17 B"])
def test_an_unthinkable_size_of_an_option_is_refused(name: str, text: str, capsys: pytest.CaptureFixture[str]):
    *words, option = name.split()
    assert f"{option}: expected a size" in refusal([*words, *SIZES[name], f"{option}={text}"], capsys)
