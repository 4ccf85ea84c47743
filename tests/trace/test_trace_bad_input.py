"""Damaged, hostile and inconsistent files: a valid trace or one line, and nothing written."""

from __future__ import annotations

import io
import json
import lzma
import pickle
import re
import struct
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from moesim.errors import InputError, TraceError
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from moesim.trace.files import arrays_of, full_header
from moesim.trace.format import _FILTERS, METADATA_KEY, PACKED_KEY, _compress, checksums, write_container
from moesim.trace.formats.contract import Options, Probe, reading
from moesim.trace.formats.importing import import_trace, refuse
from tests.trace import import_kit as kit
from tests.trace.import_kit import SOURCES, Source

FUZZ = settings(max_examples=40, derandomize=True, database=None)
MEMORY = 2**28  # far more than a file of some kilobytes may take


def refused(source: Source, path: Path, *words: str, **changes: Any) -> None:
    source.refused(path, path.parent / "t.safetensors", path.name, *words, **changes)


# ------------------------------------------------------------------------------------------ the same for all formats


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("kept", [0, 0.3, 0.6, 0.97])
def test_truncated(name: str, kept: float, tmp_path: Path) -> None:
    path = SOURCES[name].make(tmp_path)
    data = path.read_bytes()
    path.write_bytes(data[: int(kept * len(data))])
    refused(SOURCES[name], path, *["an empty file"][: kept == 0])


@pytest.mark.parametrize("name", SOURCES)
def test_a_pickle_is_never_loaded(name: str, tmp_path: Path) -> None:
    path, marker = SOURCES[name].make(tmp_path), tmp_path / "ran"

    class Touch:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    for protocol in (0, 2, 5):
        path.write_bytes(pickle.dumps(Touch(), protocol=protocol))
        refused(SOURCES[name], path, *["pickles are never loaded"][: protocol > 0])
    assert not marker.exists()


def test_a_trace_needs_no_import(tmp_path: Path) -> None:
    path = kit.trace().write(tmp_path / "a.safetensors")
    kit.refused(lambda: import_trace([path], tmp_path / "b.safetensors", Options()), "a trace of moesim needs no import")


@pytest.mark.parametrize("name", SOURCES)
@FUZZ
@given(data=st.data())
def test_fuzzed_sources(name: str, tmp_path_factory: Any, data: st.DataObject) -> None:
    """Whatever the bytes are: a valid trace, or one line."""
    folder = tmp_path_factory.getbasetemp() / f"fuzz-{name}"
    folder.mkdir(exist_ok=True)
    source = SOURCES[name]
    path = source.make(folder)
    path.write_bytes(mutated(path.read_bytes(), data))
    out = folder / "t.safetensors"
    said = ""
    try:
        source.load(path, out).trace.check()
        out.unlink()
    except InputError as caught:
        said = str(caught)
    assert "\n" not in said
    assert {p.name for p in folder.iterdir()} <= {path.name, f"{path.name}.json"}


def mutated(original: bytes, data: st.DataObject) -> bytes:
    """Change some bytes, cut, repeat or insert a stretch; half of the changes near the start, where headers are."""
    found = bytearray(original)
    for _ in range(data.draw(st.integers(1, 3))):
        if not found:
            break
        near = data.draw(st.booleans())
        at = data.draw(st.integers(0, min(len(found), 120 if near else len(found)) - 1))
        kind = data.draw(st.sampled_from(["flip", "set", "cut", "truncate", "insert", "repeat"]))
        length = data.draw(st.integers(1, 40))
        if kind == "flip":
            found[at] ^= 1 << data.draw(st.integers(0, 7))
        elif kind == "set":
            chunk = data.draw(st.sampled_from([b"\xff" * 8, b"\0" * 8, b"9" * 6, b"-1", b"nan", b",", b"\n", b'"', b"[[[["]))
            found[at : at + len(chunk)] = chunk
        elif kind == "cut":
            del found[at : at + length]
        elif kind == "truncate":
            del found[at:]
        elif kind == "insert":
            found[at:at] = data.draw(st.binary(min_size=1, max_size=12))
        else:
            found[at:at] = found[at : at + length]
    return bytes(found)


