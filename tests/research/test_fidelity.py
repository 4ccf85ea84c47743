"""Interventions in tiny random models, each against a computation by hand, row by row and expert by expert."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

pytest.importorskip("torch", reason="recorder tests need torch: the extra record")
pytest.importorskip("transformers", reason="recorder tests need transformers: the extra record")
pytest.importorskip("tokenizers", reason="recorder tests need tokenizers: the extra record")

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DeepseekV2Config, MixtralConfig, Qwen3MoeConfig

from fidelity.calibration import Calibration, calibrate
from fidelity.command import main
from fidelity.intervened import Intervened, RoutingHooks, moe_layers
from fidelity.interventions import Daop, Defer, Intervention, Skip, gate_weights
from fidelity.measure import Case, measure, rows
from fidelity.settlement import Ledger, settle
from miniature import corpus as corpora
from miniature.command import save_checkpoint
from moesim.core.progress import Progress
from moesim.core.record_table import RecordTable
from moesim.engine.visit import FRESH, SKIPPED, STALE, Visit, gate_mass, inexact_records, rows_of
from moesim.errors import InputError
from moesim.metrics import fidelity
from moesim.records import InexactRecord, Records, StepRecord

VOCABULARY, HIDDEN = 300, 16
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
    "tie_word_embeddings": True,
}
CONFIGS = {
    "mixtral": MixtralConfig(
        **COMMON,
        intermediate_size=24,
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3": Qwen3MoeConfig(
        **COMMON,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=3,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
    ),
    "deepseek": DeepseekV2Config(
        **COMMON,
        intermediate_size=24,
        moe_intermediate_size=12,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=4,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
        topk_method="greedy",
        routed_scaling_factor=1.0,
    ),
}
NORMALISES = {"mixtral": True, "qwen3": True, "deepseek": False}
MODELS = list(CONFIGS)
TOKENS = torch.from_numpy(np.random.default_rng(0).integers(VOCABULARY, size=(2, 12)))
LAYERS = 3


def build(name: str) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    for gate, _ in moe_layers(model):  # some routers are built of zeros
        nn.init.normal_(gate.weight, std=0.3)
    return model.train(False)


BUILT = {name: build(name) for name in MODELS}


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def n_experts(name: str) -> int:
    return 4 if name == "mixtral" else 8


def resident(name: str, *experts: int) -> Tensor:
    table = torch.zeros(LAYERS, n_experts(name), dtype=torch.bool)
    table[:, list(experts)] = True
    return table


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=TOKENS, use_cache=False).logits
    return found


def under(model: Any, intervention: Intervention) -> tuple[Tensor, Ledger]:
    ledger = Ledger()
    with Intervened(model, intervention, ledger):
        got = logits(model)
    assert not any(m._forward_hooks for pair in moe_layers(model) for m in pair)
    return got, ledger


# ------------------------------------------------------------------------------------------------------------ by hand
def expert(block: Any, number: int, state: Tensor) -> Tensor:
    gate, up = (block.experts.gate_up_proj[number] @ state).chunk(2)
    return block.experts.down_proj[number] @ (F.silu(gate) * up)


def route(block: Any, state: Tensor) -> tuple[list[int], Tensor]:
    """All experts by falling score, and the scores."""
    scores = torch.softmax(block.gate.weight.float() @ state.float(), dim=0)
    return sorted(range(len(scores)), key=lambda e: -float(scores[e])), scores


def weigh(name: str, scores: Tensor, chosen: list[int]) -> list[float]:
    whole = float(scores[chosen].sum()) if NORMALISES[name] else 1.0
    return [float(scores[e]) / whole for e in chosen]


RowRule = Callable[[Any, int, Tensor, Tensor | None, int], Tensor]


def by_hand(model: Any, rule: RowRule) -> Tensor:
    """Logits where every MoE block's routed part is replaced by `rule(block, layer, state, state before, row)`."""
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    states: list[Tensor] = []

    def replace(block: Any, inputs: tuple[Tensor, ...], _output: Tensor) -> Tensor:
        layer = blocks.index(block)
        flat = inputs[0].reshape(-1, HIDDEN)
        states.append(flat)
        before = states[layer - 1] if layer else None
        out = torch.stack([rule(block, layer, x, None if before is None else before[r], r) for r, x in enumerate(flat)])
        out = out.reshape(inputs[0].shape)
        return out + block.shared_experts(inputs[0]) if hasattr(block, "shared_experts") else out

    handles = [block.register_forward_hook(replace) for block in blocks]
    try:
        return logits(model)
    finally:
        for handle in handles:
            handle.remove()


