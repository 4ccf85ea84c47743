"""Placements of all engines: what fits, their commands and flags, routing, and how they are compared."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from moesim.core.table import Format
from moesim.errors import ConfigError, InputError
from moesim.experiment import run_experiment
from moesim.experiment.config import load_config, parse_config
from moesim.experiment.resolve import Experiment
from moesim.studies.advice.candidates import NOT_SHARED, SHIPPED, Candidate, Misfit, Space, experiment_of, threshold
from moesim.studies.advice.engines import Command, commands, describe, engines
from moesim.studies.advice.others import Others, compare, routings
from moesim.studies.advice.question import Asked, look_up
from moesim.studies.advice.recommend import Recommendation, recommend
from moesim.studies.advice.screen import document, output, text, write_folder
from moesim.studies.identify.model_error import shipped
from moesim.testing.traces import synthetic_trace
from tests.studies.recommend_kit import GIB, asked, four_layers, space_of

LARGE = {"base": "qwen3-30b-a3b", "n_layers": 4, "n_experts": 8, "top_k": 2, "expert_intermediate": 14336}
"""A model that all engines have."""
EIGHT = {"bits": "8", "vram": "5GiB"}


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return four_layers(tmp_path_factory.mktemp("routing"))


@pytest.fixture(scope="module")
def answer(trace: str) -> Recommendation:
    return recommend(asked(trace, model=LARGE, vram="2.4GiB"), all_engines=True, quick=True)


def compared(question: Asked, folder: Path) -> Others:
    return compare(look_up(question, folder), {}, folder, jobs=1)


def placed(space: Space, name: str, number: int) -> Candidate:
    one = space.candidate(next(family for family in space.families if family.name == name), number)
    assert isinstance(one, Candidate), one
    return one


def typed(space: Space, name: str, number: int) -> Command:
    (command,) = commands(placed(space, name, number), space.setting)
    return command


# ---- the comparison


def test_each_engine_has_a_placement_or_a_reason(answer: Recommendation):
    assert answer.others is not None
    mine = {one.engine.name for one in answer.others.placed}
    assert mine | set(answer.others.without) == {engine.name for engine in engines()} and not mine & set(answer.others.without)
    assert {"llama.cpp", "ktransformers", "freetoken", "llama.cpp expert cache"} <= mine
    speeds = [one.decode.value for one in answer.others.placed]
    assert speeds == sorted(speeds, reverse=True)
    best = answer.others.best("llama.cpp")
    assert best is not None and best.command is not None and "COUNTS.pt" not in best.command.words and not best.doubt
    page = output(answer, Format.TABLE)
    for one in answer.others.placed:
        assert (str(one.command) if one.command else one.engine.unknown) in page
    for why in answer.others.without.values():
        assert why in page
    every = answer.setting.model.n_layers * answer.setting.model.n_experts
    for one in (one for one in answer.others.placed if one.candidate.slots):  # a cache is on the GPU once it is full
        assert f"{100 * one.candidate.slots / every:.0f} %" in next(
            line for line in page.splitlines() if line.startswith(one.engine.name) and one.candidate.title in line
        )
    values = document(answer)
    assert [one["placement"] for one in values["engines"]] == [one.candidate.title for one in answer.others.placed]
    assert [one["decode_tokens_per_s"]["value"] for one in values["engines"]] == speeds


def test_speeds_and_ratios_are_of_the_same_requests(answer: Recommendation, trace: str, tmp_path: Path):
    """Simulate the placements of one budget again, as an experiment with the whole trace's first request."""
    assert answer.others is not None
    space = space_of(asked(trace, model=LARGE, vram="2.4GiB"), tmp_path)
    (path,) = [str(space.routing.trace.write(tmp_path / "routing.safetensors"))]
    fixed = [one for one in answer.others.placed if one.candidate.budget is None]
    raw = experiment_of(space.setting, [path], [one.candidate for one in fixed])
    rows = run_experiment(Experiment(parse_config(raw, "all"), "all")).rows
    assert [one.decode.value for one in fixed] == pytest.approx([float(row["decode_tokens_per_s"]) for row in rows])
    (own,) = [one for one in fixed if one.engine.name == "llama.cpp"]
    assert own.ratio == 1.0 and answer.point is not None and own.candidate.policy == answer.point.place.policy
    assert all(one.ratio == pytest.approx(one.decode.value / own.decode.value) for one in answer.others.placed)
    assert len(fixed) > 3 and len({one.ratio for one in answer.others.placed}) > 3