# ------------------------------------------------------------------------------------------------ archives and arrays


def npy(shape: Any, descr: str = "<i4", data: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue() + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (npy((7, 3, 2), data=b"\0" * 100), "it is truncated"),
        (npy((7, 3, 2), data=b"\0" * 200), "expected 168 bytes"),
        (npy((2**62, 2**62, 4)), "expected a readable array"),
        (npy((2**31, 2**31, 1)), "expected a readable array"),
        (npy((2**60, 0, 2)), "expected a readable array"),
        (npy((7, 3), data=b"\0" * 84), "expected shape (n, n, n), that is (tokens, layers, top_k), got (7, 3)"),
        (npy((7, 3, 2), "|O", b"\0" * 336), "Python objects"),
        (npy((7, 3, 2), "<f4", b"\0" * 168), "expected integer ids of experts, got float32"),
        (npy((7, 3, 2), "<i4", b"\xff" * 168), "[0, 0, 0]: expected an id in 0..65535, got -1"),
        (npy((7, 3, 2), "<i4", np.full(42, 70_000, "<i4").tobytes()), "expected an id in 0..65535, got 70000"),
        (npy((7, 3, 2), "<i4", np.full(42, 6, "<i4").tobytes()), "expected distinct experts, got [6, 6]"),
        (npy((7, 3, 2), "<i4", np.arange(42, dtype="<i4").tobytes()), "expected 0..6, got 7"),
        (b"\x93NUMPY\x09\x00" + b"\0" * 300, "expected a readable array"),
        (b"\x93NUMPY\x01\x00\x40\x00" + b"(" * 64, "expected a readable array"),
        (b"NUMPY", "expected a readable array"),
    ],
)
def test_arrays(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    refused(SOURCES["vllm-npy"], path, words)


def test_a_zip_bomb_is_not_opened(tmp_path: Path) -> None:
    """A gigabyte of zeros in a megabyte: refused by what the archive declares, before anything is expanded."""
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("routed_experts.npy", "w") as member:
        member.write(npy((2**17, 24, 8)))
        for _ in range(96):
            member.write(bytes(2**20))
    assert path.stat().st_size < 2**18
    tracemalloc.start()
    try:
        refused(SOURCES["vllm-npz"], path, "bytes when expanded")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**22
    data = bytearray(SOURCES["vllm-npz"].make(tmp_path).read_bytes())  # a member may hold less than it declares
    for begin in (data.index(b"PK\x01\x02"), data.rindex(b"PK\x01\x02")):  # the sizes in the directory of the archive
        struct.pack_into("<I", data, begin + 24, 2**30)
    path.write_bytes(bytes(data))
    refused(SOURCES["vllm-npz"], path, "bytes when expanded")


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"archive/data.pkl": b"\x80\x02."}, "a PyTorch file, which is a pickle"),
        ({"routed_experts.pkl": b"\x80\x02."}, "expected an archive of .npy arrays"),
        ({"routed_experts.npy": npy((2, 3, 2), "|O", b"\x80\x02." * 32)}, "Object arrays cannot be loaded"),
        ({"other.npy": npy((1,), data=b"\0" * 4)}, "an array 'routed_experts'"),
        ({}, "an empty one"),
        ({"routed_experts.npy": npy((1, 3, 2), data=np.arange(6, dtype="<i4").tobytes()),
          "n_prompt.npy": npy((), "<f8", bytes(8))}, "n_prompt: expected whole numbers, prompt tokens of each request"),
    ],
)  # fmt: skip
def test_archives(members: dict[str, bytes], words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    refused(SOURCES["vllm-npz"], path, words)


def test_altered_members_are_found_by_their_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, routed_experts=kit.IDS.astype(np.uint8))
    data = bytearray(path.read_bytes())
    data[data.index(kit.IDS.astype(np.uint8).tobytes()) + 5] ^= 1
    path.write_bytes(bytes(data))
    refused(SOURCES["vllm-npz"], path, "Bad CRC-32", n_prompt=(3,))


