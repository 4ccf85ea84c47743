"""Traces whose arrays are compressed: the same content, and one line where header and bytes do not agree."""

from __future__ import annotations

import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.errors import TraceError
from moesim.trace import Trace
from moesim.trace.files import arrays_of, full_header
from moesim.trace.format import PACKED_KEY, checksums, write_container


def make() -> Trace:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((200, 4, 8)), axis=-1)[..., :2]
    weights = rng.integers(1, 9, (200, 4, 2)) / 16
    return Trace.build(
        experts=experts, weights=weights, n_prompt=[100], n_decode=[100], n_experts=8, model="tiny", label="synthetic"
    )


def test_packed_is_the_same_trace_in_fewer_bytes(tmp_path: Path) -> None:
    trace = make()
    plain, packed = trace.write(tmp_path / "a.safetensors"), trace.write(tmp_path / "b.safetensors", packed=True)
    assert packed.stat().st_size < plain.stat().st_size / 2
    read = Trace.read(packed)
    assert read.digest == Trace.read(plain).digest
    assert PACKED_KEY not in read.header
    for name, array in arrays_of(read).items():
        np.testing.assert_array_equal(array, arrays_of(trace)[name], strict=True)
        assert not array.flags.writeable
    assert read.write(tmp_path / "c.safetensors").read_bytes() == plain.read_bytes()
    assert read.write(tmp_path / "d.safetensors", packed=True).read_bytes() == packed.read_bytes()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (7, "header.packed: expected facts of arrays of the file, got 7"),
        ({"nothing": {}}, "header.packed: expected facts of arrays"),
        ({"phase": 3}, "phase: header.packed: expected dtype and shape, got 3"),
        ({"phase": {"dtype": "F8", "shape": [200]}}, "phase: header.packed: expected dtype and shape"),
        ({"phase": {"dtype": "U8", "shape": [0]}}, "phase: header.packed: expected dtype and shape"),
        ({"phase": {"dtype": "U8", "shape": [2**61]}}, "phase: expected a row of packed bytes"),
        ({"phase": {"dtype": "U8", "shape": [200]}}, "phase: expected packed bytes, got"),
        ({"weights": {"dtype": "F16", "shape": [200]}}, "weights: expected a row of packed bytes, got float16"),
    ],
)
def test_a_header_that_does_not_fit(facts: Any, words: str, tmp_path: Path) -> None:
    trace = make()
    header = {**full_header(trace), "sha256": checksums(arrays_of(trace)), PACKED_KEY: facts}
    path = write_container(tmp_path / "a.safetensors", arrays_of(trace), header)
    with pytest.raises(TraceError) as error:
        Trace.read(path)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("shape", [[199], [201]])
def test_another_length_than_announced(shape: list[int], tmp_path: Path) -> None:
    trace = make()
    arrays = {**arrays_of(trace), "phase": np.frombuffer(lzma.compress(trace.phase.tobytes()), np.uint8)}
    header = {**full_header(trace), "sha256": {}, PACKED_KEY: {"phase": {"dtype": "U8", "shape": shape}}}
    with pytest.raises(TraceError, match=rf"phase: expected {shape[0]} bytes packed"):
        Trace.read(write_container(tmp_path / "a.safetensors", arrays, header))
