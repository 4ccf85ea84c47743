"""Arithmetic of synthetic routing is as accurate as said; tests/test_same_bytes.py compares its bits between processors."""

from __future__ import annotations

import hashlib
import math
from decimal import Decimal, localcontext
from statistics import NormalDist
from typing import Any

import numpy as np

from moesim.trace.synthesis import exact, parameter_names, read_parameters, synthesize
from moesim.trace.synthesis.exact import Draws, exp, log, normal_quantiles, on_grid, softmax
from moesim.trace.synthesis.model import draw_model

LOGITS = (4 * Draws(5).normals(50, 64)).astype(np.float32)


def digests() -> list[str]:
    """Digest every array of a model and a trace of each shipped parameter set; router biases are found anew."""
    points = np.linspace(-30, 30, 60_001)
    found = [digest("exp", exp(points)), digest("log", log(points[points > 0])), digest("softmax", softmax(LOGITS))]
    for name in parameter_names():
        p = read_parameters(name).replace(n_layers=5)
        trace = synthesize(p, n_requests=3, n_prompt=9, n_decode=40, seed=2, n_input_requests=1, n_calibration=2, scores=True)
        assert trace.inputs is not None
        assert trace.scores is not None
        arrays: dict[str, Any] = {"experts": trace.experts, "weights": trace.weights, "scores": trace.scores}
        model = draw_model(p, 2)
        arrays |= {"inputs": trace.inputs.values, **trace.tables, "gates": model.gates, "bias": model.bias, "mean": model.mean}
        arrays |= {"topics": model.topics, "spread": model.spread, "shares": model.shares, "innovation": model.innovation}
        for signal in trace.signals.values():
            arrays[f"{signal.name} scores"] = signal.scores
            if signal.ids is not None:
                arrays[f"{signal.name} ids"] = signal.ids
        found += [digest(f"{name}: {array_name}", array) for array_name, array in arrays.items()]
    return found


def digest(name: str, array: Any) -> str:
    return f"{name} {hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()}"


def test_a_matrix_product_of_numbers_on_the_grid_has_no_rounding_errors() -> None:
    draws = Draws(1)
    left, right = on_grid(8 * draws.normals(20, 512)), on_grid(8 * draws.normals(512, 20))
    units = exact.GRID**2
    whole = np.rint(left / exact.GRID).astype(object) @ np.rint(right / exact.GRID).astype(object)  # Python's integers
    np.testing.assert_array_equal((left @ right / units).astype(np.int64), whole.astype(np.int64))
    np.testing.assert_array_equal((left[:, ::-1] @ right[::-1]), left @ right)


def test_exp_and_log_are_right_to_some_last_bits() -> None:
    points = np.concatenate([np.linspace(-40, 40, 4001), [0.0, 1e-12, -1e-12, 700.0, -700.0]])
    with localcontext() as context:
        context.prec = 40
        for x, found in zip(points, exp(points), strict=True):
            assert abs(Decimal(float(found)) / Decimal(float(x)).exp() - 1) < Decimal("2e-15")
        for x, found in zip(np.exp(points), log(np.exp(points)), strict=True):
            wanted = Decimal(float(x)).ln()
            assert abs(Decimal(float(found)) - wanted) < Decimal("2e-15") * max(1, abs(wanted))


def test_normal_quantiles_are_so_coarse_that_errors_of_a_library_cannot_change_them() -> None:
    """Half a grid step is where rounding turns: no quantile is within 1e-12 of it, and `inv_cdf` is right to 1e-15."""
    places = np.asarray([NormalDist().inv_cdf((i + 0.5) / 2**16) for i in range(2**15)])
    steps = places * 2**20
    nearest = np.abs(steps - np.floor(steps) - 0.5).min() / 2**20
    assert nearest > 1e-12
    np.testing.assert_array_equal(exact._NORMAL64[: 2**15], np.rint(steps) / 2**20)
    np.testing.assert_array_equal(exact._NORMAL, exact._NORMAL64)  # float32 holds them all
    np.testing.assert_allclose(normal_quantiles(7), [NormalDist().inv_cdf((i + 0.5) / 7) for i in range(7)], atol=1e-6)


def test_draws_are_normal_uniform_and_in_any_order() -> None:
    values = Draws(3, 1).normals(400, 500).astype(np.float64)
    assert abs(values.mean()) < 5 / math.sqrt(values.size)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / values.size)
    assert abs((values**4).mean() - 3) < 0.1
    uniform = Draws(3, 2).uniforms(10_000)
    assert 0 <= uniform.min() < 0.001 < 0.999 < uniform.max() < 1
    assert sorted(Draws(3, 3).order(50)) == list(range(50))
    np.testing.assert_array_equal(Draws(3, 1).normals(5), values[0, :5])
    assert not np.array_equal(Draws(3, 4).normals(5), Draws(4, 3).normals(5))


def test_raw_bits_are_those_of_the_published_generator() -> None:
    """PCG64 (XSL-RR) and SeedSequence, which NumPy promises to keep: the first words of a stream, as they always were."""
    assert Draws(0, 1, 2, 3).raw(2).tolist() == [14132204965377392889, 15059639776266241494]


def test_softmax_is_right_to_the_precision_of_float16() -> None:
    found = softmax(LOGITS).astype(np.float64)
    powers = np.exp(LOGITS.astype(np.float64) - LOGITS.max(axis=1, keepdims=True))
    wanted = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found, wanted, rtol=3e-4, atol=5e-8)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-6)