def combine(block: Any, chosen: list[int], weights: list[float], state: Tensor) -> Tensor:
    terms = [w * expert(block, e, state) for e, w in zip(chosen, weights, strict=True)]
    return torch.stack([torch.zeros(HIDDEN), *terms]).sum(dim=0)


def degrade_by_hand(ranked: list[int], top_k: int, here: list[int]) -> list[int]:
    """The paper's rule for one row, extended to more than two experts."""
    chosen = ranked[:top_k]
    while sum(e not in here for e in chosen) > top_k // 2:
        spare = [e for e in ranked[top_k:] if e in here and e not in chosen]
        if not spare:
            break
        chosen.remove([e for e in chosen if e not in here][-1])
        chosen.append(spare[0])
    return sorted(chosen, key=ranked.index)


def top_k_of(name: str) -> int:
    return int(CONFIGS[name].num_experts_per_tok)


def test_the_hand_computation_of_an_exact_model_is_the_model(name: str) -> None:
    model = BUILT[name]

    def exact(block: Any, _layer: int, state: Tensor, _before: Tensor | None, _row: int) -> Tensor:
        ranked, scores = route(block, state)
        chosen = ranked[: top_k_of(name)]
        return combine(block, chosen, weigh(name, scores, chosen), state)

    torch.testing.assert_close(by_hand(model, exact), logits(model), rtol=1e-4, atol=1e-4)


# ------------------------------------------------------------------------------------------------- strength nought
def test_no_intervention_leaves_the_logits_bit_for_bit(name: str) -> None:
    model, before = BUILT[name], logits(BUILT[name])
    everything, nothing = resident(name, *range(n_experts(name))), resident(name)
    for intervention in (
        Daop(everything, predict=False, first=1),
        Daop(nothing, first=LAYERS),
        Daop(nothing, predict=False, stale=False, first=1),  # nothing to substitute by
        Skip(torch.zeros(LAYERS)),
        Skip(torch.zeros(LAYERS), rescale=False),
        Defer(nothing, 0),
        Defer(everything, top_k_of(name)),
    ):
        got, ledger = under(model, intervention)
        assert torch.equal(got, before), intervention
        assert ledger.shares()["fidelity_fresh"] == 1.0
    assert not torch.equal(under(model, Defer(nothing, 1))[0], before)


def test_with_all_resident_only_the_prediction_of_daop_is_left(name: str) -> None:
    everything = resident(name, *range(n_experts(name)))
    whole, ledger = under(BUILT[name], Daop(everything, first=1))
    prediction, _ = under(BUILT[name], Daop(everything, degrade=False, stale=False, first=1))
    assert torch.equal(whole, prediction)
    shares = ledger.shares()
    assert shares["fidelity_stale"] == shares["fidelity_substituted_stale"] == 0
    assert shares["fidelity_substituted"] > 0  # DAOP never asks the layer's own router, however much fits