def test_the_interval_covers_other_routing(tmp_path: Path):
    """Of the best it always does; here of a cache whose flag is not known, so that it is never the best."""
    setting = look_up(asked(None, hit_rate="50%@2"), tmp_path)
    alone, every = (compare(setting, {}, tmp_path / str(all_of), every=all_of, jobs=1) for all_of in (False, True))
    (narrow, wide) = (next(one for one in found.placed if one.candidate.family == "llama-cpp-cache") for found in (alone, every))
    assert narrow.decode.value == wide.decode.value and [one.label[:13] for one in every.also] == ["assumed, lift"] * 2
    assert wide.decode.low < narrow.decode.low and narrow.decode.high < wide.decode.high


@pytest.mark.parametrize("changes", [{}, {"context": 6000}, {"vram": "2GiB"}, {"ram": "2GiB", "vram": "3.5GiB"}, {"batch": 3}])
def test_nothing_that_does_not_fit_is_offered(trace: str, changes: dict[str, Any], tmp_path: Path):
    """By hand: what is on the GPU, the rest that is never elsewhere, and the cache of keys and values."""
    question = asked(trace, decode=4, prompt=4) if "batch" not in changes else asked(trace, decode=2, prompt=4)
    found = compared(replace(question, **changes), tmp_path)
    setting = look_up(replace(question, **changes), tmp_path)
    model = setting.model
    assert found.placed
    for one in (each.candidate for each in found.placed):
        assert one.gpu_bytes <= setting.vram_bytes and one.host_bytes <= setting.ram_bytes
        if one.family in ("expert-set", "frequent-expert-set"):
            kv = setting.context * setting.asked.batch * model.kv_bytes_per_token
            attention = 4 * (model.attention_bytes + model.dense_bytes())
            least = one.gpu_experts * model.expert_bytes(0) + attention + model.head_bytes + kv + GIB
            assert least <= one.gpu_bytes <= least + model.embedding_bytes + 2 * model.expert_bytes(0)
            assert 32 * model.expert_bytes(0) <= one.host_bytes <= 32 * model.expert_bytes(0) + model.embedding_bytes


@pytest.mark.parametrize("changes", [{}, {"vram": "2.2GiB"}, {"ram": "1.5GiB", "vram": "6GiB"}])
def test_feasible_ranges_are_what_trying_all_gives(trace: str, tmp_path: Path, changes: dict[str, Any]):
    space = space_of(asked(trace, **changes), tmp_path)
    for family in space.families:
        all_that_fit = [n for n in range(family.low, family.high + 1) if isinstance(space.candidate(family, n), Candidate)]
        assert sorted(space.feasible(family)) == all_that_fit
        if not all_that_fit:
            assert (family.never or "needs") in space.misfit(family)
    if "ram" in changes:  # whose engine keeps all experts there
        assert isinstance(space.candidate(next(f for f in space.families if f.name == "expert-set"), 0), Misfit)


def test_one_memory_has_no_use_for_copies_of_experts(trace: str, tmp_path: Path):
    space = space_of(asked(trace, hardware="ryzen-ai-max-395", vram="8GiB", ram="8GiB"), tmp_path)
    assert not space.shipped()[0] and "share one memory" in space.shipped()[1]["llama-cpp-cache"]
    assert [family.name for family in space.families] == ["all-gpu"]