# ----------------------------------------------------------------------------------------------------- text and tables


FIRST = f"0,0,prefill,0,0,{kit.IDS[0, 0, 0]},"
DECODED = f"0,0,prefill,0,0,{kit.IDS[0, 0, 1]},"


def write_wrong(name: str, change: Any, path: Path) -> None:
    """Write the file of a source with something changed: fields of an answer or a row, arrays, or a text."""
    if name == "npz":
        np.savez(path, expert=kit.IDS, **change)
    elif name == "sglang":
        answer = kit.response(kit.IDS)
        path.write_text(json.dumps(answer | {"meta_info": answer["meta_info"] | change}))
    elif name == "jsonl":
        rows = kit.json_rows()
        rows[4] |= change
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        SOURCES[name].write(path)
        old, new = change
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new, 1 if name == "csv" else -1))


WRONG: dict[str, list[tuple[Any, str]]] = {
    "sglang": [
        ({"routed_experts": "!"}, "line 1.meta_info.routed_experts: expected base64"),
        ({"routed_experts": 3}, "expected base64 text, got int"),
        ({"routed_experts": "AAAA"}, "expected int32 for tokens x 3 layers x 2 experts, got 3 bytes"),
        ({"completion_tokens": 9}, "expected 11 rows for 12 tokens, got 7 with 3 layers and top-2"),
        ({"prompt_tokens": -1}, "prompt_tokens: expected a number of tokens, got -1"),
        ({"prompt_tokens": 99, "completion_tokens": None}, "at least the 99 rows of the prompt"),
    ],
    "npz": [
        ({"offsets": np.array([0, 3])}, "offsets: expected ascending rows from 0 to 7"),
        ({"offsets": np.arange(9)}, "offsets: expected shape (n,)"),
        ({"request": np.array([0, 1, 0, 0, 0, 0])}, "request: expected shape (7), request of each row"),
        ({"position": np.array([0, 1, 2, 4, 5, 6, 7])}, "request 0: expected every position in 0..7, got 7 entries in all"),
        ({"phase": np.array([0, 1, 0, 1, 1, 1, 1])}, "request 0, position 2, layer 0: expected decode after decode, got prefill"),
        ({"phase": np.array([0, 1, 2, 1, 1, 1, 1])}, "phase of row 2: expected 0..1, got 2"),
        ({"phase": np.zeros(6, int)}, "phase: expected shape (7)"),
        ({"n_prompt": np.array([0.5])}, "n_prompt: expected whole numbers"),
        ({"weight": kit.WEIGHTS[:, :2]}, "weight: expected shape (7, 3, 2), as the experts"),
        ({"name": np.arange(1)}, "name: expected short texts"),
    ],
    "bigmoe": [
        (("v1", "v2"), "line 1: expected # route_trace v1"),
        (("# route_trace v1", "x" * 99), f"got b'{'x' * 40}'"),
        (("n_layer=3", "n_layer=x"), "n_layer: expected a whole number, got 'x'"),
        (("# layer=1 ", "# layer=2 "), "a line '# layer=' for each of the 3 layers"),
        (("n_expert=7", "n_expert=5"), "expected 0..4, got"),
        (("n_expert=7", "n_expert=5"), "; export it again"),
        (("n_expert_used=2", "n_expert_used=3"), "3 layers and 3 experts a token as the preamble says, got 3 and 2"),
        (("0,1,5,1,0,", "0,1,5,1,9,"), "rank of row 32: expected 0..1, got 9"),
        (("0,1,5,1,0,", "0,1,5,1,1,"), "request 0, position 5, layer 1: expected an expert of rank 0"),
        (("0,1,5,1,0,", "0,0,5,1,0,"), "phase of row 32: expected one phase for a token"),
        (("0,1,5,", "0,1,9,"), "position"),
    ],
    "jsonl": [
        ({"selected_ids": [1, 2, 3]}, "line 5: expert: expected 2 values as in the rows before, got 3"),
        ({"selected_ids": [1, -2]}, "expert[4, 1]: expected an id in 0..65535, got -2"),
        ({"gate_weights": [0.5, -0.5]}, "weight[4, 1]: expected a weight in 0.."),
        ({"gate_weights": [0.5]}, "line 5: weight: expected (2,) values as of experts, in all records or in none, got (1,)"),
        ({"selected_ids": None}, "line 5: expected experts, got the fields layer_idx, "),
        ({"token_idx": 9_000_000_000}, "token of row 4: expected 0..2147483647"),
        ({"layer_idx": -1}, "layer of row 4: expected 0..4095, got -1"),
        ({"token_idx": 1.5}, "position: expected a value in all records or in none, got none in row 4"),
        ({"selected_ids": "x"}, "line 5: expected experts, got the fields layer_idx, "),
        ({"selected_ids": [1, "x"]}, "line 5: expert: expected whole numbers, ids of experts, got [1, 'x']"),
        ({"selected_ids": [1, 2**63]}, "line 5: expert: expected whole numbers, ids of experts, got [1, 9223372036854775808]"),
        ({"token_idx": 2}, "request 0, position 2, layer 1: expected 2 experts as elsewhere, got 4"),
    ],
    "csv": [
        ((FIRST, f"{FIRST}-"), "weight[0]: expected a weight in 0.."),
        ((FIRST, f"{FIRST}nan,"), "expected rows of a table"),
        ((FIRST, DECODED), "distinct"),  # the same expert twice
        ((FIRST, "0,0,prefill,0,0,9,"), "expert[0, 0, 0]: expected 0..6, got 9"),
        ((FIRST, "0,0,prefill,0,0,x,"), "expected rows of a table"),
        ((FIRST, "0,0,prefill,0,0,,"), "expert of row 0: expected a value, got none"),
        ((FIRST, "0,0,begin,0,0,1,"), "phase: expected prefill or decode, or 0 or 1, got 'begin'"),
        ((FIRST, "0,0,decode,0,0,1,"), "expected one phase for a token"),
        ((FIRST, "0,99,prefill,0,0,1,"), "positions must have no gaps"),
        ((str(float(kit.WEIGHTS[0, 0, 0])), "nan"), "weight[0]: expected a weight in 0..65504, got nan"),
        (("0,0,prefill", f"0,{2**40},prefill"), "token of row 0"),
        (("0,0,prefill", f"0,{10**30},prefill"), "expected rows of a table"),
        (("0,0,prefill", f"0,{2**31 - 1},prefill"), "positions must have no gaps"),
    ],
}
"""Source -> what is changed in its file, and what its refusal says."""


