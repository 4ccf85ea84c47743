"""Traces: what is written is read, and whatever is wrong is said in one line."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from moesim.errors import TraceError
from moesim.trace import SUFFIX, GateInputs, Signal, Trace, find_trace, trace_names
from moesim.trace import format as trace_format
from moesim.trace.files import arrays_of, full_header
from moesim.trace.format import HEADER_SUM_KEY, METADATA_KEY, checksums, write_container
from tests.trace.import_kit import refused

LAYERS, EXPERTS, TOP_K = 3, 5, 2
PROMPT, DECODE = [2, 0, 3], [2, 3, 1]
ROWS = sum(PROMPT) + sum(DECODE)


def ids(n_rows: int, seed: int = 0, width: int = TOP_K) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(np.arange(EXPERTS, dtype=np.uint8), (n_rows, LAYERS, 1)), axis=2)[..., :width].copy()


def make(**changes: Any) -> Trace:
    rng = np.random.default_rng(1)
    rows = np.array([0, 1, 2, 3, 4], np.int32)  # request 0 and a part of request 1
    dense = Signal("gate_next1", rows, rng.random((5, LAYERS, EXPERTS)).astype(np.float16), about="gate reuse")
    decode = np.array([4, 5, 6, 10], np.int32)  # decode rows of requests 1 and 2, not of 0
    scores = rng.random((4, LAYERS, 4)).astype(np.float16)
    sparse = Signal("shadow", decode, scores, ids(4, 2, 4), 2, None, 0, "shadow model")
    given: dict[str, Any] = {
        "experts": ids(ROWS), "weights": rng.random((ROWS, LAYERS, TOP_K)), "scores": rng.random((ROWS, LAYERS, EXPERTS)),
        "n_prompt": PROMPT, "n_decode": DECODE, "prompt_offset": [0, 7, 0], "n_experts": EXPERTS, "model": "tiny",
        "label": "synthetic", "signals": {"gate_next1": dense, "shadow": sparse}, "header": {"seed": 3, "note": "made up"},
        "tables": {"activation_frequency": np.full((LAYERS, EXPERTS), 0.2, np.float32)},
    }  # fmt: skip
    return Trace.build(**{**given, **changes})


def altered(trace: Trace, array: str, index: Any, value: Any) -> Trace:
    changed = np.array(getattr(trace, array))
    changed[index] = value
    return dataclasses.replace(trace, **{array: changed})


# ------------------------------------------------------------ round trip


def test_round_trip(tmp_path: Path) -> None:
    trace = make()
    path = trace.write(tmp_path / "a.safetensors")
    back = Trace.read(path)
    for name in ("experts", "weights", "request", "position", "phase", "scores"):
        left, right = getattr(trace, name), getattr(back, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    assert back.header["note"] == "made up"
    assert back.header["label"] == back.label == "synthetic"
    assert (back.n_rows, back.n_layers, back.n_experts, back.top_k, back.n_requests) == (ROWS, LAYERS, EXPERTS, TOP_K, 3)
    assert sorted(back.signals) == ["gate_next1", "shadow"]
    for name, signal in trace.signals.items():
        other = back.signals[name]
        np.testing.assert_array_equal(signal.rows, other.rows)
        np.testing.assert_array_equal(signal.scores, other.scores)
        for fact in ("name", "lookahead", "needs_layer_offset", "first_layer", "about"):
            assert getattr(signal, fact) == getattr(other, fact)
    np.testing.assert_array_equal(trace.signals["shadow"].ids, back.signals["shadow"].ids)
    np.testing.assert_array_equal(trace.tables["activation_frequency"], back.tables["activation_frequency"])
    assert back.digest == trace.digest


def test_an_array_is_packed_by_the_filter_that_makes_it_smallest_if_any_does() -> None:
    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        "bytes": np.minimum(rng.geometric(0.2, 99_000), 255).astype(np.uint8),  # of several chunks: the first says nothing
        "words": rng.integers(0, 900, 99_000).astype(np.uint16),
        "halves": np.sort(rng.random(99_000)).astype(np.float16), "noise": rng.integers(0, 256, 3000).astype(np.uint8),
    }  # fmt: skip
    packed, facts = trace_format._pack(arrays)
    sizes = {name: [len(trace_format._compress(one.tobytes(), *bits)) for bits in trace_format._FILTERS]
             for name, one in arrays.items()}  # fmt: skip
    assert set(facts) == {"bytes", "words", "halves"} and packed["noise"] is arrays["noise"]
    assert {name: packed[name].nbytes for name in facts} == {name: min(sizes[name]) for name in facts}
    assert all(len(set(sizes[name])) > 1 for name in facts)


def test_same_content_same_bytes_and_views_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"old")
    first = make().write(path).read_bytes()  # it replaces, and leaves nothing else
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
    back = Trace.read(path)
    assert not back.experts.flags.writeable and not back.experts.flags.owndata
    assert make().write(tmp_path / "b.safetensors").read_bytes() == first
    assert back.write(tmp_path / "c.safetensors").read_bytes() == first


def test_request_table() -> None:
    trace = make()
    table = trace.requests
    assert len(table) == trace.n_requests == 3
    assert table.first_row.tolist() == [0, 4, 7]
    assert (table.n_prompt.tolist(), table.n_decode.tolist()) == (PROMPT, DECODE)
    assert table.prompt_offset.tolist() == trace.prompt_offset.tolist() == [0, 7, 0]
    assert trace.position.tolist() == [0, 1, 2, 3, 7, 8, 9, 0, 1, 2, 3]
    assert trace.phase.tolist() == [0, 0, 1, 1, 1, 1, 1, 0, 0, 0, 1]
    assert table.signals == (("gate_next1",), ("shadow",), ("shadow",))
    assert trace.has_signal("gate_next1", 0) and not trace.has_signal("gate_next1", 1)  # only one of its rows
    assert trace.has_signal("shadow", 2)  # decode only, and all of it
    assert not trace.has_signal("unheard-of", 0)


def test_to_frame() -> None:
    trace = make()
    frame = trace.to_frame()
    assert len(frame) == ROWS * LAYERS * TOP_K
    row, layer, rank = 5, 2, 1
    line = frame.iloc[(row * LAYERS + layer) * TOP_K + rank]
    assert (line.request, line.position, line.phase) == (1, 8, "decode")
    assert (line.layer, line["rank"], line.expert) == (layer, rank, trace.experts[row, layer, rank])
    assert line.weight == pytest.approx(float(trace.weights[row, layer, rank]))


def test_more_than_256_experts_take_two_bytes(tmp_path: Path) -> None:
    about = {"n_prompt": [0], "n_decode": [1], "n_experts": 384, "model": "m", "label": "synthetic"}
    trace = Trace.build(experts=np.array([[[300, 2]]]), weights=np.ones((1, 1, 2)), **about)
    assert Trace.read(trace.write(tmp_path / "a.safetensors")).experts.tolist() == [[[300, 2]]]


# ------------------------------------------------------------ damaged files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make().write(tmp_path / "t.safetensors")


@pytest.mark.parametrize("kept", [0, 5, 40, 0.5, 0.99])
def test_truncated(path: Path, kept: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    text = refused(lambda: Trace.read(path), "t.safetensors")
    assert "truncated" in text or "non-empty" in text


def test_altered_byte_is_found_and_named(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    refused(lambda: Trace.read(path), "expected sha256", "altered")
    Trace.read(path, verify=False)


def test_not_a_trace(tmp_path: Path) -> None:
    refused(lambda: Trace.read(tmp_path / "none.safetensors"), "none.safetensors: expected a trace file")
    other = tmp_path / "o.safetensors"
    for content in (b"PK\x03\x04 something else altogether, long enough", struct.pack("<Q", 9) + b"[1, 2, 3]"):
        other.write_bytes(content)
        words = ("expected a readable, non-empty trace file in safetensors, got: ", "; it is truncated")
        refused(lambda: Trace.read(other), *words)
    table = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    other.write_bytes(struct.pack("<Q", len(table)) + table + b"\0\0\0\0")
    words = ("expected the key 'moesim'", "; record it again, or write it with moesim.trace.Trace.write")
    refused(lambda: Trace.read(other), *words)


def rewritten(path: Path, header: dict[str, Any], drop: str = "", rename: tuple[str, str] | None = None) -> Path:
    trace = Trace.read(path)
    arrays = {k: v for k, v in arrays_of(trace).items() if k != drop}
    if rename:
        arrays[rename[1]] = arrays.pop(rename[0])
    full = {**trace.header, "sha256": checksums(arrays), **header}
    return write_container(path, arrays, full)


@pytest.mark.parametrize(
    ("header", "arrays", "expected"),
    [
        ({"schema_version": 99}, {}, "header.schema_version: expected 1, got 99"),
        ({"top_k": 3}, {}, r"experts: expected shape \(11, 3, 3\), got \(11, 3, 2\)"),
        ({"n_layers": 4}, {}, r"experts: expected shape \(11, 4, 2\)"),
        ({"n_experts": 6}, {}, r"scores: expected shape \(11, 3, 6\), got \(11, 3, 5\)"),
        ({"n_experts": "five"}, {}, "header.n_experts: expected a positive integer, got 'five'"),
        ({"top_k": 9}, {}, "header.top_k: expected at most n_experts = 5, got 9"),
        ({"sha256": None}, {}, "header.sha256: expected an object, got None"),
        ({"signals": {}}, {}, r"signals: expected \[\] of the header, got \['gate_next1', 'shadow'\]"),
        ({"signals": {"gate_next1": {"x": 1}, "shadow": {}}}, {}, "header.signals.gate_next1: expected lookahead"),
        ({"label": "true"}, {}, "header.label: expected measured or synthetic, got 'true'"),
        ({"model": None}, {}, "header.model: expected a name, got None"),
        ({"model": "two\nlines"}, {}, "header.model: expected a name"),
        ({"n_experts": 2**17}, {}, "header.n_experts: expected at most 65536"),
        ({"n_layers": True}, {}, "header.n_layers: expected a positive integer, got True"),
        ({"sha256": {"experts": 1}}, {}, r"expected the arrays \['experts'\] of the header"),
        ({}, {"drop": "phase"}, "expected an array 'phase'"),
        ({}, {"drop": "signal_rows/shadow"}, "signals/shadow: expected 'signal_rows/shadow'"),
        ({"sha256": {"scores": ""}}, {"rename": ("scores", "score")}, "expected the arrays"),
    ],
)
def test_wrong_files(path: Path, header: dict[str, Any], arrays: dict[str, Any], expected: str) -> None:
    with pytest.raises(TraceError, match=f"^[^\n]*{expected}[^\n]*$"):
        Trace.read(rewritten(path, header, **arrays))


# ------------------------------------------------------------ inconsistent arrays

F16 = np.float16
SIGNAL = Signal("s", np.array([1, 2], np.int32), np.zeros((2, LAYERS, EXPERTS), F16), None, 1, 1, 0)


def signal(**changes: Any) -> dict[str, Any]:
    return {"signals": {"s": dataclasses.replace(SIGNAL, **changes)}}


def gate_inputs(rows: list[int], *shape: int) -> dict[str, Any]:
    return {"inputs": GateInputs(np.array(rows, np.int32), np.zeros(shape, F16))}


def changed(array: str, index: Any, value: Any) -> dict[str, Any]:
    return {array: getattr(altered(make(), array, index, value), array)}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (changed("experts", (3, 1, 0), 5), r"experts\[3, 1, 0\]: expected 0..4, got 5"),
        (changed("experts", (3, 1), [2, 2]), r"experts\[3, 1\]: expected distinct experts, got \[2, 2\]"),
        (changed("weights", (2, 0, 1), np.nan), r"weights\[2, 0, 1\]: expected a finite number of at least 0, got nan"),
        (changed("weights", (2, 0, 1), -0.5), r"weights\[2, 0, 1\]: expected a finite number of at least 0, got -0.5"),
        (changed("scores", (2, 0, 1), np.inf), r"scores\[2, 0, 1\]: expected a finite number of at least 0, got inf"),
        (changed("request", 0, 1), r"request\[0\]: expected 0, got 1"),
        (changed("request", 5, 0), r"request\[5\]: expected 1 or the next number .*, got 0"),
        (changed("position", 2, 5), r"position\[2\] of request 0: expected 2, one after the row before, got 5"),
        (changed("position", 0, -1), r"position\[0\]: expected at least 0, got -1"),
        (changed("phase", 3, 2), r"phase\[3\]: expected 0 \(prefill\) or 1 \(decode\), got 2"),
        (changed("phase", 3, 0), r"phase\[3\] of request 0: expected 1 \(decode\) after decode, got 0"),
        ({"experts": ids(ROWS).astype(np.int64)}, "experts: expected uint8 or uint16, got int64"),
        ({"weights": np.zeros((ROWS, LAYERS, TOP_K), np.float32)}, "weights: expected float16, got float32"),
        ({"phase": np.zeros(ROWS - 1, np.uint8)}, r"phase: expected shape \(11,\), got \(10,\)"),
        ({"request": np.int32(0)}, r"request: expected one axis, got shape \(\)"),
        ({"request": np.zeros((2, 6), np.int32)}, "request: expected one axis"),
        ({"request": np.zeros(0, np.int32)}, r"position: expected shape \(0,\)"),
        ({"tables": {"residual": np.zeros((2, 4), F16)}}, "calibration/residual: expected 3 layers first"),
        ({"tables": {"residual": np.full((3, 4), np.nan)}}, r"calibration/residual\[0, 0\]: expected a finite"),
        ({"tables": {"coactivation": np.zeros((3, 5))}}, r"coactivation: expected shape \(3, 5, 5\), got \(3, 5\)"),
        ({"tables": {"activation_frequency": np.full((3, 5), -1.0)}}, "a finite number of at least 0"),
        ({"tables": {"a\x07": np.zeros((LAYERS, 1), np.float32)}}, "calibration.0: expected text that can be shown"),
        ({"header": {}}, "header: expected the key 'schema_version'"),
        ({"header": {**make().header, "source": {"file\x1b[2J": 1}}}, "header.source: .*, got the control character"),
        ({"header": {**make().header, "remarks": ["one", "\u202etwo"]}}, "header.remarks.1: .*, got the control character"),
        (signal(rows=np.array([1, 1], np.int32)), "s: rows: expected ascending rows in 0..10"),
        (signal(rows=np.array([9, 11], np.int32)), "s: rows: expected ascending rows in 0..10"),
        (signal(rows=np.array([1, 2])), "s: rows: expected int32, got int64"),
        (signal(rows=np.int32(0)), "s: rows: expected one axis"),
        (signal(scores=np.zeros((2, LAYERS, 4), F16)), r"s: scores: expected shape \(2, 3, 5\), got \(2, 3, 4\)"),
        (signal(scores=np.full((2, LAYERS, EXPERTS), np.nan, F16)), r"s: scores\[0, 0, 0\]: expected a finite"),
        (signal(ids=ids(2, 0, 4)), r"s: scores: expected shape \(2, 3, 4\), got \(2, 3, 5\)"),
        (signal(ids=np.zeros((2, LAYERS), np.uint8)), "s: ids: expected .* ids, got shape"),
        (signal(ids=np.zeros((2, LAYERS, 4), np.uint8), scores=np.zeros((2, LAYERS, 4), F16)), r"ids\[0, 0\]: expected distinct"),
        (signal(first_layer=3), "s: first_layer: expected 0..2, got 3"),
        (signal(first_layer="x"), "s: first_layer: expected 0..2, got 'x'"),
        (signal(lookahead=-1), "s: lookahead and needs_layer_offset: expected at least 0"),
        (signal(lookahead=1.5), "s: lookahead and needs_layer_offset: expected at least 0, whole numbers"),
        (signal(about=7), "s: about: expected a line of text"),
        (gate_inputs([1, 1], 2, LAYERS, 7), "inputs: rows: expected ascending rows"),
        (gate_inputs([1, ROWS], 2, LAYERS, 7), "inputs: rows: expected ascending rows"),
        (gate_inputs([1, 2], 2, LAYERS + 1, 7), "inputs: expected shape"),
        (gate_inputs([1, 2], 2, LAYERS), "inputs: expected .* values, got shape"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_neither_read_nor_written(changes: dict[str, Any], expected: str, tmp_path: Path) -> None:
    wrong = dataclasses.replace(make(), **changes)
    with pytest.raises(TraceError, match=rf"^t\.safetensors: [^\n]*{expected}[^\n]*$"):
        wrong.check("t.safetensors")
    with pytest.raises(TraceError, match=expected):
        wrong.write(tmp_path / "t.safetensors")
    assert not list(tmp_path.iterdir())


def test_no_rows() -> None:
    with pytest.raises(TraceError, match="request: expected at least one row"):
        make(
            experts=ids(0), weights=np.zeros((0, LAYERS, TOP_K)), scores=None, n_prompt=[], n_decode=[],
            prompt_offset=[], signals=None,
        )  # fmt: skip


# ------------------------------------------------------------ names


def test_find_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make().write(tmp_path / "traces" / f"tiny-one{SUFFIX}")
    assert find_trace("tiny-one").samefile(tmp_path / "traces" / f"tiny-one{SUFFIX}")
    assert find_trace(f"traces/tiny-one{SUFFIX}") == Path(f"traces/tiny-one{SUFFIX}")
    assert "tiny-one" in trace_names()
    refused(lambda: find_trace("tiny-two"), "unknown trace 'tiny-two'; did you mean 'tiny-one'?")
    with pytest.raises(TraceError, match="nothing there"):
        find_trace("elsewhere/x.safetensors")


MINIATURES = {"mini-mixtral": (32, 8, 2), "mini-deepseek-v2-lite": (26, 64, 6), "mini-qwen3": (48, 128, 8)}


@pytest.mark.parametrize("name", MINIATURES)
def test_shipped_miniature(name: str) -> None:
    if name not in trace_names():
        pytest.skip(f"no traces/{name}.safetensors: python experiments/research/train_miniature.py makes it")
    trace = Trace.read(find_trace(name))
    header = trace.header
    assert (trace.n_layers, trace.n_experts, trace.top_k) == MINIATURES[name]
    assert trace.label == "measured"
    assert trace.origin == "miniature"
    assert "costs must come from the full" in header["note"]
    for key in ("file", "tokens_sha256"):
        ours, others = ({(r[key], r["start"]) for r in header[k]} for k in ("trace_requests", "calibration_requests"))
        assert not ours & others
    assert not set(header["trace_files"]) & set(header["calibration_files"])
    assert {request["kind"] for request in header["trace_requests"]} == {"code", "prose"}
    loss, bigram = header["training"]["held_out_loss"], header["training"]["held_out_loss_bigram"]
    pairs = [(loss[kind], bigram[kind]) for kind in loss] if isinstance(loss, dict) else [(loss, bigram)]
    assert all(ours < theirs for ours, theirs in pairs)
    table = trace.requests
    lengths = list(zip(table.n_prompt.tolist(), table.n_decode.tolist(), strict=True))
    assert len(lengths) == 64
    assert all(n_prompt in (*range(64, 257), 1024) and n_decode in (128, 512) for n_prompt, n_decode in lengths)
    assert lengths.count((256, 512)) >= 2
    assert lengths.count((1024, 128)) >= 2
    mass = trace.weights.astype(np.float32).sum(axis=2)
    if name == "mini-deepseek-v2-lite":  # a softmax over all, not divided by the sum of the chosen
        assert mass.max() < 1
    else:
        np.testing.assert_allclose(mass, 1.0, atol=4e-3)
    if trace.scores is not None:
        # The routed experts are the best of the full softmax, whose ties at half precision are left alone.
        best = np.sort(trace.scores, axis=2)[:, :, ::-1][:, :, : trace.top_k]
        np.testing.assert_array_equal(np.take_along_axis(trace.scores, trace.experts.astype(np.int64), axis=2), best)
    signals = {"gate_next1", "gate_next2", "gate_next3", "residual", "learned", "shadow-int8:T1:KV1"}
    assert set(trace.signals) == signals
    assert all(sum(trace.has_signal(signal, r) for r in range(64)) == 8 for signal in signals)
    assert {"activation_frequency", "coactivation", "residual"} <= set(trace.tables)


def test_shipped_traces_are_small() -> None:
    if set(MINIATURES) - set(trace_names()):
        pytest.skip("not all of the shipped traces are here: python experiments/research/train_miniature.py makes them")
    assert sum(find_trace(name).stat().st_size for name in MINIATURES) <= 24 * 2**20


# ------------------------------------------------------------ optional parts


def test_without_weights(tmp_path: Path) -> None:
    trace = make(weights=None)
    back = Trace.read(trace.write(tmp_path / "a.safetensors"))
    assert back.weights is None
    assert "weight" not in back.to_frame()
    assert back.digest == trace.digest != make().digest


def test_gate_inputs_and_their_rows(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(3, LAYERS, 7)).astype(np.float16)
    trace = make(inputs=GateInputs(np.array([1, 4, 5], np.int32), values))
    back = Trace.read(trace.write(tmp_path / "a.safetensors")).inputs
    np.testing.assert_array_equal(back.values, values)
    assert back.rows.tolist() == [1, 4, 5]
    assert make().inputs is None
    arrays = {name: array for name, array in arrays_of(trace).items() if name != "input_rows"}
    write_container(tmp_path / "b.safetensors", arrays, {**full_header(trace), "sha256": checksums(arrays)})
    refused(lambda: Trace.read(tmp_path / "b.safetensors"), "expected both 'inputs' and 'input_rows'")


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    """The writer is ours, since the library's needs all of a file in memory; its reader is the judge."""
    trace = make()
    path = trace.write(tmp_path / "a.safetensors")
    for name, array in safetensors.numpy.load_file(path).items():
        np.testing.assert_array_equal(array, arrays_of(trace)[name])
    with safetensors.safe_open(path, "np") as file:
        assert json.loads(file.metadata()[METADATA_KEY])["sha256"] == checksums(arrays_of(trace))
        assert sorted(file.keys()) == sorted(arrays_of(trace))
        written = safetensors.numpy.save(arrays_of(trace), metadata=dict(file.metadata()))
    assert table_and_data(path.read_bytes()) == table_and_data(written)  # the library's order of metadata is random


