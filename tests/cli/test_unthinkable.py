"""Any number of any file format, replaced by any other: one line and exit code 2, or a run that ends."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from moesim.cli.main import main
from moesim.experiment.config import Config
from moesim.hardware.schema import ProfileFile, Sourced
from moesim.hardware.types import OPERATIONS
from moesim.model import ModelSpec
from moesim.policies.options import options_of
from moesim.policies.registry import POLICIES, policy_class
from moesim.studies.whatif.knobs import KNOBS
from moesim.testing.traces import synthetic_trace
from moesim.trace.synthesis.parameter_set import NUMBERS, read_parameters
from tests.hardware.nonsense_kit import good

EXTREMES = [
    0, -1, 1, 5e-324, 1e-300, 1e-9, 0.5, 999, 1e9, 1e12, 1e18, 1e21, 1e300, 1.7e308, math.inf, -math.inf, math.nan, 2**31, 2**53,
    2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**40, 10**400, -(10**400),
]  # fmt: skip
VALUES = st.one_of(st.sampled_from(EXTREMES), st.floats(), st.integers(), st.integers(-(10**30), 10**30))
_KNOWN = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
PROPERTY = settings(
    deadline=None, max_examples=10, derandomize=True, suppress_health_check=_KNOWN, phases=[Phase.explicit, Phase.generate]
)  # a run a value: shrinking one would take longer than understanding it

MODEL: dict[str, Any] = {
    "name": "tiny", "n_layers": 2, "n_experts": 4, "top_k": 2, "hidden": 64, "expert_intermediate": 128, "n_heads": 4,
    "n_kv_heads": 4, "head_dim": 24, "vocab": 100, "n_dense_layers": 1, "dense_intermediate": 32, "n_shared": 1,
    "shared_intermediate": 16, "q_lora_rank": 8, "kv_lora_rank": 8, "rope_head_dim": 8, "nope_head_dim": 16, "v_head_dim": 8,
    "expert_bits": 16, "other_bits": 16, "kv_bits": 16, "act_bits": 16, "n_mats": 3, "units_per_expert": 1,
}  # fmt: skip
EXPERIMENT: dict[str, Any] = {
    "model": "tiny.yaml", "hardware": "mine.yaml", "trace": "tiny.safetensors",
    "workload": {"batch_size": 2, "prompt_tokens": 3, "decode_tokens": 2, "n_batches": 1, "seed": 0, "micro_batches": 1,
                 "prefill_chunk": 2},
    "cache": {"ratio": 0.5}, "policies": ["lru", "fiddler"], "transfer": {"curve": "pinned", "chunk": 100_000},
    "decision_us": 1.0, "extrapolate": True, "warm_up_steps": 1, "timeline": {"steps": 1}, "repeat": 1,
}  # fmt: skip


def machine() -> dict[str, Any]:
    """Give the profile with one of everything, made to run: the disk keeps nothing, and sizes are numbers."""
    raw = good()
    raw["backing"] = ["core1"]
    sizes = {"gpu0": 4 * 2**30, "core0": 2 * 10**9, "core1": 64 * 10**9, "disk0": 10**12}
    for name, size in sizes.items():
        raw["devices"][name]["memory_bytes"]["value"] = size
    raw["devices"]["gpu0"]["workspace_bytes"]["value"] = 2**30
    raw["devices"]["gpu0"]["launch_us"] |= {"source": "measured", "date": "2025-01", "method": "m", "repeats": 5, "spread": "0"}
    core = {key: value for key, value in raw["devices"]["core1"].items() if key not in ("launch_us", "launches")}
    counted = {key: number(2.0) for key in ("operation_us", "token_us", "latent_attention_us")}
    rates = {key: number(1e9) for key in ("read_bytes_per_s", "few_row_flops", "many_row_flops")}
    linear = {key: number(1.0) for key in ("per_expert_us", "per_row_us")} | rates | {"crossover_rows": number(8)}
    raw["devices"]["core1"] = core | {"operations": "llama.cpp", "expert_cost": linear} | counted
    apart = {key: value for key, value in linear.items() if key != "read_bytes_per_s"} | {"read_share": number(0.5)}
    raw["devices"]["core2"] = {**raw["devices"]["core1"], "cores": [3], "expert_cost": apart}
    raw["host_expert_us"] = number(1.0)
    raw["host_us"] = {operation: number(1.0) for operation in OPERATIONS}
    return raw


def number(value: float) -> dict[str, Any]:
    """Give a number that nobody measured."""
    return {"value": value, "source": "assumed", "why": "a test"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("unthinkable")
    shape = {"n_layers": 2, "n_experts": 4, "top_k": 2, "n_requests": 4, "prompt": 3, "decode": 3}
    trace = synthetic_trace(**shape, calibration=True, signals={"residual": 0.7})
    trace.write(path / "tiny.safetensors")
    return path


def numbers_in(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Name the place of every number in nested lists and mappings."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in inside:
        yield from numbers_in(inner, (*place, key))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield place


def put(raw: Any, place: tuple[Any, ...], value: Any) -> Any:
    raw = copy.deepcopy(raw)
    here = raw
    for step in place[:-1]:
        here = here[step]
    here[place[-1]] = value
    return raw


def run(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, **files: Any) -> int:
    """Run the experiment with some of its files changed; check that it ends, or is refused as it should be."""
    monkeypatch.chdir(folder)
    for name, content in ({"mine": machine(), "tiny": MODEL, "experiment": EXPERIMENT} | files).items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    capsys.readouterr()
    code = main(["run", "experiment.yaml", "--out", "out", "--jobs", "1", "--quick"])
    error = capsys.readouterr().err
    assert code in (0, 2), error
    if code:
        assert error.startswith("moesim: ") and error.count("\n") == 1, error
        assert "raised" not in error and "Error:" not in error and "assert" not in error, error
    return code


# ------------------------------------------------------------------------------------------- the samples have every number

PROFILE_PLACES = list(numbers_in(machine()))
MODEL_PLACES = list(numbers_in(MODEL))
SERVED = {
    "rate": 2.0, "burstiness": 1.0, "closed": 2, "think_s": 0.1, "n_requests": 3, "answer_tokens": 3, "until_s": 60.0,
}  # fmt: skip
EXPERIMENT_PLACES = [*numbers_in(EXPERIMENT), ("cache", "budget"), *(("workload", name) for name in SERVED)]


def number_keys(kind: Any, key: str = "") -> Iterator[str]:
    """Name every key of a pydantic model that may hold a number, in whatever unions and lists its type hides it."""
    if isinstance(kind, type) and issubclass(kind, Sourced):
        yield key
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, field in kind.model_fields.items():
            yield from number_keys(field.annotation, name)
    elif kind in (int, float):
        yield key
    else:
        for inner in get_args(kind):
            yield from number_keys(inner, key)


def test_the_samples_have_every_number_of_the_schemas():
    profile = {str(step) for place in PROFILE_PLACES for step in place}
    assert (
        set(number_keys(ProfileFile)) - {"cores", "host_shared"} <= profile and ("devices", "core0", "cores", 0) in PROFILE_PLACES
    )
    by_type = {f.name for f in dataclasses.fields(ModelSpec) if f.type in ("int", "float")}
    assert by_type == {str(place[-1]) for place in MODEL_PLACES}
    experiment = {str(place[-1]) for place in EXPERIMENT_PLACES}
    assert set(number_keys(Config)) <= experiment


# ----------------------------------------------------------------------------------------------------------------- any number


@PROPERTY
@given(place=st.sampled_from(PROFILE_PLACES), value=VALUES)
def test_any_number_in_a_profile(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: tuple[Any, ...], value: Any
):
    run(folder, capsys, monkeypatch, mine=put(machine(), place, value))


@PROPERTY
@given(place=st.sampled_from(MODEL_PLACES), value=VALUES)
def test_any_number_in_a_model(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: tuple[Any, ...], value: Any
):
    run(folder, capsys, monkeypatch, tiny=put(MODEL, place, value))


@PROPERTY
@given(place=st.sampled_from(EXPERIMENT_PLACES), value=VALUES)
def test_any_number_in_an_experiment(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: tuple[Any, ...], value: Any
):
    changed = put(EXPERIMENT, place, value)
    if place == ("cache", "budget"):
        del changed["cache"]["ratio"]
    run(folder, capsys, monkeypatch, experiment=changed)


@PROPERTY
@given(key=st.sampled_from(["requests", "prompt", "decode", "seed"]), value=VALUES)
def test_any_number_of_made_up_routing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, key: str, value: Any
):
    monkeypatch.setattr("moesim.trace.made.MAX_TOKENS", 1000)  # 100,000 take minutes
    trace = {"synthesize": "tiny-parameters.yaml", "requests": 2, "prompt": 3, "decode": 3, "seed": 0} | {key: value}
    (folder / "tiny-parameters.yaml").write_text(yaml.safe_dump(parameters()))
    run(folder, capsys, monkeypatch, experiment=EXPERIMENT | {"trace": trace})


def parameters() -> dict[str, Any]:
    raw: dict[str, Any] = yaml.safe_load(read_parameters("mixtral-8x7b").to_yaml())
    raw["shape"] |= {"n_layers": 2, "n_experts": 4}
    return raw


@PROPERTY
@given(name=st.sampled_from([*NUMBERS, "n_layers", "n_experts", "top_k"]), value=VALUES)
def test_any_parameter_of_made_up_routing(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, value: Any
):
    raw = parameters()
    group = next(group for group in ("fitted", "assumed", "shape") if name in raw[group])
    raw[group][name] = value
    (folder / "tiny-parameters.yaml").write_text(yaml.safe_dump(raw))
    trace = {"synthesize": "tiny-parameters.yaml", "requests": 2, "prompt": 3, "decode": 3}
    run(folder, capsys, monkeypatch, experiment=EXPERIMENT | {"trace": trace})


@PROPERTY
@given(text=st.one_of(VALUES.map(str), st.sampled_from(["1e999999999", "9" * 4000, "0.5,0.5,nan", "-", "0x10", "1_0", "٣"])))
def test_any_recall_of_a_predictor(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, text: str):
    changed = EXPERIMENT | {"policies": ["dali"], "predictors": {"residual": f"synthetic:{text}"}}
    run(folder, capsys, monkeypatch, experiment=changed)


def option_places() -> list[tuple[str, str]]:
    """List every option of every policy that takes a number."""
    found = []
    for name in POLICIES:
        cls = policy_class(name)
        found += [(name, one.name) for one in options_of(cls).values() if re.search("integer|number", one.expected)]
    return found


@PROPERTY
@given(where=st.sampled_from(option_places()), value=VALUES)
def test_any_number_of_a_policy(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: tuple[str, str], value: Any
):
    name, option = where
    changed = EXPERIMENT | {"policies": [{"name": name, option: value}], "predictors": {"*": "oracle"}}
    run(folder, capsys, monkeypatch, experiment=changed)


ALL_KNOBS = [*KNOBS, "transfer.chunk", "devices.gpu0.launch_us", "model.hidden", "warm_up_steps"]
KNOB_TEXTS = st.one_of(VALUES.map(str), st.sampled_from(["1e999999999", "1e999", "9" * 400, "9" * 4000, "1/0", "٣", "²"]))
KNOB_VALUES = ["x{}", "{}", "+{}%", "-{}%", "x1/{}", "{} GB/s", "{} GiB", "gen{}", "{}->{}", "{}xDDR5-{}"]


@PROPERTY
@given(knob=st.sampled_from(ALL_KNOBS), form=st.sampled_from(KNOB_VALUES), value=KNOB_TEXTS)
def test_any_number_of_a_knob(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, knob: str, form: str, value: str
):
    """Refused or carried out; a run that does not fit any more is a failed line of the table, with one line of its own."""
    run(folder, capsys, monkeypatch)
    words = ["whatif", "experiment.yaml", "--quick", "--no-next", "--jobs", "1", "--vary", f"{knob} {form.replace('{}', value)}"]
    code = main(words)
    error = capsys.readouterr().err
    assert code in (0, 1, 2), error
    assert "Traceback" not in error and "raised" not in error and "AssertionError" not in error
    assert code != 2 or error.count("\n") == 1, error