def test_systems_of_releases_fill_the_memory(trace: str, tmp_path: Path):
    space = space_of(asked(trace, context=100, decode=4, vram="4.5GiB"), tmp_path)
    found, left_out = space.shipped()
    by = {one.family: one for one in found}
    assert set(by) == {one.family for one in SHIPPED} and not left_out
    expert, vram = space.setting.model.expert_bytes(0), space.setting.vram_bytes
    assert all(one.slots == 32 or vram - 3 * expert < one.gpu_bytes <= vram for one in by.values())
    (hybrid,) = commands(by["freetoken-hybrid"], space.setting)
    assert f"--moe-strategy hybrid --moe-cache-size {by['llama-cpp-cache'].slots}" in str(hybrid)
    assert "ft bench bw" in hybrid.remark
    longer = space_of(asked(trace, context=40_000, decode=4, vram="4.5GiB"), tmp_path).shipped()[0]
    assert max(one.slots for one in longer) < max(one.slots for one in found), "a longer context leaves less room"


def test_an_engine_that_the_machine_cannot_run_is_left_out(trace: str, tmp_path: Path):
    radeon = {"base": "rtx3090-epyc7532", "machine.backend": "vulkan"}
    found = compared(asked(trace, decode=4, hardware=radeon), tmp_path)
    assert {one.engine.name for one in found.placed} <= {"llama.cpp", "llama.cpp expert cache"}
    assert "does not run on vulkan" in found.without["ktransformers"] and "does not run on vulkan" in found.without["vllm"]
    (family,) = [one for one in space_of(asked(trace, hardware=radeon), tmp_path).families if one.name == "all-gpu"]
    assert family.policy(0) == {"name": "all-gpu", "engine": "llama.cpp"}


@pytest.mark.parametrize("engine", ["freetoken", "exllamav3"])
def test_another_engine_is_the_headline_where_it_is_asked_for(engine: str, trace: str, tmp_path: Path):
    found = recommend(asked(trace, model=LARGE, vram="2.4GiB", engine=engine, decode=4))
    assert found.placed is not None and found.command is not None and found.engine.name == engine == found.command.engine
    assert found.begin == found.placed.decode and found.others is not None
    other = found.others.best(engine)
    assert other is not None and other.engine.name != engine
    assert f"best other engine: {other.engine.name}" in output(found, Format.TABLE)
    write_folder(found, tmp_path / "out")
    row = run_experiment(Experiment(load_config(tmp_path / "out" / "best.yaml"), "best")).rows[0]
    assert row["error"] is None and str(row["policy"]).startswith(engine)


def test_experts_on_a_disk(tmp_path: Path):
    """No processor next to the one that is the accelerator: everything in memory, or nothing that flags say."""
    made = synthetic_trace(n_layers=4, n_experts=64, top_k=6, n_requests=2, prompt=8, decode=6)
    small = {"base": "deepseek-v2-lite", "n_layers": 4}
    path = str(made.write(tmp_path / "lite.safetensors"))
    question = Asked(small, "zen4-2core-disk", bits="16", prompt=4, decode=2, trace=path, context=16)
    with pytest.raises(ConfigError, match="expected a processor next to the GPU, got experts on disk0; compare with --all-eng"):
        recommend(question)
    found = recommend(question, all_engines=True)
    assert found.command is None and found.others is not None and "disk0" in found.misfit
    assert {one.candidate.family for one in found.others.placed} <= {"all-gpu"}
    low, _ = shipped().factors(found.setting.hardware, {"cpu": 0.0, "gpu": 0.0, "disk": 1.0})
    assert low < shipped().factors(found.setting.hardware, {"cpu": 0.0, "gpu": 1.0, "copies": 0.0})[0]  # assumed to be off more


# ---- flags


def test_every_entry_of_the_table_has_a_version_and_a_source():
    names = [engine.name for engine in engines()]
    assert names == ["llama.cpp", "llama.cpp expert cache", "ktransformers", "exllamav3", "freetoken", "sglang", "vllm"]
    for engine in engines():
        assert re.search(r"\d", engine.checked) and re.fullmatch(r"\d{4}-\d\d-\d\d", engine.date)
        for flag, facts in engine.flags.items():
            assert flag.startswith("--") and facts["source"] and facts["meaning"] and facts["values"], flag


