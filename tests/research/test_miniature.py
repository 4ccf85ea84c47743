"""Miniatures: their text, their training, and the trace that is recorded of one."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="recorder tests need torch: the extra record")
pytest.importorskip("transformers", reason="recorder tests need transformers: the extra record")
pytest.importorskip("tokenizers", reason="recorder tests need tokenizers: the extra record")

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from miniature import corpus as corpora
from miniature import training
from miniature.balance import layer_balance_loss
from miniature.command import load_checkpoint, main, save_checkpoint
from miniature.muon import orthogonalise
from miniature.recorded import RecordingPlan, record_miniature
from moesim.recorder.learned import LearnedOptions
from moesim.trace import Trace

LAYERS, EXPERTS, TOP_K, HIDDEN, VOCABULARY = 4, 4, 2, 16, 300


def tiny_config() -> MixtralConfig:
    return MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_local_experts=EXPERTS,
        num_experts_per_tok=TOP_K,
        max_position_embeddings=128,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def tiny_model() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(tiny_config()).eval()


def test_sorted_experts_compute_what_the_library_computes() -> None:
    model = tiny_model()
    experts = model.model.layers[0].mlp.experts
    states = torch.randn(11, HIDDEN, generator=torch.Generator().manual_seed(3))
    _, weights, ids = model.model.layers[0].mlp.gate(states)
    with torch.no_grad():
        np.testing.assert_allclose(
            training.sorted_experts(experts, states, ids, weights).numpy(),
            experts(states, ids, weights).numpy(),
            atol=1e-5,
        )


def test_balance_loss_is_per_layer() -> None:
    even = torch.zeros(4, EXPERTS)
    even[torch.arange(4), torch.arange(4)] = 0.1  # each token prefers another expert, by little
    loss, imbalance = layer_balance_loss([even], 1)
    assert float(loss) == pytest.approx(1.0)
    assert imbalance == pytest.approx(1.0)
    # Two layers, each sending everything to one expert: another one each time, so that their sum is even.
    one, other = torch.full((4, 2), -20.0), torch.full((4, 2), -20.0)
    one[:, 0] = other[:, 1] = 20.0
    loss, imbalance = layer_balance_loss([one, other], 1)
    assert float(loss) == pytest.approx(2.0)
    assert imbalance == pytest.approx(2.0)


def test_orthogonalise() -> None:
    matrices = torch.randn(3, 16, 8, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices, 5).float())
    assert values.min() > 0.3
    assert values.max() < 1.4


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Python files, large enough to be divided into sets."""
    root = tmp_path_factory.mktemp("library")
    rng = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "value", "index", "result"]
    for number in range(20):
        lines = [f'"""Module {number}: {" ".join(rng.choices(words, k=40))}."""\n']
        for function in range(70):
            a, b, c = rng.sample(words, 3)
            lines.append(f"\ndef {a}_{number}_{function}({b}, {c}):\n    return {b} + {c} * {rng.randrange(99)}\n")
        (root / f"module_{number:02}.py").write_text("".join(lines))
    (root / "pydoc_data").mkdir()
    topics = {f"topic{n}": " ".join(rng.choices(words, k=800)) for n in range(6)}
    (root / corpora.TOPICS).write_text(f"# a comment\ntopics = {topics!r}\n")
    (root / "test").mkdir()
    (root / "test" / "skipped.py").write_text("x = 1\n")
    (root / "latin.py").write_bytes(b"# caf\xe9\n")
    return root


def test_corpus_sets_are_disjoint_and_seeded(library: Path) -> None:
    corpus = corpora.read_corpus(library, 0)
    for kind, n_documents in (("code", 20), ("prose", 20 + 6)):
        sets = [set(corpus.documents[of][kind]) for of in corpora.SETS]
        assert all(sets)
        assert sum(map(len, sets)) == len(set.union(*sets)) == n_documents
    assert corpora.read_corpus(library, 0).documents == corpus.documents
    assert corpora.read_corpus(library, 1).documents != corpus.documents


def test_prompts_start_on_lines_and_have_their_length(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = corpora.read_corpus(library, 0)
    tokenizer = corpora.train_tokenizer(corpus, VOCABULARY)
    documents = corpus.documents["prompts"]
    wanted = [("code", 8), ("prose", 8), ("code", 20)]
    prompts = corpora.draw_prompts(tokenizer, documents, wanted, random.Random(0))
    assert [(p.kind, len(p.tokens)) for p in prompts] == wanted
    assert prompts == corpora.draw_prompts(tokenizer, documents, wanted, random.Random(0))
    for prompt in prompts:
        text = documents[prompt.kind][prompt.file]
        assert prompt.start == 0 or text[prompt.start - 1] == "\n"
        assert text[prompt.start :].startswith(tokenizer.decode(list(prompt.tokens)))
    monkeypatch.setattr(corpora, "ATTEMPTS", 10)
    with pytest.raises(ValueError, match="another passage of 99999 tokens"):
        corpora.draw_prompts(tokenizer, documents, [("code", 99_999)], random.Random(0))


@pytest.fixture(scope="module")
def trained(library: Path) -> tuple[Any, ...]:
    corpus = corpora.read_corpus(library, 0)
    tokenizer = corpora.train_tokenizer(corpus, VOCABULARY)
    tokens = corpora.encode_texts(tokenizer, corpus.texts("train"))
    plan = training.TrainingPlan(steps=3, batch_tokens=64, sequence=16, long_sequence=32)
    seen: list[training.Progress] = []
    model, facts = training.train(tiny_config(), tokens, plan, seen.append)
    facts |= {"corpus_sha256": corpus.sha256, "python": "3", "seed": 0}
    return corpus, tokenizer, tokens, plan, seen, model, facts


def test_training_runs(trained: tuple[Any, ...]) -> None:
    _, _, tokens, plan, seen, model, facts = trained
    assert [p.step for p in seen] == [1, 2, 3]
    assert (facts["steps"], facts["stopped_by"]) == (3, "steps")
    assert facts["tokens_seen"] == 3 * 64
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())
    fresh = tiny_model()
    changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True)]
    assert all(changed)
    again, _ = training.train(tiny_config(), tokens, plan, lambda _p: None)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


