"""Bits of experts by the name of a quantisation: rows that blocks do not fill take wider types."""

from __future__ import annotations

import pytest

from moesim.model import load_model
from moesim.model.mixtures import wider_bits
from moesim.studies.identify.observations import read_bits

SMALL = {
    "name": "small", "n_layers": 2, "n_experts": 4, "top_k": 1, "hidden": 512, "expert_intermediate": 352, "n_heads": 2,
    "n_kv_heads": 2, "head_dim": 64, "vocab": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "widths", "more"),
    [
        ("Q2_K", {}, (4.5 - 3.4375) / 3),  # down: Q3_K to Q4_0
        ("Q4_K_M", {}, (1 + 8.5 - 6.5625) / 2 / 3),  # down: half Q4_K to Q5_0, half Q6_K to Q8_0
        ("Q4_K_M", {"expert_intermediate": 512}, 0),
        ("Q6_K", {"hidden": 544, "expert_intermediate": 512}, 2 * (8.5 - 6.5625) / 3),  # gate and up
        ("Q8_0", {}, 0),  # its blocks are of 32
    ],
)
def test_rows_that_blocks_do_not_fill_are_wider(name: str, widths: dict[str, int], more: float):
    model = load_model(SMALL | widths)
    assert wider_bits(name, model) == pytest.approx(more)
    ((bits,), (plain,)) = read_bits(name, "", model), read_bits(name, "")
    assert bits["expert_bits"] - plain["expert_bits"] == pytest.approx(more, abs=1e-4)


@pytest.mark.parametrize(("name", "gib"), [("Q2_K", 42), ("Q4_K_M", 68), ("Q8_0", 109)])
def test_files_of_glm_have_the_published_size(name: str, gib: float):
    model = load_model("glm-4.5-air")
    size = load_model({"base": "glm-4.5-air", **read_bits(name, "", model)[0]}).n_bytes / 2**30
    assert size == pytest.approx(gib, rel=0.04) and size < gib  # the file has a layer more, which is not loaded