def test_every_flag_of_a_command_is_in_the_table(trace: str, tmp_path: Path):
    known = {engine.name: set(engine.flags) for engine in engines()}
    seen = set()
    for changes in ({"vram": "3GiB"}, {"vram": "24GiB"}, {"bits": "16", "vram": "24GiB"}):
        space = space_of(asked(trace, **changes), tmp_path)
        every = [space.candidate(family, number) for family in space.families for number in space.feasible(family)]
        for one in (*every, *space.shipped()[0]):
            assert isinstance(one, Candidate)
            for command in commands(one, space.setting):
                words = {word for word in command.words if word.startswith("-") and word != "-m"}
                words |= set(re.findall(r"(?<![\w-])--[a-z][\w-]*", f"{command.condition} {command.remark}"))
                assert words <= known[command.engine], command
                seen.update((command.engine, word) for word in words)
    assert {("vllm", "--max-model-len"), ("sglang", "--model-path"), ("ktransformers", "--kt-num-gpu-experts")} <= seen
    assert {("exllamav3", "--moe_cpu_split"), ("exllamav3", "--moe_cpu_offload"), ("freetoken", "--moe-cache-size")} <= seen


def test_commands_say_the_placement(trace: str, tmp_path: Path):
    space = space_of(asked(trace, vram="24GiB", context=100, batch=2, prompt=4), tmp_path)

    def llama(family: str, number: int, option: str) -> Command:
        policy = {"name": "llama-cpp", option: number}
        return commands(Candidate(family, number, policy, 0, 0, 0), space.setting)[0]

    layers = [str(llama("expert-layers", number, "n_cpu_moe")) for number in (0, 2, 4)]
    assert "moe" not in layers[0] and "--n-gpu-layers all --n-cpu-moe 2 --ctx-size 200 --parallel 2" in layers[1]
    assert "--cpu-moe" in layers[2] and "--n-cpu-moe" not in layers[2]
    whole = [str(llama("whole-layers", number, "n_gpu_layers")) for number in (3, 5)]
    assert "--n-gpu-layers 3 " in whole[0] and "--n-gpu-layers all" in whole[1]
    assert "--kt-num-gpu-experts 5 --kt-expert-placement-strategy uniform" in str(typed(space, "expert-set", 5))
    frequent = str(typed(space, "frequent-expert-set", 5))
    assert "--kt-expert-placement-strategy frequency --init-expert-location COUNTS.pt" in frequent
    assert "--model_dir MODEL --moe_cpu_offload 3 --cache_size 256" in str(typed(space, "exllamav3-layers", 3))  # of 2 x 100
    assert "--moe_cpu_split 7 --cache_size 256" in str(typed(space, "exllamav3-split", 7))
    pattern = re.search(r"'(blk.*)=CPU'", llama("expert-layers", 2, "n_cpu_moe").remark)
    assert pattern is not None
    names = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in (0, 1, 2, 11) for part in ("up", "down", "gate")]
    assert [bool(re.search(pattern[1], name)) for name in names] == [True] * 6 + [False] * 6


