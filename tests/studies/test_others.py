"""Questions to ``moesim recommend``: the best is the best, what does not fit is not offered, flags exist, intervals, prompts."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from moesim.cli.recommend import recommend as command
from moesim.core.files import FILE
from moesim.core.student import Mean
from moesim.core.table import Format
from moesim.core.units import digits
from moesim.errors import CapacityError, ConfigError, InputError
from moesim.experiment import run_experiment
from moesim.experiment.config import load_config, parse_config
from moesim.experiment.resolve import Experiment
from moesim.experiment.store import read_summary
from moesim.studies.advice.candidates import (
    NOT_SHARED,
    SHIPPED,
    Candidate,
    Misfit,
    Space,
    experiment_of,
    threshold,
)
from moesim.studies.advice.engines import Command, commands, describe, engines
from moesim.studies.advice.question import Asked, find_routing, look_up
from moesim.studies.advice.recommend import (
    Advice,
    indistinguishable,
    interval,
    recommend,
)
from moesim.studies.advice.search import gpu_share, speed
from moesim.studies.advice.show import output, sooner, write_folder
from moesim.studies.identify.model_error import ModelError, shipped
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from moesim.trace.synthesis import read_parameters, synthesize
from tests.studies.recommend_kit import GIB, MODEL, asked, four_layers, space_of


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    return four_layers(tmp_path_factory.mktemp("routing"))


@pytest.fixture(scope="module")
def advice(trace: str) -> Advice:
    return recommend(asked(trace))


# ---- the search


def test_the_best_is_the_best_of_all(advice: Advice, trace: str, tmp_path: Path):
    """Simulate every number of every family, and take the fastest over all requests; caches are slower on this machine."""
    space = space_of(asked(trace), tmp_path)
    every = [space.candidate(family, n) for family in space.families for n in range(family.low, family.high + 1)]
    fits = [one for one in every if isinstance(one, Candidate)]
    assert 10 < len(fits) < len(every)
    paths = [str(path) for path in space.routing.write(tmp_path)]
    raw = experiment_of(space.setting, paths, fits, 6)
    rows = run_experiment(Experiment(parse_config(raw, "all"), "all")).rows
    logs = [sum(math.log(speed(row)) for row in rows[place :: len(fits)]) / len(paths) for place in range(len(fits))]
    assert advice.best.speed.value == pytest.approx(math.exp(max(logs)))
    assert advice.best.speed.n == 5
    best = fits[logs.index(max(logs))]
    assert (best.gpu_experts, describe(best, space.setting)) == (
        advice.best.candidate.gpu_experts, describe(advice.best.candidate, space.setting)
    )  # fmt: skip


def test_caches_decode_all_tokens_while_the_grid_is_searched(tmp_path: Path):
    """They begin empty: over the first tokens they are slower than they will be."""
    signals = {"gate_next1": 0.8, "gate_next2": 0.7, "gate_next3": 0.7, "residual": 0.7}
    made = synthetic_trace(n_layers=4, n_experts=8, top_k=2, n_requests=5, prompt=8, decode=40, calibration=True, signals=signals)
    advice = recommend(asked(str(made.write(tmp_path / "longer.safetensors")), decode=40))
    tokens = {one: row["decode_tokens"] for one, row in advice.found.screened.items()}
    caches = {one.family for one in SHIPPED} | {"lru", "dali", "hybrimoe-paper", "fiddler", "prescope"}
    assert {one.family: n for one, n in tokens.items() if n == 40} == dict.fromkeys(caches, 40)
    assert {n for one, n in tokens.items() if one.family not in caches} == {32}
    for one, rows in advice.found.final.items():
        assert [row["decode_tokens"] for row in rows] == [40] * 5
        assert (rows[0] is advice.found.screened[one]) == (one.family in caches), "the first group is simulated in full once"
    assert re.search(r"slower on 32 tokens of the first request, tokens/s \(fixed placements\): ", output(advice, Format.TABLE))
    assert re.search(r"slower on 40 tokens of the first request, tokens/s \(what fills the GPU", output(advice, Format.TABLE))
    assert "32 tokens decoded" in output(advice, Format.TABLE).partition("Speed against")[2]


@pytest.mark.parametrize(
    "changes", [{}, {"context": 6000}, {"vram": "2GiB"}, {"ram": "2GiB", "vram": "3.5GiB"}, {"batch": 3, "prompt": 4}]
)
def test_nothing_that_does_not_fit_is_offered(trace: str, changes: dict[str, Any]):
    question = asked(trace, **changes, decode=4)
    advice = recommend(question)
    setting, model = advice.setting, advice.setting.model
    assert advice.runnable and all(one.candidate.runnable for one in advice.runnable)
    for one, row in advice.found.screened.items():
        assert one.gpu_bytes <= setting.vram_bytes and one.host_bytes <= setting.ram_bytes
        assert row["peak_memory_bytes.gpu0"] <= one.gpu_bytes
        # By hand: what is on the GPU, the rest that is never elsewhere than there, and the cache of keys and values.
        if one.family in ("expert-layers", "expert-set", "frequent-expert-set"):
            kv = setting.context * setting.asked.batch * model.kv_bytes_per_token
            attention = 4 * (model.attention_bytes + model.dense_bytes())
            least = one.gpu_experts * model.expert_bytes(0) + attention + model.head_bytes + kv + GIB
            copied = 2 if one.family != "expert-layers" else model.n_experts  # llama.cpp copies all of a layer's for prompts
            assert least <= one.gpu_bytes <= least + model.embedding_bytes + copied * model.expert_bytes(0)
            on_host = (32 - (one.gpu_experts if one.family == "expert-layers" else 0)) * model.expert_bytes(0)
            assert on_host <= one.host_bytes <= on_host + model.embedding_bytes


def test_a_longer_context_leaves_less_room_for_experts(trace: str, tmp_path: Path):
    def most(context: int) -> int:
        space = space_of(asked(trace, context=context), tmp_path)
        family = next(f for f in space.families if f.name == "expert-set")
        papers, _ = space.papers()
        return len(space.feasible(family)) * 1000 + max(one.gpu_experts for one in papers)

    assert most(14) > most(40_000)


def test_feasible_ranges_are_what_trying_all_gives(trace: str, tmp_path: Path):
    for changes in ({}, {"vram": "2.2GiB"}, {"ram": "1.5GiB", "vram": "6GiB"}):
        space = space_of(asked(trace, **changes), tmp_path)
        for family in space.families:
            numbers = range(family.low, family.high + 1)
            all_that_fit = [n for n in numbers if isinstance(space.candidate(family, n), Candidate)]
            assert sorted(space.feasible(family)) == all_that_fit
            if not all_that_fit:
                assert (family.never or "needs") in space.misfit(family)


def test_ram_too_small_is_met_by_more_on_the_gpu_or_refused(trace: str, tmp_path: Path):
    small = space_of(asked(trace, ram="1.5GiB", vram="6GiB"), tmp_path)
    family = {f.name: f for f in small.families}
    assert 4 not in small.feasible(family["expert-layers"])  # all experts on the host take 3 GiB
    assert isinstance(small.candidate(family["expert-set"], 0), Misfit)  # whose engine keeps all of them there
    with pytest.raises(CapacityError, match=r"expected a placement of mixtral-8x7b that fits .* got none: needs .* on cpu0"):
        recommend(asked(trace, ram="1GiB", vram="2GiB"))


def test_one_memory_has_no_use_for_copies_of_experts(trace: str, tmp_path: Path):
    """Experts go to the CPU only where the GPU may not have all of the memory, and then as few as need be."""
    found = {}
    for vram, ram in (("8GiB", "8GiB"), ("2.2GiB", "8GiB"), ("2.2GiB", "4GiB")):
        space = space_of(asked(trace, hardware="ryzen-ai-max-395", vram=vram, ram=ram), tmp_path)
        assert space.shipped()[0] == space.papers()[0] == []
        assert "share one memory" in space.shipped()[1]["llama-cpp-cache"] and "share one memory" in space.papers()[1]["lru"]
        families = {family.name: family for family in space.families}
        assert families.keys() == {"all-gpu", "expert-layers"} and families["expert-layers"].fullest
        found[vram, ram] = [*space.feasible(families["expert-layers"])]
    assert found["8GiB", "8GiB"][-1] == 0 and found["2.2GiB", "8GiB"][-1] > 0
    assert found["2.2GiB", "4GiB"] == [], "the experts on the CPU take the same memory"


def test_papers_are_ranked_beside_and_lossy_ones_only_on_request(advice: Advice, trace: str):
    screened = {one.family for one in advice.found.screened if not one.runnable}
    assert {"fiddler", "lru", "dali"} <= screened | set(advice.found.no_fit)
    assert not any("daop" in name for name in screened)
    assert all(not one.commands for one in advice.papers)
    lossy = recommend(asked(trace, lossy=True, decode=4))
    daop = [one for one in lossy.papers if one.candidate.family.startswith("daop")]
    assert daop and all(one.fresh is not None and 0 < one.fresh <= 1 for one in daop)
    assert all(one.fresh is None for one in lossy.papers if one not in daop)
    assert "not exact" in output(lossy, Format.TABLE)


# ---- flags


def flags_in(text: str) -> list[str]:
    return re.findall(r"(?<![\w-])--?[a-z][\w-]*", text)


def test_every_entry_of_the_table_has_a_version_and_a_source():
    names = [engine.name for engine in engines()]
    assert names == ["llama.cpp", "llama.cpp expert cache", "ktransformers", "exllamav3", "freetoken", "sglang", "vllm"]
    for engine in engines():
        assert re.search(r"\d", engine.checked) and re.fullmatch(r"\d{4}-\d\d-\d\d", engine.date)
        for flag, facts in engine.flags.items():
            assert flag.startswith("--") and facts["source"] and facts["meaning"] and facts["values"], flag


def test_every_flag_that_is_printed_is_in_the_table(trace: str, tmp_path: Path):
    known = {engine.name: set(engine.flags) for engine in engines()}
    short = {name for engine in engines() for facts in engine.flags.values() for name in facts["short"]}
    seen = set()
    for changes in ({"vram": "3GiB"}, {"vram": "24GiB"}, {"bits": 16.0, "vram": "24GiB"}):
        space = space_of(asked(trace, **changes), tmp_path)
        placed = [space.candidate(family, number) for family in space.families for number in space.feasible(family)]
        for one in (*placed, *space.shipped()[0]):
            assert isinstance(one, Candidate)
            for typed in commands(one, space.setting):
                words = [word for word in typed.words if word.startswith("-") and word != "-m"]
                seen.update((typed.engine, word) for word in words)
                assert set(words) <= known[typed.engine], typed
                assert {w for w in flags_in(f"{typed.condition} {typed.remark}") if w.startswith("--")} <= known[typed.engine]
    assert {("llama.cpp", "--n-cpu-moe"), ("llama.cpp", "--cpu-moe"), ("ktransformers", "--kt-num-gpu-experts")} <= seen
    assert {("vllm", "--max-model-len"), ("sglang", "--model-path")} <= seen
    assert {("exllamav3", "--moe_cpu_split"), ("exllamav3", "--moe_cpu_offload"), ("freetoken", "--moe-cache-size")} <= seen
    whole = output(recommend(asked(trace, decode=4)), Format.TABLE)
    of_ours = {"--vram", "--ram", "--set", "--out", "--context", "--help"}
    assert set(flags_in(whole)) - of_ours - {"-m"} <= set().union(*known.values()) | short


def test_commands_say_the_placement(trace: str, tmp_path: Path):
    space = space_of(asked(trace, vram="24GiB", context=100, batch=2, prompt=4), tmp_path)
    family = {f.name: f for f in space.families}

    def typed(name: str, number: int) -> str:
        one = space.candidate(family[name], number)
        assert isinstance(one, Candidate)
        return str(commands(one, space.setting)[0])

    assert "--n-gpu-layers all --n-cpu-moe 2 --ctx-size 200 --parallel 2" in typed("expert-layers", 2)
    assert "--cpu-moe" in typed("expert-layers", 4) and "--n-cpu-moe" not in typed("expert-layers", 4)
    assert "moe" not in typed("expert-layers", 0)
    assert "--n-gpu-layers 3 " in typed("whole-layers", 3) and "--n-gpu-layers all" in typed("whole-layers", 5)
    assert "--kt-num-gpu-experts 5 --kt-expert-placement-strategy uniform" in typed("expert-set", 5)
    assert "--kt-expert-placement-strategy frequency --init-expert-location COUNTS.pt" in typed("frequent-expert-set", 5)
    assert "--model_dir MODEL --moe_cpu_offload 3 --cache_size 256" in typed("exllamav3-layers", 3)  # of 2 x 100 tokens
    assert "--moe_cpu_split 7 --cache_size 256" in typed("exllamav3-split", 7)
    two = space.candidate(family["expert-layers"], 2)
    assert isinstance(two, Candidate)
    pattern = re.search(r"'(blk.*)=CPU'", commands(two, space.setting)[0].remark)
    assert pattern is not None
    names = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in (0, 1, 2, 11) for part in ("up", "down", "gate")]
    assert [bool(re.search(pattern[1], name)) for name in names] == [True] * 6 + [False] * 6


def test_systems_of_releases_fill_the_memory(trace: str, tmp_path: Path):
    space = space_of(asked(trace, context=100, decode=4, vram="4.5GiB"), tmp_path)
    found, left_out = space.shipped()
    by = {one.family: one for one in found}
    assert set(by) == {one.family for one in SHIPPED} and not left_out and all(one.runnable for one in found)
    expert, vram = space.setting.model.expert_bytes(0), space.setting.vram_bytes
    for name, one in by.items():
        assert one.gpu_bytes <= vram - (GIB if name == "llama-cpp-fit" else 0), name
        room = GIB + 8 * expert if name == "llama-cpp-fit" else expert  # it places whole layers
        assert one.slots == 32 or one.gpu_bytes > vram - room - 2 * expert, name
    fit, cache = by["llama-cpp-fit"], by["llama-cpp-cache"]
    assert fit.gpu_experts in (8, 16, 24) and fit.host_bytes < cache.host_bytes  # whole layers, which the host does not hold
    (typed,) = commands(fit, space.setting)
    assert typed.engine == "llama.cpp" and not {"--n-gpu-layers", "--n-cpu-moe"} & set(typed.words)
    (typed,) = commands(by["freetoken-hybrid"], space.setting)
    assert f"--moe-strategy hybrid --moe-cache-size {cache.slots}" in str(typed) and "ft bench bw" in typed.remark


def test_every_engine_has_a_command_for_its_fastest_placement(advice: Advice):
    typed = output(advice, Format.TABLE).partition("What to type")[2].partition("Speed against")[0]
    for engine in engines():
        mine = [one for one in advice.found.screened if one.family in engine.expresses]
        if mine and not any(one.candidate in mine for one in advice.runnable):
            best = max(mine, key=lambda one: speed(advice.found.screened[one]))
            assert "slower than the finalists; on the first request its best is" in typed
            assert f"tokens/s, {best.title}: " in typed
            assert all(f"  {command}\n" in typed for command in commands(best, advice.setting))


# ---- what is printed and written


def test_json_holds_everything(advice: Advice):
    found = json.loads(output(advice, Format.JSON))
    assert found["best"] == found["runnable"][0]
    assert found["n_simulations"] == advice.found.n_simulations and found["asked"]["vram"] == "3GiB"
    assert {one["placement"] for one in found["curve"]} == {one.title for one in advice.found.screened}
    for one in (*found["runnable"], *found["papers"]):
        assert 0 < one["low"] <= one["high"] and one["low"] <= 1.2 * one["decode_tokens_per_s"]
        assert one["label"] in ("spec-sheet", "synthetic", "assumed") and one["groups"] == 5
    assert {one["name"] for one in found["engines"]} == {engine.name for engine in engines()}
    assert sum(found["limit"]["shares"].values()) == pytest.approx(1)
    assert {one["name"] for one in found["model_error"]} == {field.name for field in fields(ModelError)}
    assert all(found[key] is not None for key in ("model", "hardware", "routing", "left_out", "failed", "warnings"))


@pytest.mark.parametrize("form", list(Format))
def test_other_forms(advice: Advice, form: Format):
    text = output(advice, form)
    assert text.endswith("\n")
    if form in (Format.TABLE, Format.MD):
        for words in (
            "You can run this now",
            "No released engine does this",
            "Its time goes to",
            "90 % interval",
            "How sure",
            "simulations",
        ):
            assert words in text
        assert "█" in text
    else:
        assert advice.best.candidate.title in text


def test_a_policy_without_its_curve_is_left_out_with_what_to_do(trace: str, tmp_path: Path):
    found, left_out = space_of(asked(trace, hardware="rtx3090ti-ryzen9950x"), tmp_path).papers()
    assert "prescope" not in {one.family for one in found}
    assert left_out["prescope"] == (
        "it copies experts as 'chunked', and the profile has no such curve for cpu0->gpu0 (it has pinned, pageable); "
        "'moesim profile measure' measures one"
    )
    found, left_out = space_of(asked(trace), tmp_path).papers()
    assert "prescope" in {one.family for one in found} and "prescope" not in left_out


def test_the_folder_holds_an_experiment_that_runs(advice: Advice, tmp_path: Path):
    out = tmp_path / "advice"
    write_folder(advice, out)
    assert {path.name for path in out.iterdir()} == {
        FILE,         "best.yaml", "recommendation.json", "recommendation.md", "runs.csv", "summary.json"
    }  # fmt: skip
    assert len(read_summary(out)["runs"]) == 5 * len(advice.found.final)
    config = load_config(out / "best.yaml")
    rows = run_experiment(Experiment(config, "best.yaml")).rows
    assert rows[0]["decode_tokens_per_s"] == pytest.approx(advice.best.speed.value, rel=0.1)


def test_a_gguf_file_is_the_model(trace: str, tmp_path: Path):
    pytest.importorskip("gguf")
    from tests.model.gguf_kit import Q8_0, attention, basic, ends, experts

    path = tmp_path / "four.gguf"
    w = basic(path, "llama", 4)
    for layer in range(4):
        attention(w, layer)
        experts(w, layer, 8, 512, Q8_0)
    ends(w)
    w.close()
    question = asked(trace, model=str(path), vram="1.004GiB", decode=4)
    advice = recommend(question)
    assert advice.setting.model.expert_bytes(0) == 3 * 256 * 512 // 32 * 34
    llama = next(one for one in advice.runnable if one.commands[0].engine == "llama.cpp")
    assert "--model four.gguf" in str(llama.commands[0])
    write_folder(advice, tmp_path / "out")
    assert run_experiment(Experiment(load_config(tmp_path / "out" / "best.yaml"), "best")).rows[0]["error"] is None
    assert json.loads((tmp_path / "out" / "recommendation.json").read_text())["asked"]["model"] == str(path)
    with pytest.raises(ConfigError, match=r"--bits: the tensors of .*four\.gguf have their own bits"):
        recommend(replace(question, bits=4.0))


# ---- options that change something, and lines for what is wrong


def test_options_change_the_answer(advice: Advice, trace: str):
    fewer_bits = recommend(asked(trace, bits=3.0, decode=4))
    assert fewer_bits.setting.model.expert_bits == fewer_bits.setting.model.other_bits == 3.0
    assert fewer_bits.best.candidate.gpu_experts > advice.best.candidate.gpu_experts
    assert advice.setting.model.expert_bits == 4.5  # of a model that is given with 16
    assert look_up(Asked("gpt-oss-20b", "rtx3090-epyc7532"), Path()).model.expert_bits == 4.25  # has its own


EAGER = {"base": "qwen3-30b-a3b", "n_layers": 4, "n_experts": 8, "top_k": 2}
"""Experts are read in 3 us, and a layer of the eager profile launches kernels for half a millisecond."""


@pytest.fixture(scope="module")
def eager(trace: str) -> Advice:
    return recommend(asked(trace, model=EAGER, decode=4, vram="1.4GiB"))


def test_each_placement_has_the_costs_of_its_engine(eager: Advice):
    """The profile's own software launches kernels for half a millisecond a layer; it must not advise users of other engines."""
    engines = dict.fromkeys(("llama-cpp", "llama-cpp-fit", "llama-cpp-cache"), "llama.cpp")
    engines |= {"kt-expert": "ktransformers", "exllamav3": "exllamav3", "all-gpu": "vllm", "freetoken": "freetoken"}
    seen = set()
    for one in (*eager.runnable, *eager.papers):
        name = one.candidate.policy["name"]
        engine = engines.get(name, "")
        assert (f"costs of {engine} (cuda linux)" in one.notes) if engine else "costs of " not in one.notes, name
        words = eager.found.machines[one.candidate].machine.get("engine", "")  # what the interval goes by
        assert words.startswith(f"{engine} (") if engine else not words
        seen.add(engine)
    assert {"", "llama.cpp"} <= seen
    assert eager.best.candidate.gpu_experts > 0
    first = eager.found.screened
    layers = {one.number: speed(row) for one, row in first.items() if one.family == "expert-layers"}
    assert layers[min(layers)] > layers[max(layers)]  # the fewer layers on the CPU, the faster, as in every public sweep


