"""Quantised copies, and the shadow that decodes with one: against what is written out by hand on tiny random models."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from moesim.recorder import RecordError
from moesim.recorder.generation import KeyValues, Sampling, cache_name, whole_cache
from moesim.recorder.hooks import RoutingHooks, Wanted
from moesim.recorder.recording import Plan, record_requests
from moesim.recorder.routers import find_routers
from moesim.recorder.shadow import (
    KINDS,
    Alignment,
    Shadow,
    ShadowObserver,
    ShadowRouting,
    normal_float_levels,
    quantise,
    quantised_copy,
)
from moesim.recorder.signals import pack
from moesim.trace import Signal, Trace
from moesim.trace.predictors import RecordedSignal
from moesim.trace.stats.prediction import recall, signal_recall, top_ids

PROMPT = [5, 17, 3, 99, 42, 7, 250]
N_DECODE = 8
COMMON: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

#: Appendix E of QLoRA (Dettmers et al. 2023).
PUBLISHED_LEVELS = [
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
]  # fmt: skip


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    config = MixtralConfig(
        **COMMON, intermediate_size=48, num_hidden_layers=4, num_key_value_heads=1, head_dim=16,
        num_local_experts=8, num_experts_per_tok=2, tie_word_embeddings=True,
    )  # fmt: skip
    return MixtralForCausalLM(config).eval()


def deepseek() -> DeepseekV2ForCausalLM:
    torch.manual_seed(0)
    config = DeepseekV2Config(
        **COMMON, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3, num_key_value_heads=2,
        first_k_dense_replace=1, n_routed_experts=20, n_shared_experts=1, num_experts_per_tok=3,
        q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
        topk_method="greedy", routed_scaling_factor=1.0,
    )  # fmt: skip
    return DeepseekV2ForCausalLM(config).eval()


def gpt_oss() -> GptOssForCausalLM:
    torch.manual_seed(0)
    config = GptOssConfig(
        **COMMON, intermediate_size=48, num_hidden_layers=4, num_key_value_heads=1, head_dim=16,
        num_local_experts=4, num_experts_per_tok=2, sliding_window=4,
    )  # fmt: skip
    return GptOssForCausalLM(config).eval()


def hooks_on(model: Any) -> RoutingHooks:
    return RoutingHooks(find_routers(model), Wanted(scores=True))


@dataclass
class Run:
    """What a model did, with a copy of its KV cache before every decode step."""

    tokens: list[int]
    experts: np.ndarray
    cache: Any
    before: list[Any]


def decode(model: Any, prompt: list[int] = PROMPT, n_decode: int = N_DECODE) -> Run:
    tokens, before = list(prompt), []
    with torch.no_grad(), hooks_on(model) as hooks:
        cache = whole_cache(model)
        output = model(input_ids=torch.tensor([tokens]), use_cache=True, **{cache_name(model): cache})
        for _ in range(n_decode):
            before.append(copy.deepcopy(cache))
            tokens.append(int(output.logits[0, -1].argmax()))
            output = model(input_ids=torch.tensor([tokens[-1:]]), use_cache=True, **{cache_name(model): cache})
    return Run(tokens, hooks.take().arrays["experts"][len(prompt) :], cache, before)


@pytest.fixture(scope="module")
def model() -> MixtralForCausalLM:
    return mixtral()


@pytest.fixture(scope="module")
def run(model: MixtralForCausalLM) -> Run:
    return decode(model)


@pytest.fixture(scope="module")
def coarse(model: MixtralForCausalLM) -> MixtralForCausalLM:
    return quantised_copy(model, "nf4", find_routers(model))


def shadowed(shadow: Any, run: Run, tokens: int, kv: int, **options: Any) -> ShadowRouting:
    return Shadow(shadow, Alignment(tokens, kv)).decode(run.tokens, len(PROMPT), KeyValues.of(run.cache), **options)


# --- quantisation


def test_int8_by_hand() -> None:
    weight = torch.tensor([[127.0, 1.4, -63.6], [0.0, 0.0, 0.0], [-254.0, 3.2, 0.9]])
    expected = [[127.0, 1.0, -64.0], [0.0, 0.0, 0.0], [-254.0, 4.0, 0.0]]  # steps of 1, none, 2
    assert quantise(weight, "int8").tolist() == expected


def test_nf4_levels_are_the_published_ones() -> None:
    levels = normal_float_levels()
    np.testing.assert_allclose(levels, PUBLISHED_LEVELS, atol=1e-6)
    assert levels[0] == -1 and levels[7] == 0 and levels[-1] == 1


def test_nf4_by_hand() -> None:
    weight = torch.zeros(2, 80)  # 160 weights: two blocks of 64 across the rows, and one of 32
    weight[0, :4] = torch.tensor([2.0, -2.0, 0.02, 1.0])  # of 2: 1, -1, 0.01 -> 0, 0.5 -> 0.4407 (0.5626 is farther)
    weight[0, 64] = -0.5
    weight[1, 79] = 3.0
    got = quantise(weight, "nf4")
    np.testing.assert_allclose(got[0, :4], [2.0, -2.0, 0.0, 2 * PUBLISHED_LEVELS[12]], rtol=1e-6)
    assert got[0, 64] == -0.5 and got[1, 79] == 3.0
    assert np.count_nonzero(got.numpy()) == 5


@pytest.mark.parametrize("kind", KINDS)
def test_worst_error_and_idempotence(kind: str) -> None:
    weight = torch.randn(7, 128, generator=torch.Generator().manual_seed(1)) * 3
    once = quantise(weight, kind)
    assert torch.equal(quantise(once, kind), once) and not torch.equal(once, weight)
    error = (once - weight).abs()
    if kind == "fp16":  # half a unit in the last of 11 places
        assert (error <= weight.abs() * 2**-11).all()
    elif kind == "int8":
        bound = weight.abs().amax(dim=1, keepdim=True) / 254
        assert (error <= bound * (1 + 1e-5)).all() and error.max() > 0.9 * bound.min()
    else:
        widest = max(np.diff(PUBLISHED_LEVELS)) / 2
        largest = weight.reshape(-1, 64).abs().amax(dim=1, keepdim=True)
        assert (error.reshape(-1, 64) <= largest * widest * (1 + 1e-5)).all()


def test_the_copy_keeps_what_published_systems_keep(model: MixtralForCausalLM) -> None:
    original = {name: values.clone() for name, values in model.state_dict().items()}
    twin = quantised_copy(model, "int8", find_routers(model))
    changed = {name for name, values in twin.state_dict().items() if not torch.equal(values, original[name])}
    layers = range(4)
    wanted = {f"model.layers.{n}.self_attn.{p}_proj.weight" for n in layers for p in "qkvo"}
    wanted |= {f"model.layers.{n}.mlp.experts.{p}_proj" for n in layers for p in ("gate_up", "down")}
    assert changed == wanted
    assert all(torch.equal(values, original[name]) for name, values in model.state_dict().items())
    experts = "model.layers.2.mlp.experts.gate_up_proj"
    for number in range(8):
        assert torch.equal(twin.state_dict()[experts][number], quantise(original[experts][number], "int8"))
    assert twin.lm_head.weight is twin.model.embed_tokens.weight


def test_half_precision_rounds_everything(model: MixtralForCausalLM) -> None:
    twin = quantised_copy(model, "fp16", find_routers(model))
    for name, values in twin.state_dict().items():
        assert values.dtype == torch.float32 and torch.equal(values, model.state_dict()[name].half().float())


def test_transposed_experts_are_quantised_by_output_channel() -> None:
    model = gpt_oss()
    twin = quantised_copy(model, "int8", find_routers(model))
    before, after = (m.model.layers[0].mlp.experts.down_proj[1] for m in (model, twin))  # (inputs, outputs)
    assert torch.equal(after, quantise(before.T, "int8").T)
    assert torch.equal(twin.model.layers[0].mlp.experts.down_proj_bias, model.model.layers[0].mlp.experts.down_proj_bias)


def test_refusals(model: MixtralForCausalLM) -> None:
    with pytest.raises(RecordError, match="unknown quantisation 'int4'; did you mean 'int8'"):
        quantised_copy(model, "int4", find_routers(model))
    with torch.device("meta"):
        elsewhere = MixtralForCausalLM(model.config)
    with pytest.raises(RecordError, match="expected all weights in memory"):
        quantised_copy(elsewhere, "int8", [])
    with pytest.raises(RecordError, match="KV alignment period: expected at least 0"):
        Alignment(1, -1)


# --- the shadow


@pytest.mark.parametrize("build", [mixtral, deepseek, gpt_oss])
def test_an_exact_copy_aligned_every_token_knows_everything(build: Any) -> None:
    model = build()
    main = decode(model)
    routing = shadowed(copy.deepcopy(model), main, 1, 1)
    assert routing.tokens.tolist() == main.tokens[len(PROMPT) :]
    np.testing.assert_array_equal(routing.experts, main.experts)


def test_without_alignment_it_is_the_quantised_model_alone(coarse: MixtralForCausalLM, run: Run) -> None:
    alone = decode(coarse)
    routing = shadowed(coarse, run, 0, 0)
    assert routing.tokens.tolist() == alone.tokens[len(PROMPT) :] != run.tokens[len(PROMPT) :]
    np.testing.assert_array_equal(routing.experts, alone.experts)


@pytest.mark.parametrize(("token_period", "kv_period"), [(1, 1), (1, 3), (0, 3), (2, 0)])
def test_kv_alignment_by_hand(coarse: MixtralForCausalLM, run: Run, token_period: int, kv_period: int) -> None:
    with torch.no_grad(), hooks_on(coarse) as hooks:
        output = coarse(input_ids=torch.tensor([PROMPT]), use_cache=True)
        for step in range(N_DECODE):
            token = int(output.logits[0, -1].argmax())
            if token_period and step % token_period == 0:
                token = run.tokens[len(PROMPT) + step]
            cache = getattr(output, cache_name(coarse))
            if kv_period and step % kv_period == 0:
                cache = copy.deepcopy(run.before[step])
            output = coarse(input_ids=torch.tensor([[token]]), use_cache=True, **{cache_name(coarse): cache})
    routing = shadowed(coarse, run, token_period, kv_period)
    by_hand = hooks.take().arrays
    np.testing.assert_array_equal(routing.experts, by_hand["experts"][len(PROMPT) :])
    np.testing.assert_array_equal(routing.scores, by_hand["scores"][len(PROMPT) :])
    if kv_period:  # the replaced cache matters
        never = shadowed(coarse, run, token_period, 0)
        assert np.abs(never.scores - routing.scores).max() > 1e-3


@pytest.mark.parametrize("period", [1, 3, 4])
def test_tokens_are_aligned_at_exactly_the_steps_of_the_period(coarse: MixtralForCausalLM, run: Run, period: int) -> None:
    foreign = next(t for t in range(300) if t not in run.tokens)
    asked = []

    def choose(logits: torch.Tensor) -> int:
        asked.append(logits.shape)
        return foreign

    routing = shadowed(coarse, run, period, 1, choose=choose)
    main = run.tokens[len(PROMPT) :]
    assert routing.tokens.tolist() == [main[i] if i % period == 0 else foreign for i in range(N_DECODE)]
    assert asked == ([] if period == 1 else [(300,)] * N_DECODE)  # once a step: a sampler stays in step with the model's


def test_coarse_weights_cost_recall(model: MixtralForCausalLM, coarse: MixtralForCausalLM, run: Run) -> None:
    fine = quantised_copy(model, "fp16", find_routers(model))
    by_kind = {name: recall(shadowed(s, run, 1, 1).experts, run.experts).mean() for name, s in [("nf4", coarse), ("fp16", fine)]}
    assert 2 / 8 < by_kind["nf4"] < 1
    assert by_kind["nf4"] < by_kind["fp16"]


def test_a_window_that_forgot_is_refused() -> None:
    model = gpt_oss()
    with torch.no_grad():
        cache = getattr(model(input_ids=torch.tensor([PROMPT]), use_cache=True), cache_name(model))
    with pytest.raises(RecordError, match="KV cache of layer 0: expected all 7 positions, got the last 3"):
        KeyValues.of(cache)


def test_nothing_decoded_is_refused(coarse: MixtralForCausalLM, run: Run) -> None:
    with pytest.raises(RecordError, match="at least one decoded token"):
        Shadow(coarse, Alignment()).decode(PROMPT, len(PROMPT), KeyValues.of(run.cache))


# --- the signal


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_recorded_beside_the_model(model: MixtralForCausalLM, temperature: float) -> None:
    sampling, seeds, prompts = Sampling(temperature), [3, 4], [PROMPT, PROMPT[:4]]
    exact = ShadowObserver(model, "fp16", Alignment(0, 0), sampling, seeds)
    exact._shadow = Shadow(model, Alignment(0, 0))  # the model itself, which draws what the model drew
    plan = Plan(observer=exact, observer_facts=exact.facts)
    for recording in record_requests(model, prompts, [N_DECODE, 3], seeds=seeds, sampling=sampling, plan=plan):
        found = recording.signals["shadow-fp16:T0:KV0"]
        assert found.ids is None and found.first_row == recording.n_prompt
        signal = Signal(exact.name, np.arange(recording.n_decode), found.scores, found.ids)
        np.testing.assert_array_equal(top_ids(signal, slice(None), 2), recording.experts[recording.n_prompt :])


def test_the_signal_in_a_trace(model: MixtralForCausalLM, tmp_path: Path) -> None:
    observer = ShadowObserver(model, "nf4", Alignment(), Sampling(), [0])
    (recorded,) = record_requests(model, [PROMPT], [N_DECODE], plan=Plan(observer=observer, observer_facts=observer.facts))
    found, facts = recorded.signals[observer.name], observer.facts[observer.name]
    rows = np.arange(found.first_row, len(recorded.tokens), dtype=np.int32)
    signal = Signal(
        observer.name, rows, found.scores, found.ids, facts.lookahead, facts.needs_layer_offset, facts.first_layer, facts.about
    )
    trace = Trace.build(
        experts=recorded.experts, weights=recorded.weights, n_prompt=[recorded.n_prompt],
        n_decode=[recorded.n_decode], n_experts=8, model="tiny", label="measured",
        signals={signal.name: signal},
    )  # fmt: skip
    read = Trace.read(trace.write(tmp_path / "a.safetensors"))
    assert read.has_signal("shadow-nf4:T1:KV1", 0)
    assert RecordedSignal(read, "shadow-nf4:T1:KV1").needs_layer(2) is None  # known before the layer, unlike gate reuse
    by_hand = shadowed(quantised_copy(model, "nf4", find_routers(model)), decode(model), 1, 1)
    np.testing.assert_array_equal(top_ids(read.signals[observer.name], slice(None), 2), by_hand.experts)
    expected = recall(by_hand.experts, recorded.experts[recorded.n_prompt :]).mean()
    assert signal_recall(read, read.signals[observer.name]) == pytest.approx(expected)


def test_many_experts_are_stored_as_the_best_2k() -> None:
    model = deepseek()
    observer = ShadowObserver(model, "int8", Alignment(1, 0), Sampling(), [0])
    (recorded,) = record_requests(model, [PROMPT], [N_DECODE], plan=Plan(observer=observer))
    found = recorded.signals["shadow-int8:T1:KV0"]
    assert found.ids is not None and found.ids.shape == found.scores.shape == (N_DECODE, 2, 6)
    routing = shadowed(quantised_copy(model, "int8", find_routers(model)), decode(model), 1, 0)
    np.testing.assert_array_equal(found.ids[..., :3], routing.experts)
    for row, layer in np.ndindex(N_DECODE, 2):
        rest = [e for e in np.argsort(-routing.scores[row, layer], kind="stable") if e not in routing.experts[row, layer]]
        assert found.ids[row, layer, 3:].tolist() == rest[:3]


def test_dense_scores_keep_the_order_of_ids() -> None:
    scores = np.array([[[0.25, 0.25 + 1e-6, 0.4, 0.0], [0.0, 0.0, 0.0, 1.0]]], np.float32)
    best = np.array([[[2, 1], [3, 2]]])
    packed, ids = pack(scores, best, dense=True)
    assert ids is None
    np.testing.assert_array_equal(top_ids(Signal("x", np.arange(1), packed), slice(None), 2), best)
    np.testing.assert_allclose(packed, scores, atol=3e-4)