def test_prompts_on_the_gpu_take_the_memory_of_a_layer_and_weights_that_are_shared(trace: str, tmp_path: Path):
    eight = space_of(asked(trace, **EIGHT), tmp_path)
    layer = 8 * eight.setting.model.expert_bytes(0)
    for name in ("expert-set", "frequent-expert-set", "front-expert-set"):
        alone, prompts = placed(eight, name, 3), placed(eight, f"{name}+prefill", 3)
        assert prompts.gpu_bytes == alone.gpu_bytes + layer and prompts.host_bytes == alone.host_bytes
        if name != "front-expert-set":
            assert placed(eight, f"{name}+update", 3).gpu_bytes == prompts.gpu_bytes
    long = "--kt-gpu-prefill-token-threshold 8 "
    assert "--kt-expert-placement-strategy front-loading" in str(typed(eight, "front-expert-set", 3))
    assert long + "--chunked-prefill-size 512" in str(typed(eight, "expert-set+prefill", 3))
    update = typed(eight, "frequent-expert-set+update", 3)
    assert long + "--kt-enable-dynamic-expert-update" in str(update) and "--kt-method FP8" in str(update)
    assert "of FP8 weights" in update.condition and "prompts have 8 tokens or more: " in update.condition
    assert "--kt-method LLAMAFILE" in str(typed(eight, "expert-set", 3)) and "threshold" not in str(typed(eight, "expert-set", 3))
    sixteen = space_of(asked(trace, bits="16", vram="12GiB"), tmp_path)
    assert "--kt-method BF16" in str(typed(sixteen, "expert-set+prefill", 3))
    said = describe(placed(eight, "front-expert-set+prefill", 3), eight.setting)
    assert said.startswith("the first 12 experts, layer by layer, on the GPU") and "chunks of 8 tokens or more" in said
    four = space_of(asked(trace), tmp_path)
    never = [family for family in four.families if family.never]
    assert {family.name.partition("+")[2] for family in never} == {"prefill", "update"}
    assert all(not four.feasible(family) and four.misfit(family) == NOT_SHARED for family in never)


@pytest.mark.parametrize(
    ("changes", "rows"),
    [({"prompt": 100}, 100), ({"prompt": 100, "batch": 3}, 300), ({"prompt": 2000}, 512), ({"prompt": 1, "batch": 4}, None)],
)
def test_the_threshold_is_a_full_chunk_and_more_than_decoding_has(changes: dict[str, Any], rows: int | None):
    assert threshold(replace(Asked("m", "h"), **changes)) == rows


# ---- routing


def test_routing_with_a_models_statistics_or_assumed_and_others_to_compare_with(trace: str, tmp_path: Path):
    question = Asked("mixtral-8x7b", "rtx3090-epyc7532", batch=2, prompt=3, decode=2)
    model = look_up(question, tmp_path).model
    fitted = routings(model, question)
    assert [one.label for one in fitted] == ["synthetic mixtral-8x7b", "synthetic mixtral-8x7b, seed 1"]
    assert (
        not fitted[0].why and {one.trace.n_layers for one in fitted} == {32} and fitted[0].trace.digest != fitted[1].trace.digest
    )
    for changed, rate in ((replace(model, name="unheard-of", n_layers=3), None), (model, "50%@2")):
        middle, low, high = routings(changed, replace(question, hit_rate=rate))
        lifts = [float(one.label.removeprefix("assumed, lift ")) for one in (low, middle, high)]
        assert lifts == sorted(set(lifts)) and middle.why.startswith("LRU lift d = ")
        assert ("--hit-rate" in middle.why) == (rate is None)
        assert {one.trace.n_layers for one in (middle, low, high)} == {changed.n_layers}
    given = routings(replace(model, n_layers=4), replace(question, trace=trace))
    assert given[0].label == trace and len(given[0].trace.requests.n_prompt) == 2 and len(given) == 2


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"trace": "mini-qwen3"}, "--trace mini-qwen3: expected 4 layers of 8 experts, top 2, as mixtral-8x7b has"),
        ({"hit_rate": "50%@2"}, "expected --trace or --hit-rate, got both"),
        ({"prompt": 9000, "context": 9100}, "9000"),
        ({"batch": 7}, "7"),
    ],
)
def test_a_wrong_trace_is_said_in_one_line(trace: str, changes: dict[str, Any], expected: str):
    with pytest.raises(InputError) as caught:
        recommend(replace(asked(trace), **changes), quick=True)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_two_gpus_are_compared_with_compare(trace: str):
    found = recommend(asked(trace, hardware="rtx3090x2-epyc7532"), all_engines=True, quick=True)
    assert found.command is not None and found.others is None and not json.loads(output(found, Format.JSON))["engines"]
    assert "All engines are compared on a machine with one GPU; this one has 2." in text(found)
    assert "not varied with several GPUs: PCIe, GPU, memory of a GPU" in text(found)