# ------------------------------------------------------------------------------------------------------------- DAOP
@pytest.mark.parametrize("share", [1 / 8, 1 / 4, 1 / 2])
@pytest.mark.parametrize("first", [1, 2])
@pytest.mark.parametrize(
    "parts", [(0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1)], ids=["substitution", "stale", "predicted", "daop"]
)
def test_daop_by_hand(name: str, share: float, first: int, parts: tuple[int, int, int]) -> None:
    here = range(max(1, round(share * n_experts(name))))
    predict, degrade, stale = map(bool, parts)
    top_k = top_k_of(name)
    seen = {"stale": 0, "substituted": 0}

    def rule(block: Any, layer: int, state: Tensor, before: Tensor | None, _row: int) -> Tensor:
        own, scores = route(block, state)
        chosen = own[:top_k]
        if layer < first:
            return combine(block, chosen, weigh(name, scores, chosen), state)
        assert before is not None
        ranked, scores = route(block, before) if predict else (own, scores)
        chosen = degrade_by_hand(ranked, top_k, list(here)) if degrade else ranked[:top_k]
        weights = weigh(name, scores, chosen)
        late = [stale and e not in here for e in chosen]
        seen["stale"] += sum(late)
        seen["substituted"] += sum(e not in own[:top_k] for e in chosen)
        terms = [w * expert(block, e, before if s else state) for e, w, s in zip(chosen, weights, late, strict=True)]
        return torch.stack(terms).sum(dim=0)

    expected = by_hand(BUILT[name], rule)
    got, ledger = under(BUILT[name], Daop(resident(name, *here), predict, degrade, stale, first))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (got - logits(BUILT[name])).abs().max() > 1e-3
    shares = ledger.shares()
    odd = shares["n_inexact_slots"]
    assert bool(seen["stale"]) == bool(shares["fidelity_stale"] or shares["fidelity_substituted_stale"])
    assert bool(seen["substituted"]) == bool(shares["fidelity_substituted"] or shares["fidelity_substituted_stale"])
    assert max(seen.values()) <= odd <= sum(seen.values())


def test_degradation_of_two_is_the_papers_rule() -> None:
    """Both chosen experts absent: the lower one gives way to the best resident one; one absent: it stays."""
    table = resident("mixtral", 1)
    model = BUILT["mixtral"]
    intervention = Daop(table, predict=False, stale=False, first=1)
    with RoutingHooks(model) as hooks:
        logits(model)
    for routing in hooks.take()[1:]:
        plan = intervention.plan(routing)
        for row, (before, after) in enumerate(zip(routing.ids.tolist(), plan.ids.tolist(), strict=True)):
            if 1 in before:
                assert after == before
                assert torch.equal(plan.weights[row], routing.weights[row])
            else:
                assert set(after) == {before[0], 1}
                scores = routing.scores[row]
                expected = scores[after] / scores[after].sum()
                torch.testing.assert_close(plan.weights[row], expected)


# --------------------------------------------------------------------------------------------------- skips, deferral
@pytest.mark.parametrize("rescale", [True, False])
def test_skip_by_hand(name: str, rescale: bool) -> None:
    thresholds = torch.tensor([0.0, 0.3, 0.4])
    masses = {"all": 0.0, "skipped": 0.0}

    def rule(block: Any, layer: int, state: Tensor, _before: Tensor | None, _row: int) -> Tensor:
        ranked, scores = route(block, state)
        chosen = ranked[: top_k_of(name)]
        weights = weigh(name, scores, chosen)
        whole = sum(weights)
        kept = [i == 0 or w / whole >= thresholds[layer] for i, w in enumerate(weights)]
        rest = sum(w for w, k in zip(weights, kept, strict=True) if k)
        masses["all"] += whole
        masses["skipped"] += whole - rest
        scale = whole / rest if rescale else 1.0
        return combine(block, chosen, [w * scale * k for w, k in zip(weights, kept, strict=True)], state)

    expected = by_hand(BUILT[name], rule)
    got, ledger = under(BUILT[name], Skip(thresholds, rescale))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert 0 < masses["skipped"] < masses["all"]
    shares = ledger.shares()
    assert shares["fidelity_skipped"] == pytest.approx(masses["skipped"] / masses["all"], rel=1e-4)
    assert shares["fidelity_fresh"] == pytest.approx(1 - masses["skipped"] / masses["all"], rel=1e-4)


