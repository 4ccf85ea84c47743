"""Kept router biases: what would be found again, of exactly the shipped parameters.

``pytest tests/trace/test_biases.py --regenerate -m '' -n 0`` finds them anew, after a change to shipped parameters.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from moesim.trace.format import SCHEMA_VERSION, read_container, write_container
from moesim.trace.synthesis import model as synthetic
from moesim.trace.synthesis import parameter_names, read_parameters
from moesim.trace.synthesis.generate import top_ids
from moesim.trace.synthesis.model import FILE, SEED, kept_biases, key_of


def found_anew(name: str, monkeypatch: pytest.MonkeyPatch) -> np.ndarray[Any, Any]:
    """Find the biases of shipped parameters as if none were kept."""
    found = []
    balanced = synthetic.balanced_bias

    def noted(*arguments: Any) -> Any:
        found.append(balanced(*arguments))
        return found[-1].copy()  # the model goes on with it in place

    with monkeypatch.context() as patch:
        patch.setattr(synthetic, "kept_biases", lambda p, seed: None)
        patch.setattr(synthetic, "balanced_bias", noted)
        synthetic.draw_model(read_parameters(name), SEED)
    return found[0]


@pytest.mark.long
def test_all_can_be_found_again(regenerate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {key_of(read_parameters(name)): found_anew(name, monkeypatch) for name in parameter_names()}
    if regenerate:
        models = {key_of(read_parameters(name)): name for name in parameter_names()}
        write_container(FILE, found, {"schema_version": SCHEMA_VERSION, "models": models, "seed": SEED})
    kept, _ = read_container(FILE)
    assert kept.keys() == found.keys()
    for key, biases in found.items():
        np.testing.assert_array_equal(kept[key], biases)


def test_some_can_be_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_biases(read_parameters("mixtral-8x7b"), SEED)
    assert kept is not None
    np.testing.assert_array_equal(kept, found_anew("mixtral-8x7b", monkeypatch))


@pytest.mark.parametrize("name", parameter_names())
def test_shipped_parameters_have_kept_biases(name: str) -> None:
    p = read_parameters(name)
    kept = kept_biases(p, SEED)
    assert kept is not None and kept.shape == (p.n_layers, p.n_experts)


def test_other_seeds_and_other_parameters_get_none() -> None:
    p = read_parameters("mixtral-8x7b")
    assert kept_biases(p, SEED + 1) is None
    assert kept_biases(p.replace(popularity=p.popularity * 1.01), SEED) is None
    assert kept_biases(p.replace(topic_share=p.topic_share + 0.01), SEED) is None


@pytest.mark.parametrize(("n_experts", "n"), [(128, 8), (64, 6), (512, 16), (100, 7), (33, 2)])
def test_the_largest_logits_come_best_first_whatever_is_near_or_equal(n_experts: int, n: int) -> None:
    rng = np.random.default_rng(n_experts)
    logits = rng.standard_normal((40, n_experts), dtype=np.float32)
    best = np.argsort(logits, axis=1)[:, -n:]  # worst first
    for row in range(20):  # of the first ten rows the best differ by a last bit each, of the others they are equal
        for worse, better in pairwise(best[row]):
            logits[row, better] = np.nextafter(logits[row, worse], np.float32(9)) if row < 10 else logits[row, worse]
    logits[20:25] = np.abs(logits[20:25])
    logits[25:30] = -np.abs(logits[25:30])
    logits[30] = np.where(np.arange(n_experts) < n, -0.0, -1.0)
    logits[30, 0] = 0.0
    np.testing.assert_array_equal(top_ids(logits, n), np.argsort(-logits, axis=1, kind="stable")[:, :n])