def test_an_engine_that_the_machine_cannot_run_is_left_out(trace: str):
    radeon = {"base": "rtx3090-epyc7532", "machine.backend": "vulkan"}
    found = recommend(asked(trace, model=EAGER, decode=4, vram="1.4GiB", hardware=radeon))
    assert {one.candidate.kind for one in found.runnable} <= OF_LLAMA_CPP
    assert "got ktransformers, which runs on cuda" in found.found.no_fit["expert-set"]
    assert all("(vulkan linux)" in one.notes for one in found.runnable)
    assert {command.engine for one in found.runnable for command in one.commands} <= {"llama.cpp", "llama.cpp expert cache"}
    assert "got vllm, which runs on cuda, hip" in found.found.no_fit["all-gpu"]


OF_LLAMA_CPP = {"expert-layers", "whole-layers", "all-gpu", "llama-cpp-fit", "llama-cpp-cache", "llama-cpp-class-lru"}


def test_the_interval_is_weighted_by_all_time_of_the_gpu(eager: Advice):
    """Of a step, some is the GPU's and the link's, and some the processor's; what is sure of one is not of the other."""
    shares = {one.candidate.title: one.gpu_share for one in eager.runnable}
    assert len(set(shares.values())) > 1
    for one in eager.runnable:
        assert one.gpu_share == pytest.approx(gpu_share(eager.found.limits[one.candidate]))
        low, high = one.costs
        assert one.low <= one.speed.value * low * 1.0001 and one.high >= one.speed.value * high / 1.0001