def table_and_data(written: bytes) -> tuple[Any, bytes]:
    end = 8 + int.from_bytes(written[:8], "little")
    return json.loads(written[8:end]), written[end:]


def test_no_bit_of_what_comes_before_the_arrays_can_change_unnoticed(tmp_path: Path) -> None:
    """Some of the header is only for people: nothing else would notice that it says something else."""
    path = make(header={"remark": "a word"}).write(tmp_path / "a.safetensors")
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    end = 8 + int.from_bytes(whole[:8], "little")
    for at in rng.permutation(8 * end)[:1500].tolist():
        path.write_bytes(whole[: at // 8] + bytes([whole[at // 8] ^ (1 << at % 8)]) + whole[at // 8 + 1 :])
        with pytest.raises(TraceError):
            Trace.read(path)


def test_a_header_of_an_earlier_version_has_no_sum(tmp_path: Path) -> None:
    trace = make()
    table, data = table_and_data(trace.write(tmp_path / "a.safetensors").read_bytes())
    del table["__metadata__"][HEADER_SUM_KEY]
    text = json.dumps(table).encode()
    (tmp_path / "b.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert Trace.read(tmp_path / "b.safetensors").digest == trace.digest


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make().write(tmp_path / "a.safetensors")
    before = path.read_bytes()
    monkeypatch.setattr("moesim.trace.format._PIECE_BYTES", 7)  # a piece at a time, it is the same
    assert make().write(path).read_bytes() == before

    def fail(_array: object) -> None:
        raise OSError("disk full")

    trace = make(weights=None)
    assert trace.digest
    monkeypatch.setattr("moesim.trace.format._pieces", fail)
    with pytest.raises(OSError, match="disk full"):
        trace.write(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