@pytest.mark.parametrize(("name", "change", "words"), [(name, *case) for name, cases in WRONG.items() for case in cases])
def test_what_is_wrong_is_named(name: str, change: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / SOURCES[name].file
    write_wrong(name, change, path)
    options = {"n_prompt": None, "phase": "decode", "columns": {}} if name == "npz" else {}
    refused(SOURCES[name], path, f"{path.name}: ", words, **options)


def test_facts_beside_a_csv(tmp_path: Path) -> None:
    path = SOURCES["csv"].make(tmp_path)
    for text in ("{", "[" * 9999, '{"moesim": {"n_experts": "7"}}', "[]"):
        (tmp_path / "a.csv.json").write_text(text)
        refused(SOURCES["csv"], path, "a.csv.json: moesim")


def test_json_that_is_nested_without_end(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"meta_info": ' + "[" * 100_000)
    refused(SOURCES["sglang"], path, "nested too deeply")


def test_a_parquet_bomb_is_not_opened(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    schema = pa.schema([("layer", pa.int64()), ("position", pa.int64()), ("expert", pa.int64())])
    zeros = pa.array(np.zeros(2**20, np.int64))
    with parquet.ParquetWriter(tmp_path / "a.parquet", schema) as writer:
        for _ in range(4):
            writer.write_table(pa.table([zeros] * 3, schema=schema))
    assert (tmp_path / "a.parquet").stat().st_size < 2**16
    refused(SOURCES["parquet"], tmp_path / "a.parquet", "bytes when expanded")


# -------------------------------------------------------------------------------------------------- our own container


@pytest.fixture(scope="module")
def native() -> Trace:
    return synthetic_trace(n_requests=2, prompt=3, decode=3, scores=True, calibration=True, signals={"gate_next1": 0.9})


def container(path: Path, entries: dict[str, Any], data: bytes, header: Any = None) -> Path:
    header = {"schema_version": 1} if header is None else header
    table = json.dumps(entries | {"__metadata__": {METADATA_KEY: json.dumps(header)}}).encode()
    path.write_bytes(struct.pack("<Q", len(table)) + table + data)
    return path


def entry(shape: Any, offsets: Any, dtype: str = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


TABLES = [
    {"x": entry([4], [0, 4]), "y": entry([4], [2, 6])}, {"x": entry([4], [0, 4]), "y": entry([4], [0, 4])},
    {"x": entry([4], [4, 8])}, {"x": entry([4], [0, 4])}, {"x": entry([9], [0, 9])}, {"x": entry([2**61, 8], [0, 8])},
    {"x": entry([0, 2**61, 2**61], [0, 0]), "y": entry([8], [0, 8])}, {"x": entry([-1], [0, -1])}, {"x": entry(["8"], [0, 8])},
    {"x": entry([1] * 99, [0, 1]), "y": entry([7], [1, 8])}, {"x": entry([8], None)}, {"x": entry([8], [0, 8], "F8_E4M3")},
    {"x": [1]},
]  # fmt: skip
TEXTS = [
    b'{"x": ' + b"[" * 100_000, b'{"x": NaN}', b'{"x": ' + b"1" * 5000 + b"}", b'{"\xff": 1}', b'{"__metadata__": 3}',
    b'{"__metadata__": {"moesim": 3}}', b'{"__metadata__": {"moesim": "[]"}}', b'{"__metadata__": {"moesim": "{"}}', b"{}",
    b'{"__metadata__": {"moesim": "{\\"schema_version\\": Infinity}"}}',
]  # fmt: skip


@pytest.mark.parametrize("table", [*TABLES, *TEXTS])
def test_a_table_of_arrays_that_cannot_be_is_refused_in_one_line(table: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    if isinstance(table, bytes):
        path.write_bytes(struct.pack("<Q", len(table)) + table)
    else:
        container(path, table, bytes(8))
    with pytest.raises(TraceError) as error:
        Trace.read(path)
    assert re.match(r"^[^\n]*t\.safetensors: .*expected .*, got.*; .*$", str(error.value)), str(error.value)


def test_a_length_that_would_fill_memory(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 2**40))
        file.truncate(2**41)
    with pytest.raises(TraceError, match="header too large; it is truncated or altered"):
        Trace.read(path)


@settings(FUZZ, max_examples=80)
@given(data=st.data())
def test_fuzzed_containers(native: Trace, tmp_path_factory: Any, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    native.write(path)
    path.write_bytes(mutated(path.read_bytes(), data))
    readable(path)


VALUES = st.none() | st.booleans() | st.integers(-2, 9) | st.just(2**70) | st.floats(allow_nan=False) | st.text(max_size=3)
VALUES |= st.just([]) | st.just({})


@settings(FUZZ, max_examples=80)
@given(data=st.data())
def test_fuzzed_headers_with_right_checksums(native: Trace, tmp_path_factory: Any, data: st.DataObject) -> None:
    """What checksums cannot find: wrong from the start."""
    arrays, header = dict(arrays_of(native)), json.loads(json.dumps(full_header(native)))
    if data.draw(st.booleans()):
        name = data.draw(st.sampled_from(sorted(arrays)))
        array = np.array(arrays[name])
        kind = data.draw(st.sampled_from(["value", "type", "shape", "drop"]))
        if kind == "drop":
            del arrays[name]
        elif kind == "type":
            arrays[name] = array.astype(data.draw(st.sampled_from([np.uint8, np.uint16, np.int64, np.float16, np.bool_])))
        elif kind == "shape":
            arrays[name] = array[..., None] if data.draw(st.booleans()) else array[:-1]
        else:
            where = data.draw(st.integers(0, array.size - 1))
            array.reshape(-1)[where] = data.draw(st.sampled_from([0, 1, 5, 100]))
            arrays[name] = array
    else:
        place, key = header, data.draw(st.sampled_from(sorted(header)))
        if key == "signals" and data.draw(st.booleans()):
            place = header["signals"]["gate_next1"]
            key = data.draw(st.sampled_from(sorted(place)))
        place[key] = data.draw(VALUES)
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    write_container(path, arrays, {**header, "sha256": checksums(arrays)})
    readable(path)


def readable(path: Path) -> None:
    """It is a valid trace, or one line says why not; and little memory is taken to find out."""
    tracemalloc.start()
    try:
        try:
            found = Trace.read(path)
        except TraceError as caught:
            said = str(caught)
        else:
            found.check()
            assert found.requests.n_decode.sum() <= found.n_rows
            said = str(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "\n" not in said
    assert str(path) in said
    assert peak < MEMORY


@pytest.mark.parametrize("text", ['{"ids": {"a": 1}}\n', "layer,__metadata__\n0,1\n"])
def test_text_that_has_a_part_of_a_trace_is_not_taken_for_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "routing.txt"
    path.write_text(text)
    refuse(Probe(path))
    text = kit.refused(lambda: import_trace([path], tmp_path / "b.safetensors", Options()))
    assert "safetensors" not in text


def test_what_a_library_says_of_a_table_is_one_line_of_some_words(tmp_path: Path) -> None:
    with pytest.raises(TraceError) as caught, reading(tmp_path / "t.parquet", "rows of a table"):
        raise ValueError("too\n  many words " * 100)
    said = str(caught.value)
    assert "t.parquet: expected rows of a table, got ValueError: too many words too many" in said
    assert "\n" not in said and len(said) < len(str(tmp_path)) + 500


def packable() -> Trace:
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((200, 4, 8)), axis=-1)[..., :2]
    weights = rng.integers(1, 9, (200, 4, 2)) / 16
    return Trace.build(
        experts=experts, weights=weights, n_prompt=[100], n_decode=[100], n_experts=8, model="tiny", label="synthetic"
    )


def test_packed_is_the_same_trace_in_fewer_bytes(tmp_path: Path) -> None:
    trace = packable()
    plain, packed = trace.write(tmp_path / "a.safetensors"), trace.write(tmp_path / "b.safetensors", packed=True)
    assert packed.stat().st_size < plain.stat().st_size / 2
    ids = trace.experts.astype(trace.experts.dtype.newbyteorder("<")).tobytes()
    assert len(load_file(packed)["experts"]) == min(len(_compress(ids, *bits)) for bits in _FILTERS)
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
    trace = packable()
    header = {**full_header(trace), "sha256": checksums(arrays_of(trace)), PACKED_KEY: facts}
    path = write_container(tmp_path / "a.safetensors", arrays_of(trace), header)
    kit.refused(lambda: Trace.read(path), words)


@pytest.mark.parametrize("length", [199, 201])
def test_another_length_than_announced(length: int, tmp_path: Path) -> None:
    trace = packable()
    arrays = {**arrays_of(trace), "phase": np.frombuffer(lzma.compress(trace.phase.tobytes()), np.uint8)}
    header = {**full_header(trace), "sha256": {}, PACKED_KEY: {"phase": {"dtype": "U8", "shape": [length]}}}
    path = write_container(tmp_path / "a.safetensors", arrays, header)
    kit.refused(lambda: Trace.read(path), f"phase: expected {length} bytes packed")
