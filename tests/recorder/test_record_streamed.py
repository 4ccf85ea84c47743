"""A recording with one layer in memory at a time holds what the recorder with the whole model holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="recorder tests need torch: install moesim[record]")
pytest.importorskip("transformers", reason="recorder tests need transformers: install moesim[record]")
pytest.importorskip("tokenizers", reason="recorder tests need tokenizers: install moesim[record]")

from moesim.recorder import streaming
from moesim.trace import Trace
from tests.recorder.record_kit import CONFIGS, PROMPTS, make_home, run, save_tiny

#: One is longer than the sliding window of the tiny gpt-oss.
TEXTS = [*PROMPTS, " ".join(f"w{5 * n % 60}" for n in range(20))]
KEEP = ("--keep-inputs", "2", "--signal-requests", "4", "--scores", "--keep-embeddings")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = make_home(tmp_path_factory.mktemp("record"))
    (home / "texts.txt").write_text("\n".join(TEXTS))
    return home


def check_same(one: Trace, other: Trace) -> None:
    """All that was recorded is the same to the bit, whatever counts as generated."""
    for name in ("experts", "weights", "scores", "embeddings", "request"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.inputs is not None and other.inputs is not None
    np.testing.assert_array_equal(one.inputs.rows, other.inputs.rows)
    np.testing.assert_array_equal(one.inputs.values, other.inputs.values)
    assert sorted(one.signals) == sorted(other.signals) != []
    for name, signal in one.signals.items():
        for part in ("rows", "scores", "ids"):
            np.testing.assert_array_equal(getattr(signal, part), getattr(other.signals[name], part))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 10)
    save_tiny(home / "model", name)
    of = {"model": "model", "prompts": "texts.txt"}
    whole = run(home, tmp_path / "whole.safetensors", "--max-new-tokens", "0", *KEEP, **of)
    streamed = run(home, tmp_path / "streamed.safetensors", "--stream-layers", "--max-new-tokens", "2", *KEEP, **of)
    check_same(streamed, whole)
    lengths = [1 + len(text.split()) for text in TEXTS]
    assert streamed.requests.n_decode.tolist() == [min(2, n - 1) for n in lengths]
    assert streamed.requests.n_prompt.tolist() == [n - min(2, n - 1) for n in lengths]
    assert streamed.header["label"] == "measured"
    assert streamed.header["sampling"].startswith("none: the texts are given; the last 2 tokens")
    assert streamed.header["routers_sha256"] == whole.header["routers_sha256"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["streamed.safetensors", "whole.safetensors"]