@pytest.mark.parametrize("n_deferred", [1, 2])
@pytest.mark.parametrize("between", [False, True])  # with a layer in between that defers nothing
def test_deferral_by_hand(name: str, n_deferred: int, between: bool) -> None:
    table = resident(name, 0, 3)
    table[1] |= between
    waiting: dict[tuple[int, int], Tensor] = {}
    late_mass = mass = 0.0

    def rule(block: Any, layer: int, state: Tensor, _before: Tensor | None, row: int) -> Tensor:
        nonlocal late_mass, mass
        ranked, scores = route(block, state)
        chosen = ranked[: top_k_of(name)]
        weights = weigh(name, scores, chosen)
        is_late = [layer < LAYERS - 1 and i >= len(chosen) - n_deferred and not table[layer, e] for i, e in enumerate(chosen)]
        late_mass += sum(w for w, late in zip(weights, is_late, strict=True) if late)
        mass += sum(weights)
        waiting[layer, row] = combine(block, chosen, [w * late for w, late in zip(weights, is_late, strict=True)], state)
        now = combine(block, chosen, [w * (not late) for w, late in zip(weights, is_late, strict=True)], state)
        return now + waiting.get((layer - 1, row), torch.zeros(HIDDEN))

    expected = by_hand(BUILT[name], rule)
    got, ledger = under(BUILT[name], Defer(table, n_deferred))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert (got - logits(BUILT[name])).abs().max() > 1e-3
    shares = ledger.shares()
    assert shares["fidelity_fresh"] == 1.0  # every slot is executed as routed, on its own layer's state
    assert shares["deferred"] == pytest.approx(late_mass / mass, rel=1e-4)


def test_a_router_that_weighs_otherwise_is_refused() -> None:
    class Sigmoid(nn.Module):
        def forward(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = states[:, :8]
            weights, ids = logits.sigmoid().topk(2)
            return logits, weights, ids

    with pytest.raises(InputError, match="router Sigmoid: expected weights that are softmax scores"):
        gate_weights(Sigmoid(), torch.rand(3, 2), HIDDEN)


# ------------------------------------------------------------------------------------------------------- settlement
def visit_of(routed: np.ndarray, weights: np.ndarray) -> Visit:
    visit = Visit(step=0, layer=1, mbs_left=1)
    visit.route(routed, weights)
    return visit


@pytest.mark.parametrize("seed", range(20))
def test_slots_are_settled_and_counted_as_in_the_simulator(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n, k, n_all = 5, int(rng.integers(1, 5)), 9
    routed = np.array([rng.permutation(n_all)[:k] for _ in range(n)])
    executed = np.array([rng.permutation(n_all)[:k] for _ in range(n)])
    executed[0] = routed[0][::-1]
    stale = rng.random((n, k)) < 0.4
    skipped = np.zeros((n, k), dtype=bool)
    if seed % 3 == 0:  # skips are of routed experts only
        executed = routed.copy()
        skipped = ~stale & (rng.random((n, k)) < 0.5)
    weights = rng.random((n, k)).astype(np.float32)
    visit = visit_of(routed, weights)

    def each(mask: np.ndarray, act: Callable[[int, int], None]) -> None:
        for row, place in zip(*mask.nonzero(), strict=True):
            act(int(executed[row, place]), int(row))

    each(stale, lambda e, row: visit.serve(e, 1 << row, STALE, True))  # before the layer is routed
    each(~stale & ~skipped, lambda e, row: visit.serve(e, 1 << row, FRESH, False))
    each(skipped, lambda e, row: visit.serve(e, 1 << row, SKIPPED, False))
    assert visit.serve_substitutes() is None
    served = [(kind, expert, rows_of(rows)) for kind, expert, rows in visit.inexact]
    inexact = inexact_records(0, 0, visit.experts, visit.weights, served)
    step = StepRecord(0, 1, 0, "decode", 0, n, n, gate_mass(visit.weights))
    expected = fidelity(Records(steps=RecordTable(StepRecord, [step]), inexact=RecordTable(InexactRecord, inexact)))
    slots = settle(*(torch.from_numpy(a) for a in (routed, executed, stale, skipped)))
    ledger = Ledger()
    ledger.add(torch.from_numpy(weights), slots, torch.zeros(n, k, dtype=torch.bool))
    got = ledger.shares()
    assert got.pop("deferred") == 0
    assert got == pytest.approx(expected)


def test_fidelity_by_hand() -> None:
    routed = torch.tensor([[3, 1, 0], [2, 0, 1]])
    executed = torch.tensor([[3, 5, 1], [4, 5, 2]])
    stale = torch.tensor([[False, True, True], [True, False, False]])
    slots = settle(routed, executed, stale, torch.zeros(2, 3, dtype=torch.bool))
    ledger = Ledger()
    ledger.add(torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25]]), slots, torch.zeros(2, 3, dtype=torch.bool))
    shares = ledger.shares()
    assert shares["fidelity_fresh"] == pytest.approx((0.5 + 0.4) / 2)  # 3; 2
    assert shares["fidelity_stale"] == pytest.approx(0.3 / 2)  # 1 of the first row
    assert shares["fidelity_substituted_stale"] == pytest.approx((0.2 + 0.35) / 2)  # 5 for 0; 4 for 0, the first open one
    assert shares["fidelity_substituted"] == pytest.approx(0.25 / 2)  # 5 for 1
    assert shares["n_inexact_slots"] == 4
    both = Ledger.merged([ledger, ledger]).shares()
    assert both["fidelity_fresh"] == pytest.approx(shares["fidelity_fresh"])
    assert both["n_inexact_slots"] == 8