@pytest.mark.long
def test_two_workers_share_a_batch(trained: tuple[Any, ...]) -> None:
    """Gradients of two halves by two processes are those of the whole, but for the balance, which is per part."""
    tokens, plan = trained[2], dataclasses.replace(trained[3], steps=1, balance=0.0)
    alone, _ = training.train(tiny_config(), tokens, plan, lambda _p: None)
    together, facts = training.train(tiny_config(), tokens, dataclasses.replace(plan, workers=2), lambda _p: None)
    assert facts["tokens_seen"] == 64
    for one, other in zip(alone.parameters(), together.parameters(), strict=True):
        # Adam divides by the gradient's size, so that a rounding error of a gradient near zero is as large as a step.
        assert float((one - other).detach().abs().mean()) < 1e-4


def names(corpus: corpora.Corpus, of: str) -> set[str]:
    return {name for kind in corpora.KINDS for name in corpus.documents[of][kind]}


PLAN = RecordingPlan(
    requests=((8, 4), (8, 3), (12, 2)),
    n_signal_requests=2,
    calibration=((8, 4), (10, 2)),
    learned=LearnedOptions(epochs=1, width=8),
)


def test_trace_of_a_miniature(trained: tuple[Any, ...], tmp_path: Path) -> None:
    corpus, tokenizer, _, _, _, model, facts = trained
    trace = record_miniature(model, tokenizer, facts, plan=PLAN, corpus=corpus)
    again = record_miniature(model, tokenizer, facts, plan=PLAN, corpus=corpus)
    first = trace.write(tmp_path / "a.safetensors").read_bytes()
    assert again.write(tmp_path / "b.safetensors").read_bytes() == first
    trace = Trace.read(tmp_path / "a.safetensors")
    assert trace.requests.n_prompt.tolist() == [8, 8, 12]
    assert trace.requests.n_decode.tolist() == [4, 3, 2]
    assert sorted(trace.signals) == ["gate_next1", "gate_next2", "gate_next3", "learned", "residual", "shadow-int8:T1:KV1"]
    for name, signal in trace.signals.items():
        assert [trace.has_signal(name, r) for r in range(3)] == [True, True, False]
        assert (trace.phase[signal.rows] == 1).all()
    assert trace.inputs is None
    assert {request["kind"] for request in trace.header["trace_requests"]} == {"code", "prose"}
    assert [trace.signals[f"gate_next{n}"].first_layer for n in (1, 2, 3)] == [1, 2, 3]
    assert trace.tables["residual"].shape == (LAYERS, HIDDEN)
    np.testing.assert_allclose(trace.tables["activation_frequency"].sum(axis=1), 1.0, atol=1e-6)
    assert trace.tables["coactivation"][:-1].sum() == (8 + 4 + 10 + 2) * TOP_K**2 * (LAYERS - 1)
    assert set(trace.header["trace_files"]) <= names(corpus, "prompts")
    assert set(trace.header["calibration_files"]) <= names(corpus, "calibration")


def test_training_goes_on_from_a_model(trained: tuple[Any, ...]) -> None:
    tokens, plan = trained[2], trained[3]
    model, facts = training.train(tiny_model(), tokens, plan, lambda _p: None)
    assert facts["steps"] == 3
    # tiny_model() has the same seed as the plan, so that going on from it is the same as starting.
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained[5].parameters(), strict=True))
    assert model.config._experts_implementation == tiny_model().config._experts_implementation


def test_checkpoint_round_trip(trained: tuple[Any, ...], tmp_path: Path) -> None:
    _, tokenizer, _, _, _, model, facts = trained
    save_checkpoint(tmp_path, model, tokenizer, facts)
    loaded, tokenizer_again, facts_again = load_checkpoint(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters(), strict=True))
    assert tokenizer_again.to_str() == tokenizer.to_str()
    assert facts_again["steps"] == 3


@pytest.mark.parametrize("name", ["out.safetensors", "checkpoint/config.json"])
def test_other_files_are_not_replaced(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("mine")
    assert main(["qwen3", "--out", str(tmp_path / "out.safetensors"), "--checkpoint", str(tmp_path / "checkpoint")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path / name}: expected nothing there, or ")
    assert (tmp_path / name).read_text() == "mine"
