"""What is recorded equals routing recomputed by hand, for every architecture, phase and kind of batch."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from moesim.recorder.generation import Sampling
from moesim.recorder.loading import describe_quantisation, quantisation
from moesim.recorder.recording import Plan, Recorder, Recording, record_requests
from moesim.recorder.signals import SignalPlan
from tests.recorder.record_kit import COMMON as KIT
from tests.recorder.record_kit import (
    CONFIGS,
    EXPERTS,
    HIDDEN,
    LAYERS,
    VOCABULARY,
    block_inputs,
    calibrate,
    moe_blocks,
    route,
    tiny,
)

PROMPTS = [[5, 17, 3], [42, 7, 25, 9, 11, 60, 33], [2, 2, 50, 8, 31]]
EQUAL = [[5, 17, 3, 8], [42, 7, 25, 9], [2, 2, 50, 8]]
N_DECODE = [6, 3, 5]
SIGNALS = SignalPlan(top_k=2, lookahead=2)


@cache
def recorded(name: str, *, equal: bool = False, batch_size: int = 1) -> list[Recording]:
    plan = Plan(batch_size=batch_size, scores=True, n_inputs=None, signals=SIGNALS)
    return list(record_requests(tiny(name), EQUAL if equal else PROMPTS, N_DECODE, plan=plan))


def check_by_hand(name: str, recording: Recording) -> None:
    model = tiny(name)
    inputs = block_inputs(model, recording.tokens.tolist())
    blocks = moe_blocks(model)
    assert recording.experts.shape[1] == len(blocks)
    assert recording.scores is not None
    assert recording.inputs is not None
    np.testing.assert_allclose(recording.inputs, inputs.numpy(), atol=5e-3)  # kept in float16
    for row in range(len(recording.tokens)):
        for layer, block in enumerate(blocks):
            hand = route(name, block, inputs[row, layer])
            got = recording.experts[row, layer].tolist()
            if got != hand.ids:  # the same but for ties
                np.testing.assert_allclose(hand.ranked[got], hand.ranked[hand.ids], atol=1e-4)
            else:
                np.testing.assert_allclose(recording.weights[row, layer], hand.weights, atol=2e-4)
            np.testing.assert_allclose(recording.scores[row, layer], hand.scores.numpy(), atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_at_a_time(name: str) -> None:
    for recording, prompt, n_decode in zip(recorded(name), PROMPTS, N_DECODE, strict=True):
        assert recording.tokens[: len(prompt)].tolist() == prompt
        assert (recording.n_prompt, recording.n_decode, recording.ended) == (len(prompt), n_decode, "length")
        check_by_hand(name, recording)


@pytest.mark.parametrize(
    "equal", [pytest.param(False, id="padded"), pytest.param(True, id="equal lengths", marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_in_batches(name: str, equal: bool) -> None:
    together = recorded(name, equal=equal, batch_size=3)
    for recording, alone in zip(together, recorded(name, equal=equal), strict=True):
        assert recording.tokens.tolist() == alone.tokens.tolist()
        check_by_hand(name, recording)
        for signal, rows in recording.signals.items():
            np.testing.assert_allclose(rows.scores.astype(float), alone.signals[signal].scores.astype(float), atol=2e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", CONFIGS)
def test_a_recording_on_a_gpu_is_that_by_hand(name: str) -> None:
    plan = Plan(batch_size=3, scores=True, n_inputs=None, signals=SIGNALS)
    for recording in record_requests(copy.deepcopy(tiny(name)).to("cuda"), PROMPTS, N_DECODE, plan=plan):
        check_by_hand(name, recording)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_tokens_are_those_of_the_model_without_a_recorder(name: str) -> None:
    model = tiny(name)
    ours = record_requests(model, PROMPTS, N_DECODE, sampling=Sampling(stop=(1,)), plan=Plan(batch_size=3))
    for recording, prompt, n_decode in zip(ours, PROMPTS, N_DECODE, strict=True):
        mask = torch.ones(1, len(prompt), dtype=torch.long)
        theirs = model.generate(
            torch.tensor([prompt]), attention_mask=mask, max_new_tokens=n_decode, do_sample=False, pad_token_id=0, eos_token_id=1
        )
        assert recording.tokens.tolist() == [token for token in theirs[0].tolist() if token != 1]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", CONFIGS)
def test_gate_reuse_by_hand(name: str) -> None:
    model, (recording, *_) = tiny(name), recorded(name)
    inputs, blocks = block_inputs(model, recording.tokens.tolist()), moe_blocks(model)
    assert sorted(recording.signals) == [f"gate_next{n}" for n in range(1, min(2, len(blocks) - 1) + 1)]
    for signal, rows in recording.signals.items():
        ahead = int(signal[-1])
        assert not rows.scores[:, :ahead].any()
        for row in range(len(recording.tokens)):
            for layer in range(ahead, len(blocks)):
                check_signal(name, rows, row, layer, blocks[layer], inputs[row, layer - ahead])


def check_signal(name: str, rows: Any, row: int, layer: int, block: Any, state: torch.Tensor) -> None:
    hand = route(name, block, state)
    if rows.ids is None:
        np.testing.assert_allclose(rows.scores[row, layer], hand.scores.numpy(), atol=1e-3)
        return
    # Ranked by something else than the scores: ids, the allowed ones first, each with its score.
    ids = rows.ids[row, layer].tolist()
    assert len(set(ids)) == 2 * SIGNALS.top_k
    assert ids[: len(hand.ids)] == hand.ids
    np.testing.assert_allclose(rows.scores[row, layer], hand.scores[ids].numpy(), atol=1e-3)


def test_signals_are_dense_only_where_scores_give_the_order() -> None:
    with_ids = {name for name in CONFIGS if recorded(name)[0].signals["gate_next1"].ids is not None}
    assert with_ids == {"deepseek_v2 groups", "deepseek_v3", "moonlight"}


def test_residual_by_hand() -> None:
    model = tiny("mixtral")
    others = [[9, 8, 7, 6], [33, 34, 35]]
    tables = calibrate(model, others, [4, 6])
    tokens = [r.tokens.tolist() for r in record_requests(model, others, [4, 6])]
    inputs = torch.cat([block_inputs(model, row) for row in tokens]).double()
    for layer in range(LAYERS - 1):
        mean = (inputs[:, layer + 1] - inputs[:, layer]).mean(dim=0)
        np.testing.assert_allclose(tables["residual"][layer], mean, atol=2e-3)
    assert not tables["residual"][-1].any()
    plan = Plan(signals=SignalPlan(2, 1, tables["residual"]))
    (recording,) = record_requests(model, PROMPTS[:1], N_DECODE[:1], plan=plan)
    states, blocks = block_inputs(model, recording.tokens.tolist()), moe_blocks(model)
    for row in range(len(recording.tokens)):
        for layer in range(1, LAYERS):
            step = torch.from_numpy(tables["residual"][layer - 1].astype(np.float32))
            check_signal("mixtral", recording.signals["residual"], row, layer, blocks[layer], states[row, layer - 1] + step)


def test_calibration_counts_by_hand() -> None:
    model, others = tiny("qwen3_moe"), [[9, 8, 7, 6], [33, 34, 35]]
    tables = calibrate(model, others, [4, 6])
    recordings = list(record_requests(model, others, [4, 6]))
    n_layers, top_k = recordings[0].experts.shape[1:]
    used = np.zeros((2, n_layers, EXPERTS))
    pairs = np.zeros((n_layers, EXPERTS, EXPERTS))
    for recording in recordings:
        for row, layers in enumerate(recording.experts.tolist()):
            for layer, ids in enumerate(layers):
                for expert in ids:
                    used[int(row >= recording.n_prompt), layer, expert] += 1
                    for after in layers[layer + 1] if layer + 1 < n_layers else ():
                        pairs[layer, expert, after] += 1
    np.testing.assert_allclose(tables["activation_frequency"], used.sum(axis=0) / ((4 + 4 + 3 + 6) * top_k), rtol=1e-6)
    np.testing.assert_allclose(tables["activation_frequency_decode"], used[1] / (10 * top_k), rtol=1e-6)
    np.testing.assert_array_equal(tables["coactivation"], pairs)


@pytest.mark.parametrize("name", ["deepseek_v2 groups", "deepseek_v3", "mixtral"])
def test_rank_order_does_not_depend_on_the_order_of_the_model(name: str) -> None:
    model = copy.deepcopy(tiny(name))
    for block in moe_blocks(model):
        block.gate.register_forward_hook(lambda _m, _a, out: (out[0], out[1].flip(-1), out[2].flip(-1)))
    for one, other in zip(record_requests(model, PROMPTS, N_DECODE), recorded(name), strict=True):
        np.testing.assert_array_equal(one.experts, other.experts)
        np.testing.assert_allclose(one.weights, other.weights, atol=1e-5)


def test_many_rows_are_worked_on_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = recorded("deepseek_v3", batch_size=3)
    monkeypatch.setattr("moesim.recorder.hooks.CHUNK_ROWS", 2)
    plan = Plan(batch_size=3, signals=SIGNALS)
    for one, other in zip(record_requests(tiny("deepseek_v3"), PROMPTS, N_DECODE, plan=plan), whole, strict=True):
        np.testing.assert_array_equal(one.experts, other.experts)
        np.testing.assert_array_equal(one.signals["gate_next1"].ids, other.signals["gate_next1"].ids)
        np.testing.assert_allclose(one.weights, other.weights, atol=1e-6)


def test_a_request_ends_on_its_own() -> None:
    model, greedy = tiny("mixtral"), list(record_requests(tiny("mixtral"), PROMPTS, [12] * 3))
    stop = int(greedy[0].tokens[len(PROMPTS[0]) + 4])
    expected = []
    for recording in greedy:
        generated = recording.tokens[recording.n_prompt :].tolist()
        expected.append(generated.index(stop) if stop in generated else 12)
    assert expected[0] <= 4
    assert len(set(expected)) > 1
    for batch_size in (1, 3):
        ended = list(record_requests(model, PROMPTS, [12] * 3, sampling=Sampling(stop=(stop,)), plan=Plan(batch_size=batch_size)))
        assert [r.n_decode for r in ended] == expected
        assert [r.ended for r in ended] == ["end of text" if n < 12 else "length" for n in expected]
        for one, whole in zip(ended, greedy, strict=True):
            assert one.tokens.tolist() == whole.tokens[: len(one.tokens)].tolist()  # the end itself is not fed back


def test_sampling_does_not_depend_on_the_batch() -> None:
    model = tiny("qwen2_moe")
    sampling = Sampling(temperature=0.9, top_p=0.8)
    alone = list(record_requests(model, PROMPTS, N_DECODE, sampling=sampling, seeds=[7, 8, 9]))
    together = list(record_requests(model, PROMPTS, N_DECODE, sampling=sampling, seeds=[7, 8, 9], plan=Plan(batch_size=3)))
    assert [r.tokens.tolist() for r in alone] == [r.tokens.tolist() for r in together]
    (last,) = record_requests(model, PROMPTS[2:], N_DECODE[2:], sampling=sampling, seeds=[9])
    assert last.tokens.tolist() == alone[2].tokens.tolist()
    (other,) = record_requests(model, PROMPTS[2:], N_DECODE[2:], sampling=sampling, seeds=[10])
    assert other.tokens.tolist() != alone[2].tokens.tolist()


def test_sampling_follows_the_probabilities() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    generator = torch.Generator().manual_seed(0)

    def shares(**sampling: Any) -> list[float]:
        drawn = [Sampling(**sampling).choose(logits, generator) for _ in range(4000)]
        return (np.bincount(drawn, minlength=4) / 4000).tolist()

    np.testing.assert_allclose(shares(temperature=1.0), [0.5, 0.3, 0.15, 0.05], atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, top_p=0.6), [0.625, 0.375, 0, 0], atol=0.03)
    np.testing.assert_allclose(shares(temperature=1.0, banned=(0,)), [0, 0.6, 0.3, 0.1], atol=0.03)
    squared = np.array([0.25, 0.09, 0.0225, 0.0025])
    np.testing.assert_allclose(shares(temperature=0.5), squared / squared.sum(), atol=0.03)
    assert shares(temperature=0.0) == [1, 0, 0, 0]


def test_batches_are_cut_where_plans_change() -> None:
    lengths = [(4, 8), (4, 8), (4, 8), (6, 8), (6, 8), (4, 8)]
    assert Plan(batch_size=2).batches(lengths) == [range(2), range(2, 4), range(4, 6)]
    assert Plan(batch_size=4, pad=False).batches(lengths) == [range(3), range(3, 5), range(5, 6)]
    assert Plan(batch_size=4, n_signals=1).batches(lengths) == [range(1), range(1, 5), range(5, 6)]
    observed = Plan(batch_size=4, n_signals=2, observer=lambda done: {})
    assert observed.batches(lengths) == [range(1), range(1, 2), range(2, 6)]


def test_observers_see_tokens_and_cache_and_add_signals() -> None:
    model, seen = tiny("gpt_oss"), []

    def observe(done: Any) -> dict[str, Any]:
        seen.append((done.number, done.recording.n_decode, done.cache.get_seq_length()))
        return {}

    recordings = list(record_requests(model, PROMPTS, N_DECODE, plan=Plan(batch_size=3, n_signals=2, observer=observe)))
    assert seen == [(r, N_DECODE[r], len(PROMPTS[r]) + N_DECODE[r]) for r in range(2)]
    assert [r.tokens.tolist() for r in recordings] == [r.tokens.tolist() for r in recorded("gpt_oss")]


def test_weights_that_lie_elsewhere_are_read() -> None:
    """With accelerate, parameters of offloaded layers are on the device only while the layer runs."""
    accelerate = pytest.importorskip("accelerate")
    offloaded = copy.deepcopy(tiny("deepseek_v3"))
    accelerate.cpu_offload(offloaded, execution_device=torch.device("cpu"))
    assert offloaded.model.layers[1].mlp.gate.weight.device.type == "meta"
    plan = Plan(scores=True, signals=SIGNALS)
    for one, other in zip(record_requests(offloaded, PROMPTS, N_DECODE, plan=plan), recorded("deepseek_v3"), strict=True):
        np.testing.assert_array_equal(one.experts, other.experts)
        np.testing.assert_array_equal(one.signals["gate_next1"].ids, other.signals["gate_next1"].ids)


def test_half_precision_is_recorded() -> None:
    """In bfloat16 the model ranks by what it rounded; that is what is recorded."""
    for name in ("mixtral", "deepseek_v3", "gpt_oss"):
        model = copy.deepcopy(tiny(name)).bfloat16()
        for recording in record_requests(model, PROMPTS, N_DECODE, plan=Plan(batch_size=3, scores=True, signals=SIGNALS)):
            assert recording.scores is not None
            chosen = np.take_along_axis(recording.scores, recording.experts.astype(np.int64), axis=-1)
            assert np.isfinite(recording.weights).all()
            if name != "deepseek_v3":
                assert (np.diff(chosen, axis=-1) <= 0).all()


def test_only_what_was_asked_for_is_kept() -> None:
    (bare,) = record_requests(tiny("olmoe"), PROMPTS[:1], N_DECODE[:1])
    assert bare.scores is None
    assert bare.inputs is None
    assert bare.signals == {}
    plan = Plan(scores=True, n_inputs=1, signals=SIGNALS, n_signals=2)
    first, second, third = record_requests(tiny("olmoe"), PROMPTS, N_DECODE, plan=plan)
    assert [r.inputs is not None for r in (first, second, third)] == [True, False, False]
    assert [len(r.signals) for r in (first, second, third)] == [2, 2, 0]
    assert first.inputs is not None
    assert first.inputs.shape == (len(PROMPTS[0]) + N_DECODE[0], LAYERS, HIDDEN)
    assert Recorder(tiny("olmoe")).n_experts == EXPERTS < VOCABULARY


def random_model(config: Any) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def test_the_share_that_was_quantised_is_told() -> None:
    model = random_model(LlamaConfig(**{**KIT, "num_key_value_heads": 2, "intermediate_size": 24}))
    assert quantisation(model, None) is None
    packed = type("Linear4bit", (nn.Linear,), {"__module__": "bitsandbytes.nn"})
    before = sum(parameter.numel() for parameter in model.parameters())
    layer = packed(HIDDEN, 24, bias=False)
    layer.weight = nn.Parameter(torch.zeros(HIDDEN * 24 // 2, 1))  # two weights a byte
    model.model.layers[0].mlp.gate_proj = layer
    facts = quantisation(model, 4)
    assert facts is not None
    assert facts["share"] == pytest.approx(HIDDEN * 24 / before, abs=1e-4)
    assert describe_quantisation(facts).startswith("4% of the weights are quantised (bitsandbytes nf4): routing may differ")