def test_routing_with_a_models_statistics_or_assumed_and_others_to_compare_with(tmp_path: Path):
    question = Asked("mixtral-8x7b", "rtx3090-epyc7532", prompt=3, decode=2)
    model = look_up(question, tmp_path).model
    fitted, others = find_routing(model, question, "test")
    assert (fitted.label, fitted.origin, len(fitted.groups)) == ("synthetic mixtral-8x7b", "synthetic", 5)
    assert [one.label for one in others] == ["synthetic mixtral-8x7b, seed 1"] and not fitted.why
    for changed, rate in ((replace(model, name="unheard-of", n_layers=3), None), (model, "50%@2")):
        middle, others = find_routing(changed, replace(question, hit_rate=rate), "test")
        lifts = [float(one.label.removeprefix("assumed, lift ")) for one in (others[0], middle, others[1])]
        assert lifts == sorted(set(lifts)) and middle.why.startswith("LRU lift d = ")
        assert ("--hit-rate" in middle.why) == (rate is None)
        assert all(group.n_layers == changed.n_layers for one in (middle, *others) for group in one.groups)
    with pytest.raises(ConfigError, match="expected --trace or --hit-rate, got both"):
        find_routing(model, replace(question, trace="x", hit_rate="50%@2"), "test")


def test_made_up_requests_are_those_that_are_made_at_once(tmp_path: Path):
    question = Asked("mixtral-8x7b", "rtx3090-epyc7532", batch=2, prompt=3, decode=2)
    made, _ = find_routing(look_up(question, tmp_path).model, question, "test")
    whole = synthesize(read_parameters("mixtral-8x7b"), n_requests=10, n_prompt=3, n_decode=2, scores=True)
    for number, group in enumerate(made.groups):
        np.testing.assert_array_equal(group.experts, whole.experts[10 * number : 10 * number + 10])
    paths = [*made.write(tmp_path, slice(1)), *made.write(tmp_path, slice(1, None))]
    assert [Trace.read(path).digest for path in paths] == [group.digest for group in made.groups]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vram": "lots"}, "recommend: --vram: expected a size such as '8 GiB', got 'lots'"),
        ({"vram": "0.5GiB"}, "--vram: expected more than the 1 GiB that software takes on gpu0"),
        ({"vram": "1.1GiB"}, "expected a placement of mixtral-8x7b that fits rtx3090-epyc7532, got none: needs"),
        ({"ram": "0GiB"}, "recommend: --ram: expected a size of at least 1 byte, got '0GiB'"),
        ({"bits": 0.0}, "recommend: --bits: expected a number of bits from 0.1 to 64, got 0"),
        ({"context": 10}, "recommend: --context: expected at least --prompt and --decode together, 14, got 10"),
        ({"model": "mixtrall"}, "unknown model 'mixtrall'; did you mean 'mixtral-8x7b'?"),
        ({"hardware": "rtx3091"}, "unknown hardware profile 'rtx3091'"),
        ({"hardware": "rtx3090x2-epyc7532"}, "expected a machine with one GPU and one host, got 2 GPUs (gpu0, gpu1)"),
        ({"hardware": "ryzen5900x"}, "expected a machine with one GPU and one host, got none"),
        ({"hardware": "zen4-2core-disk"}, "--ram: zen4-2core-disk keeps all experts on disk0"),
        ({"trace": "mini-qwen3"}, "--trace mini-qwen3: expected 4 layers of 8 experts, top 2, as mixtral-8x7b has"),
        ({"prompt": 9000}, "9000"),
        ({"batch": 7}, "7"),
        ({"model": "no.gguf"}, "no.gguf: expected a GGUF file, got: No such file or directory"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(trace: str, changes: dict[str, Any], expected: str):
    with pytest.raises(InputError) as caught:
        recommend(replace(asked(trace), **changes))
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_experts_on_a_disk(tmp_path: Path):
    """No processor next to the one that is the accelerator: caches only, and nothing that an engine's flags say."""
    made = synthetic_trace(n_layers=4, n_experts=64, top_k=6, n_requests=6, prompt=8, decode=6)
    question = asked(str(made.write(tmp_path / "lite.safetensors")), hardware="zen4-2core-disk", ram=None, bits=16.0)
    small = {"base": "deepseek-v2-lite", "n_layers": 4}
    advice = recommend(replace(question, model=small, vram="2.5GiB", context=None, prompt=4, decode=2))
    assert {one.candidate.family for one in advice.papers} & {"lru"}
    assert all(one.candidate.family == "all-gpu" for one in advice.runnable)
    low, _ = advice.best.costs
    known = {"cpu": 0.0, "gpu": 1.0, "copies": 0.0}
    assert low < shipped().factors(advice.setting.hardware, known)[0]  # disks are assumed to be off more


# ---- the command


def test_the_command(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    app = typer.Typer()
    app.command("recommend")(command)
    app.command("other")(lambda: None)
    words = ["--model", json.dumps(MODEL), "--hardware", "rtx3090-epyc7532", "--vram", "3GiB", "--prompt", "8", "--decode", "4"]
    out = tmp_path / "out"
    code = app(
        args=["recommend", *words, "--trace", trace, "--jobs", "1", "-o", "json", "--out", str(out)], standalone_mode=False
    )
    assert code == 0 and json.loads(capsys.readouterr().out)["best"]["runnable"]
    assert (out / "recommendation.json").is_file()
    other = tmp_path / "mine"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="expected a new folder or a result of `moesim recommend`"):
        app(args=["recommend", *words, "--trace", trace, "--out", str(other)], standalone_mode=False)
    assert [path.name for path in other.iterdir()] == ["notes.txt"]


def test_the_interval_grows_with_each_thing_that_is_unsure():
    speed = Mean(20.0, 1.1, 5)
    plain = interval(Mean(20.0, 1.0, 5), (0.8, 1.0))
    assert plain == (pytest.approx(16.0), pytest.approx(20.0))
    wider = interval(speed, (0.8, 1.0))
    widest = interval(speed, (0.8, 1.0), routing=0.7)
    assert widest[0] < wider[0] < plain[0] and widest[1] > wider[1] > plain[1]
    assert interval(speed, (0.8, 1.0), 0.7) == pytest.approx(interval(speed, (0.8, 1.0), 1 / 0.7))


def test_placements_are_told_apart_by_their_ratio_on_the_same_requests():
    best = [10.0, 20.0, 30.0, 15.0, 25.0]
    assert not indistinguishable(best, [one * 0.97 for one in best])  # speeds vary threefold, the ratio does not
    assert indistinguishable(best, [one * factor for one, factor in zip(best, (0.9, 1.1, 0.95, 1.04, 1.0), strict=True)])
    assert not indistinguishable([10.0], [10.0])  # of one request nothing is known


@pytest.fixture(scope="module")
def with_prompts(trace: str) -> Advice:
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


@pytest.mark.parametrize(
    ("changes", "rows"),
    [({"prompt": 100}, 100), ({"prompt": 100, "batch": 3}, 300), ({"prompt": 2000}, 512), ({"prompt": 1, "batch": 4}, None)],
)
def test_the_threshold_is_a_full_chunk_and_more_than_decoding_has(changes: dict[str, Any], rows: int | None):
    assert threshold(replace(Asked("m", "h"), **changes)) == rows


def test_additions_are_tried_where_they_are_to_the_fastest(with_prompts: Advice, trace: str, tmp_path: Path):
    screened = with_prompts.found.screened
    families = {one.name: one for one in space_of(asked(trace, bits=8.0, vram="5GiB"), tmp_path).families}
    kinds = {"prefill": "expert-set front-expert-set frequent-expert-set", "update": "expert-set frequent-expert-set"}
    for adds, others in kinds.items():
        (one,) = [one for one in screened if one.family.endswith(f"+{adds}")]
        fastest = max((other for other in screened if other.family in others.split()), key=lambda other: speed(screened[other]))
        assert one.kind == fastest.family and fastest.number is not None
        fits = Space(with_prompts.setting, with_prompts.routing).feasible(families[one.family])
        assert one.number == max(n for n in fits if n <= fastest.number) < fastest.number
    assert len([one for one in screened if one.family == "front-expert-set"]) == 1


def test_the_best_of_kt_kernel_is_the_best_of_all(with_prompts: Advice, trace: str, tmp_path: Path):
    """Simulate every number of every strategy and addition on the first request."""
    space = space_of(asked(trace, bits=8.0, vram="5GiB"), tmp_path)
    every = [placed(space, one.name, n) for one in space.families if "expert-set" in one.name for n in space.feasible(one)]
    assert len({one.family for one in every}) == 8
    raw = experiment_of(space.setting, [str(path) for path in space.routing.write(tmp_path)[:1]], every, 6)
    rows = run_experiment(Experiment(parse_config(raw, "all"), "all")).rows
    mine = max(speed(row) for one, row in with_prompts.found.screened.items() if "expert-set" in one.family)
    assert mine == pytest.approx(max(map(speed, rows)))
    tried = {one.title: row for one, row in with_prompts.found.screened.items()}
    by = {one.title: row for one, row in zip(every, rows, strict=True)}
    (title,) = [title for title in tried if "+prefill" in title]
    assert by[title]["decode_tokens_per_s"] == by[title.replace("+prefill", "")]["decode_tokens_per_s"]  # decoding is the same
    assert tried[title]["ttft_mean_ns"] == pytest.approx(by[title]["ttft_mean_ns"])


def test_an_earlier_first_token_is_told_with_its_flags(with_prompts: Advice):
    found = {one: row for one, row in with_prompts.found.screened.items() if "+update" not in one.family}
    runnable = [one for one in with_prompts.runnable if one.candidate in found]
    (one,) = [one for one in found if "+prefill" in one.family]
    for first in (0.01, 100.0):
        screened = {**found, one: {**found[one], "ttft_mean_ns": first * 1e9}}
        shown = replace(with_prompts, runnable=runnable, found=replace(with_prompts.found, screened=screened))
        told = output(shown, Format.TABLE).partition("What to type")[2].partition("Speed against")[0]
        assert (f"{one.title}, prompts on the GPU: first token {digits(first, 2)} instead of" in told) == (first < 1)
        assert (str(commands(one, with_prompts.setting)[0]) in told) == (first < 1)
    assert sooner(with_prompts, next(one for one in with_prompts.found.screened if "+update" in one.family)) == []
