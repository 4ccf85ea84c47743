"""kt-kernel's strategies in ``moesim recommend``, and prompts that it computes on the GPU: memory, flags, and what is tried."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesim.core.table import Format
from moesim.core.units import digits
from moesim.experiment import run_experiment
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.studies.advice.candidates import NOT_SHARED, Candidate, Space, experiment_of, threshold
from moesim.studies.advice.engines import Command, commands, describe
from moesim.studies.advice.question import Asked
from moesim.studies.advice.recommend import Advice, recommend
from moesim.studies.advice.search import speed
from moesim.studies.advice.show import output, sooner
from tests.studies.recommend_kit import asked, four_layers, space_of


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return four_layers(tmp_path_factory.mktemp("routing"))


@pytest.fixture(scope="module")
def advice(trace: str) -> Advice:
    return recommend(asked(trace, bits=8.0, vram="5GiB"))


def placed(space: Space, name: str, number: int) -> Candidate:
    one = space.candidate(next(family for family in space.families if family.name == name), number)
    assert isinstance(one, Candidate), one
    return one


def typed(space: Space, name: str, number: int) -> Command:
    (command,) = commands(placed(space, name, number), space.setting)
    return command


def test_a_prompt_on_the_gpu_takes_the_memory_of_a_layer(trace: str, tmp_path: Path):
    space = space_of(asked(trace, bits=8.0, vram="5GiB"), tmp_path)
    layer = 8 * space.setting.model.expert_bytes(0)
    for name in ("expert-set", "frequent-expert-set", "front-expert-set"):
        alone, prompts = placed(space, name, 3), placed(space, f"{name}+prefill", 3)
        assert prompts.gpu_bytes == alone.gpu_bytes + layer and prompts.host_bytes == alone.host_bytes
        if name != "front-expert-set":
            assert placed(space, f"{name}+update", 3).gpu_bytes == prompts.gpu_bytes
    most = {family.name: max(space.feasible(family), default=0) for family in space.families}
    assert most["expert-set"] - 2 == most["expert-set+prefill"] == most["expert-set+update"]  # two of each of four layers


def test_flags_of_prompts_on_the_gpu(trace: str, tmp_path: Path):
    eight = space_of(asked(trace, bits=8.0, vram="5GiB"), tmp_path)
    long = "--kt-gpu-prefill-token-threshold 8 "
    assert "--kt-expert-placement-strategy front-loading" in str(typed(eight, "front-expert-set", 3))
    assert long + "--chunked-prefill-size 512" in str(typed(eight, "expert-set+prefill", 3))
    update = typed(eight, "frequent-expert-set+update", 3)
    assert long + "--kt-enable-dynamic-expert-update" in str(update)
    assert "of FP8 weights" in update.condition and "prompts have 8 tokens or more: " in update.condition
    assert "prompts have" not in typed(eight, "frequent-expert-set+prefill", 3).condition
    assert "--kt-method FP8" in str(update) and "--kt-method LLAMAFILE" in str(typed(eight, "expert-set", 3))
    assert "threshold" not in str(typed(eight, "expert-set", 3))
    sixteen = space_of(asked(trace, bits=16.0, vram="12GiB"), tmp_path)
    assert "--kt-method BF16" in str(typed(sixteen, "expert-set+prefill", 3))
    said = describe(placed(eight, "front-expert-set+prefill", 3), eight.setting)
    assert said.startswith("the first 12 experts, layer by layer, on the GPU") and "chunks of 8 tokens or more" in said


@pytest.mark.parametrize("bits", [4.5, 8.5])
def test_weights_that_only_the_cpu_reads_leave_prompts_there(trace: str, tmp_path: Path, bits: float):
    space = space_of(asked(trace, bits=bits, vram="5GiB"), tmp_path)
    never = [family for family in space.families if family.never]
    assert {family.name.partition("+")[2] for family in never} == {"prefill", "update"}
    assert all(not space.feasible(family) and space.misfit(family) == NOT_SHARED for family in never)


def test_why_prompts_stay_on_the_cpu_is_said_once(trace: str):
    told = output(recommend(asked(trace, decode=2)), Format.TABLE)
    assert re.search(rf"[\w-]+\+prefill, [\w-]+\+update: {re.escape(NOT_SHARED)}", told)
    assert told.count(NOT_SHARED) == 1


@pytest.mark.parametrize(
    ("changes", "rows"),
    [({"prompt": 100}, 100), ({"prompt": 100, "batch": 3}, 300), ({"prompt": 2000}, 512), ({"prompt": 1, "batch": 4}, None)],
)
def test_the_threshold_is_a_full_chunk_and_more_than_decoding_has(changes: dict[str, Any], rows: int | None):
    assert threshold(replace(Asked("m", "h"), **changes)) == rows


def test_additions_are_tried_where_they_are_to_the_fastest(advice: Advice, trace: str, tmp_path: Path):
    screened = advice.found.screened
    families = {one.name: one for one in space_of(asked(trace, bits=8.0, vram="5GiB"), tmp_path).families}
    kinds = {"prefill": "expert-set front-expert-set frequent-expert-set", "update": "expert-set frequent-expert-set"}
    for adds, others in kinds.items():
        (one,) = [one for one in screened if one.family.endswith(f"+{adds}")]
        fastest = max((other for other in screened if other.family in others.split()), key=lambda other: speed(screened[other]))
        assert one.kind == fastest.family and fastest.number is not None
        fits = Space(advice.setting, advice.routing).feasible(families[one.family])
        assert one.number == max(n for n in fits if n <= fastest.number) < fastest.number
    assert len([one for one in screened if one.family == "front-expert-set"]) == 1


def test_the_best_of_kt_kernel_is_the_best_of_all(advice: Advice, trace: str, tmp_path: Path):
    """Simulate every number of every strategy and addition on the first request."""
    space = space_of(asked(trace, bits=8.0, vram="5GiB"), tmp_path)
    every = [placed(space, one.name, n) for one in space.families if "expert-set" in one.name for n in space.feasible(one)]
    assert len({one.family for one in every}) == 8
    raw = experiment_of(space.setting, [str(path) for path in space.routing.write(tmp_path)[:1]], every, 6)
    rows = run_experiment(Experiment(parse_config(raw, "all"), "all")).rows
    mine = max(speed(row) for one, row in advice.found.screened.items() if "expert-set" in one.family)
    assert mine == pytest.approx(max(map(speed, rows)))
    tried = {one.title: row for one, row in advice.found.screened.items()}
    by = {one.title: row for one, row in zip(every, rows, strict=True)}
    (title,) = [title for title in tried if "+prefill" in title]
    assert by[title]["decode_tokens_per_s"] == by[title.replace("+prefill", "")]["decode_tokens_per_s"]  # decoding is the same
    assert tried[title]["ttft_mean_ns"] == pytest.approx(by[title]["ttft_mean_ns"])


def test_an_earlier_first_token_is_told_with_its_flags(advice: Advice):
    found = {one: row for one, row in advice.found.screened.items() if "+update" not in one.family}
    runnable = [one for one in advice.runnable if one.candidate in found]
    (one,) = [one for one in found if "+prefill" in one.family]
    for first in (0.01, 100.0):
        screened = {**found, one: {**found[one], "ttft_mean_ns": first * 1e9}}
        shown = replace(advice, runnable=runnable, found=replace(advice.found, screened=screened))
        told = output(shown, Format.TABLE).partition("What to type")[2].partition("Speed against")[0]
        assert (f"{one.title}, prompts on the GPU: first token {digits(first, 2)} instead of" in told) == (first < 1)
        assert (str(commands(one, advice.setting)[0]) in told) == (first < 1)
    assert sooner(advice, next(one for one in advice.found.screened if "+update" in one.family)) == []