# ------------------------------------------------------------------------------------------------------ calibration
@pytest.fixture(scope="module")
def calibration() -> Calibration:
    return calibrate(BUILT["mixtral"], [TOKENS[:1], TOKENS[1:]])


def test_sensitivity_is_what_a_small_shift_of_weight_does_to_the_loss() -> None:
    model, window = BUILT["mixtral"], TOKENS[:1, :6]
    found = calibrate(model, [window])

    def loss(layer: int, row: int, shift: float) -> float:
        def nudge(_gate: nn.Module, _inputs: object, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            weights = outputs[1].clone()
            weights[row] += torch.tensor([-shift, shift])
            return outputs[0], weights, outputs[2]

        handle = moe_layers(model)[layer][0].register_forward_hook(nudge)
        with torch.no_grad():
            out = model(input_ids=window, use_cache=False).logits
        handle.remove()
        return float(F.cross_entropy(out[0, :-1].double(), window[0, 1:], reduction="sum"))

    for layer in range(LAYERS):
        slopes = [(loss(layer, row, 1e-2) - loss(layer, row, -1e-2)) / 2e-2 for row in range(6)]
        assert found.sensitivity[layer] == pytest.approx(np.mean(np.square(slopes)), rel=0.02)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("by_sensitivity", [True, False])
def test_thresholds_skip_the_asked_share(calibration: Calibration, by_sensitivity: bool) -> None:
    assert (
        np.all(calibration.thresholds(0.0, by_sensitivity).numpy() <= calibration.shares.min(axis=(0, 2)) + 1e-6)
        or by_sensitivity
    )
    for share in (0.25, 0.5):
        thresholds = calibration.thresholds(share, by_sensitivity).numpy()
        assert (calibration.shares < thresholds[None, :, None]).mean() == pytest.approx(share, abs=0.02)
        if by_sensitivity:
            np.testing.assert_allclose(thresholds**2 * calibration.sensitivity, thresholds[0] ** 2 * calibration.sensitivity[0])
        else:
            assert len(set(thresholds)) == 1


# ------------------------------------------------------------------------------------------------------ measurement
def test_measure_by_hand() -> None:
    model = BUILT["mixtral"]
    listed = [
        Case("none", 0.0, Skip(torch.zeros(LAYERS))),
        Case("top-1", 1.0, Skip(torch.ones(LAYERS))),
        Case("daop", 0.5, Daop(resident("mixtral", 0, 1), first=1)),
    ]
    windows = {"code": TOKENS[:1], "prose": TOKENS[1:]}
    exact, outcomes = measure(model, windows, listed, Progress(8, enabled=False))
    found = pd.DataFrame(rows(listed, exact, outcomes, seed=0)).set_index(["series", "text"])
    none = found.loc["none"]
    assert (none["change"] == 0).all()
    assert (none["kl"] == 0).all()
    assert (none["top1_agreement"] == 1).all()
    assert none["nats_per_lost_mass"].isna().all()
    before = F.log_softmax(logits(model)[:, :-1], dim=-1)
    after = F.log_softmax(under(model, listed[1].intervention)[0][:, :-1], dim=-1)
    nll = [-x.gather(2, TOKENS[:, 1:, None]).mean().item() for x in (before, after)]
    top = found.loc[("top-1", "all")]
    assert top["perplexity_exact"] == pytest.approx(np.exp(nll[0]), rel=1e-5)
    assert top["change"] == pytest.approx(np.exp(nll[1] - nll[0]) - 1, abs=1e-5)
    assert top["change_low"] <= top["change"] <= top["change_high"]
    assert top["kl"] == pytest.approx((before.exp() * (before - after)).sum(-1).mean().item(), rel=1e-4)
    assert top["top1_agreement"] == pytest.approx((before.argmax(-1) == after.argmax(-1)).double().mean().item())
    assert top["nats_per_lost_mass"] == pytest.approx((nll[1] - nll[0]) / (1 - top["fidelity_fresh"]), abs=1e-5)
    # replayed: settled on the exact model's routing; executed: on the routing that the intervention left
    with RoutingHooks(model) as hooks:
        logits(model)
    replayed = Ledger()
    for routing in hooks.take():
        listed[2].intervention.plan(routing).record(routing, replayed)
    daop = found.loc[("daop", "all")]
    assert daop["fidelity_fresh"] == pytest.approx(replayed.shares()["fidelity_fresh"])
    executed = under(model, listed[2].intervention)[1].shares()["fidelity_fresh"]
    assert daop["executed_fidelity_fresh"] == pytest.approx(executed)
    assert daop["executed_fidelity_fresh"] != pytest.approx(daop["fidelity_fresh"], abs=1e-6)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(60)]
    documents = {
        of: {kind: {f"{of}-{kind}": " ".join(rng.choice(words, 400).tolist())} for kind in corpora.KINDS} for of in corpora.SETS
    }
    corpus = corpora.Corpus(documents, "0" * 64)
    monkeypatch.setattr(corpora, "read_corpus", lambda _root, _seed: corpus)
    tokenizer = corpora.train_tokenizer(corpus, VOCABULARY)
    save_checkpoint(tmp_path / "mini", BUILT["mixtral"], tokenizer, {"seed": 0, "corpus_sha256": "0" * 64, "python": "3.11"})
    return tmp_path / "mini"


def test_bad_input_is_one_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ["--out", str(tmp_path / "out")]
    facts = checkpoint / "training.json"
    for arguments, message in (
        ([str(tmp_path / "nowhere")], "expected a trained miniature, got no model.safetensors"),
        ([str(checkpoint), "--tokens", "100000"], "prompts code: expected 1 to"),
        ([str(checkpoint), "--ratios", "1.5"], "--ratios: expected 0 to 1, got 1.5"),
    ):
        assert main([*arguments, *out]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    facts.write_text(facts.read_text().replace("0" * 64, "1" * 64))
    assert main([str(checkpoint), *out]) == 2
    assert "corpus: expected sha256 1111" in capsys.readouterr().err
    facts.write_text("{}")
    assert main([str(checkpoint), *out]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()
