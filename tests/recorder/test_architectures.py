"""Every architecture that the guide lists: what is recorded equals what the experts were called with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from moesim.recorder import RecordError, loading
from moesim.recorder.checkpoint import STREAMED
from moesim.trace import Trace
from tests.recorder.architectures_kit import EXPERTS, ROWS, TOP_K, Used, build, by_formula, is_streamed, table, used_experts
from tests.recorder.record_kit import CONFIGS, PROMPTS, run, save_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "recording.md"


@pytest.fixture(autouse=True)
def _words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the words of the test, where transformers insists on the tokenizer of an architecture."""
    monkeypatch.setattr(loading, "load_tokenizer", lambda options: PreTrainedTokenizerFast.from_pretrained(options.model))


def record(folder: Path, name: str) -> tuple[Trace, list[Used]]:
    save_model(folder / name, build(name))
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    with used_experts(ROWS[name]) as blocks:
        trace = run(folder, folder / "trace.safetensors", "--keep-inputs", "all", "--ignore-eos", "--lookahead", "1", model=name)
    return trace, blocks


FIRST = {tuple(vars(row).items())[2:]: name for name, row in reversed(ROWS.items())}
"""The router and its formula -> the first architecture that has them; others with the same are left to -m long."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST.values() else [pytest.mark.long]) for name in ROWS]
)
def test_ids_order_and_weights(name: str, tmp_path: Path) -> None:
    trace, blocks = record(tmp_path, name)
    row = ROWS[name]
    assert trace.n_rows == sum(1 + len(prompt.split()) + 6 for prompt in PROMPTS)
    assert (trace.n_layers, trace.n_experts) == (len(blocks), EXPERTS)
    assert trace.header["score_function"] == row.score
    assert (trace.header["ranked_by"] == "score") == (not row.bias and not row.groups)
    assert trace.weights is not None and trace.scores is not None and trace.inputs is not None
    for layer, block in enumerate(blocks):
        states, ids, weights = block.all()
        got = np.asarray(trace.experts[:, layer]).astype(np.int64)
        assert np.array_equal(np.sort(got), ids.sort(-1).values), "the experts"
        np.testing.assert_array_equal(
            trace.weights[:, layer], dense(ids, weights).gather(1, torch.tensor(got)).half(), "their weights"
        )
        scores, ranked = by_formula(row, block.block, states)
        assert (ranked.gather(1, torch.tensor(got)).diff(dim=-1) <= 1e-6).all(), "their order"
        np.testing.assert_allclose(trace.scores[:, layer], scores, atol=6e-4)  # in half precision
        np.testing.assert_allclose(trace.inputs.values[:, layer], states, rtol=2e-3, atol=1e-4)
    check_signal(trace, blocks, name)


def dense(ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(ids), EXPERTS).scatter(1, ids, weights.float())


def check_signal(trace: Trace, blocks: list[Used], name: str) -> None:
    """The signal is what the next layer's block chooses, once it is given the state of this layer's router."""
    signal = trace.signals["gate_next1"]
    for layer in range(1, len(blocks)):
        states = blocks[layer - 1].all()[0]
        scores, _ = by_formula(ROWS[name], blocks[layer].block, states)
        kept = signal.scores[:, layer].astype(np.float32)
        if signal.ids is None:
            np.testing.assert_allclose(kept, scores, atol=1e-3)
            continue
        ids = torch.tensor(signal.ids[:, layer].astype(np.int64))
        np.testing.assert_allclose(kept, scores.gather(1, ids), atol=1e-3)
        with used_experts(ROWS[name]) as found, torch.no_grad():
            blocks[layer].block(states[None])
        assert torch.equal(ids[:, :TOP_K].sort(-1).values, found[0].ids[0].sort(-1).values)


def test_the_guide_has_this_table() -> None:
    assert table() in PAGE.read_text(encoding="utf-8")
    assert len(STREAMED) == sum(map(is_streamed, ROWS))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ROWS if is_streamed(name) and name not in CONFIGS])
def test_layer_by_layer_is_the_same(name: str, tmp_path: Path) -> None:
    save_model(tmp_path / name, build(name))
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    how = ("--keep-inputs", "all", "--max-new-tokens", "0")
    whole = run(tmp_path, tmp_path / "whole.safetensors", *how, model=name)
    streamed = run(tmp_path, tmp_path / "streamed.safetensors", "--stream-layers", *how, model=name)
    for one, other in zip(arrays(whole), arrays(streamed), strict=True):
        np.testing.assert_array_equal(one, other)


def arrays(trace: Trace) -> list[Any]:
    assert trace.inputs is not None
    signals = [part for _, signal in sorted(trace.signals.items()) for part in (signal.scores, signal.ids) if part is not None]
    return [trace.experts, trace.weights, trace.scores, trace.inputs.values, *signals]


def test_an_embedding_that_is_scaled_is_not_streamed(tmp_path: Path) -> None:
    save_model(tmp_path / "granite", build("granitemoe", embedding_multiplier=12.0))
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    with pytest.raises(
        RecordError, match="--stream-layers: expected a 'granitemoe' without an embedding that its decoder scales"
    ):
        run(tmp_path, tmp_path / "trace.safetensors", "--stream-layers", model="granite")
