"""What is exported is read back as it was, and other programs read it as we mean it."""

from __future__ import annotations

import csv
import json
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesim.cli.main import main
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from moesim.trace.formats.importing import import_trace
from moesim.trace.formats.oracle_general import RECORD, export_oracle_general
from moesim.trace.formats.tabular_export import export_csv, export_parquet
from tests.cache_replay import replay_belady, replay_lru
from tests.helpers_bigmoe import read_route_trace
from tests.helpers_shared import shared_file
from tests.trace import import_kit as kit
from tests.trace.import_kit import DECODE, IDS, PROMPT, SOURCES, WEIGHTS

EXPORTS = {"csv": export_csv, "parquet": export_parquet}


def same(left: Trace, right: Trace) -> None:
    for name in ("experts", "weights", "request", "position", "phase"):
        mine, other = getattr(left, name), getattr(right, name)
        assert (mine is None) == (other is None)
        if mine is not None:
            assert mine.dtype == other.dtype
            np.testing.assert_array_equal(mine, other)
    assert (left.model, left.label, left.n_experts) == (right.model, right.label, right.n_experts)


# ------------------------------------------------------------------------------------------------- CSV and Parquet


@pytest.mark.parametrize("form", EXPORTS)
@settings(max_examples=12, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)).filter(any), min_size=1, max_size=4),
    shape=st.sampled_from([(1, 1, 1), (1, 3, 1), (3, 5, 5), (2, 300, 2)]),
    offset=st.integers(0, 100),
    weighted=st.booleans(),
    label=st.sampled_from(["measured", "synthetic"]),
    seed=st.integers(0, 9),
)
def test_round_trips_are_exact(
    form: str, tmp_path_factory: Any, lengths: Any, shape: Any, offset: int, weighted: bool, label: str, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("round")
    layers, experts, top_k = shape
    n_rows = sum(a + b for a, b in lengths)
    trace = kit.trace(
        experts=kit.routing(n_rows, seed, layers, experts, top_k), n_prompt=[a for a, _ in lengths],
        weights=np.random.default_rng(seed).random((n_rows, layers, top_k)) if weighted else None,
        n_decode=[b for _, b in lengths], prompt_offset=offset, n_experts=experts, label=label, header={"note": "kept"},
    )  # fmt: skip
    EXPORTS[form](trace, folder / "a")
    back = import_trace([folder / "a"], folder / "b.safetensors", form=form).trace
    same(trace, back)
    assert back.header["exported_from"]["note"] == "kept"
    EXPORTS[form](back, folder / "c")
    if form == "csv":
        assert (folder / "a").read_bytes() == (folder / "c").read_bytes()


@pytest.mark.parametrize("form", EXPORTS)
@pytest.mark.parametrize(
    ("label", "kept", "origin"),
    [
        ("measured", {"miniature": True, "miniature_of": "mixtral-8x7b"}, "miniature"),
        ("synthetic", {"synthesis": {"fitted_to": "x", "parameters": {"a": 1}}}, "synthetic"),
        ("measured", {}, "recorded"),
    ],
)
def test_what_is_no_recording_stays_none(form: str, label: str, kept: dict[str, Any], origin: str, tmp_path: Path) -> None:
    trace = kit.trace(label=label, header=dict(kept))
    for i in range(2):  # an import is exported again
        EXPORTS[form](trace, tmp_path / f"{i}.{form}")
        trace = import_trace([tmp_path / f"{i}.{form}"], tmp_path / f"{i}.safetensors").trace
        names = ("miniature", "miniature_of", "synthesis")
        assert {name: trace.header[name] for name in names if name in trace.header} == kept
        assert (trace.label, trace.origin) == (label, origin)
    if form == "csv" and "miniature" in kept:
        beside = tmp_path / "1.csv.json"
        beside.write_text(beside.read_text().replace('"miniature": true', '"miniature": "no"'))
        words = "1.csv.json: moesim.miniature: expected bool as the trace had, got 'no'"
        kit.refused(lambda: import_trace([tmp_path / "1.csv"], tmp_path / "b.safetensors"), words)


@pytest.mark.parametrize("form", EXPORTS)
def test_every_weight_survives(form: str, tmp_path: Path) -> None:
    weights = np.arange(2**16, dtype=np.uint16).view(np.float16)
    weights = np.abs(weights[np.isfinite(weights)])[:, None, None]
    trace = kit.trace(experts=np.zeros(weights.shape, int), weights=weights, n_prompt=[0], n_decode=[len(weights)])
    EXPORTS[form](trace, tmp_path / "a")
    back = import_trace([tmp_path / "a"], tmp_path / "b.safetensors", form=form).trace
    np.testing.assert_array_equal(back.weights, weights)


def test_the_csv_is_plain(tmp_path: Path) -> None:
    export_csv(kit.trace(), tmp_path / "a.csv")
    with (tmp_path / "a.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == kit.IDS.size
    cell = (5, 2, 1)
    row = rows[np.ravel_multi_index(cell, kit.IDS.shape)]
    assert row | {"weight": 0} == {
        "request": "0", "position": "5", "phase": "decode", "layer": "2", "rank": "1", "expert": str(kit.IDS[cell]), "weight": 0,
    }  # fmt: skip
    assert np.float16(row["weight"]) == kit.WEIGHTS[cell]
    facts = json.loads((tmp_path / "a.csv.json").read_text())["moesim"]
    assert (facts["n_experts"], facts["label"]) == (kit.EXPERTS, "measured")


def test_pandas_reads_the_parquet(tmp_path: Path) -> None:
    import pandas as pd

    export_parquet(kit.trace(), tmp_path / "a.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "a.parquet"), kit.trace().to_frame(), check_dtype=False)


# -------------------------------------------------------------------------------------------------- oracleGeneral


def exported(trace: Trace, folder: Path, sizes: list[int] | None = None, **options: Any) -> tuple[Path, list[tuple[int, ...]]]:
    path = folder / "a.oracleGeneral"
    export_oracle_general(trace, path, sizes or [1] * trace.n_layers, **options)
    return path, list(struct.iter_unpack("<IQIq", path.read_bytes()))


def test_the_order_is_that_of_execution(tmp_path: Path) -> None:
    trace = kit.trace()
    _, rows = exported(trace, tmp_path, [10, 20, 30])
    visits = [(t, layer) for layer in range(kit.LAYERS) for t in range(kit.PROMPT)]
    visits += [(t, layer) for t in range(kit.PROMPT, kit.ROWS) for layer in range(kit.LAYERS)]
    wanted = [(t, layer * kit.EXPERTS + int(e), 10 * (layer + 1)) for t, layer in visits for e in kit.IDS[t, layer]]
    assert [row[:3] for row in rows] == wanted
    for layer in range(kit.LAYERS):
        _, one = exported(trace, tmp_path, [10, 20, 30], layer=layer)
        assert [row[:3] for row in one] == [row for row in wanted if row[2] == 10 * (layer + 1)]
    _, prefill = exported(trace, tmp_path, phase="prefill")
    assert [row[:2] for row in prefill] == [row[:2] for row in wanted if row[0] < kit.PROMPT]


@pytest.mark.parametrize("cells", [2**20, 1, 7])
def test_next_use_is_the_next_use(cells: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesim.trace.formats.oracle_general._CELLS", cells)
    _, rows = exported(synthetic_trace(n_layers=3, n_requests=3, prompt=[4, 0, 5], decode=[6, 7, 0]), tmp_path)
    objects = [row[1] for row in rows]
    for i, (_, key, _, following) in enumerate(rows):
        later = objects[i + 1 :]
        assert following == (i + 1 + later.index(key) if key in later else -1)


def admitting_belady(rows: list[tuple[int, ...]], capacity: int) -> int:
    """Hits of the cache that keeps every object it fetches, and drops what is needed again last, by the file's own figures."""
    cached: dict[int, float] = {}
    hits = 0
    for _, key, _, following in rows:
        hits += key in cached
        if key not in cached and len(cached) == capacity:
            del cached[max(cached, key=cached.__getitem__)]
        cached[key] = following if following >= 0 else np.inf
    return hits


def test_libcachesim_reads_it(tmp_path: Path) -> None:
    """Their LRU and their Belady, on our file, hit as often as ours do on the trace."""
    lib = pytest.importorskip("libcachesim")
    trace = synthetic_trace(n_layers=2, n_experts=16, top_k=3, n_requests=5, prompt=0, decode=60)
    path, rows = exported(trace, tmp_path)
    capacity = 9
    visits = [[layer * 16 + int(e) for e in trace.experts[t, layer]] for t in range(trace.n_rows) for layer in range(2)]
    assert [key for visit in visits for key in visit] == [row[1] for row in rows]
    for theirs, hits in (
        (lib.LRU, sum(replay_lru(visits, capacity, set_wise=False))),
        (lib.Belady, admitting_belady(rows, capacity)),
    ):
        reader = lib.TraceReader(str(path), lib.TraceType.ORACLE_GENERAL_TRACE, lib.ReaderInitParam(ignore_obj_size=True))
        assert reader.get_num_of_req() == len(rows)
        missed, _ = theirs(cache_size=capacity).process_trace(reader)
        assert round((1 - missed) * len(rows)) == hits
    assert hits <= sum(replay_belady(visits, capacity, set_wise=False))  # which need not keep what it has just fetched


def test_libcachesim_writes_the_same(tmp_path: Path) -> None:
    """Their own converter, on a CSV of the same requests, agrees on objects, sizes and what comes next."""
    lib = pytest.importorskip("libcachesim")
    trace = synthetic_trace(n_layers=2, n_requests=2, prompt=3, decode=9)
    path, rows = exported(trace, tmp_path, [100, 200])
    (tmp_path / "a.csv").write_text("".join(f"{time},{key},{size}\n" for time, key, size, _ in rows))
    init = lib.ReaderInitParam(has_header=False, delimiter=",", obj_id_is_num=True)
    init.time_field, init.obj_id_field, init.obj_size_field = 1, 2, 3
    reader = lib.TraceReader(str(tmp_path / "a.csv"), lib.TraceType.CSV_TRACE, init)
    lib.Util.convert_to_oracleGeneral(reader._reader, str(tmp_path / "theirs"))
    theirs = np.fromfile(tmp_path / "theirs", RECORD)
    ours = np.fromfile(path, RECORD)
    assert len(theirs) == len(ours)
    for name in ("object", "size"):
        np.testing.assert_array_equal(theirs[name], ours[name])
    np.testing.assert_array_equal(theirs["next"] < 0, ours["next"] < 0)


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ([1, 1, 1], {"layer": 3}, "--layer 3: expected 0..2"),
        ([1, 1], {}, "bytes for an expert of each of 3 layers"),
        ([1, 1, 2**32], {}, "oracleGeneral holds sizes in 32 bits"),
        ([1, 1, 0], {}, "expected 1..4294967295 bytes"),
    ],
)
def test_what_cannot_be_exported(sizes: list[int], options: dict[str, Any], words: str, tmp_path: Path) -> None:
    kit.refused(lambda: exported(kit.trace(), tmp_path, sizes, **options), words)
    decode = kit.trace(n_prompt=[0], n_decode=[kit.ROWS])
    kit.refused(lambda: exported(decode, tmp_path, phase="prefill"), "--phase prefill: expected rows of that phase")
    assert not list(tmp_path.iterdir())


def test_import_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = SOURCES["npz"].make(tmp_path), tmp_path / "t.safetensors"
    mapping = ["--column", "expert=topk_ids", "--column", "weight=topk_probs", "--column", "offsets=seq_offsets"]
    known = ["--n-experts", "7", "--n-prompt", str(PROMPT), "--label", "measured"]
    assert main(["trace", "import", str(path), "--out", str(out), *mapping, *known]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    told = printed.err.splitlines()
    assert told[:2] == [
        f"wrote {out} from npz: 3 layers x 7 experts, top-2, measured, 7 tokens of 1 request",
        "absent: calibration tables, gate inputs, model, scores, signals",
    ]
    assert re.fullmatch(r"serves \d+ of \d+ policies", told[2])
    assert "fiddler" in told[3] and f"moesim trace calibrate {out}" in told[3]
    assert "dali" in told[4] and "predictors: {'*': coactivation}" in told[4]
    found = Trace.read(out)
    np.testing.assert_array_equal(found.experts, IDS)
    assert found.requests.n_decode.tolist() == [DECODE]
    assert found.header["said_by_user"]["columns"] == {"expert": "topk_ids", "weight": "topk_probs", "offsets": "seq_offsets"}


def test_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = SOURCES["vllm-npy"].make(tmp_path), tmp_path / "t.safetensors"
    for arguments, words in [
        (["--format", "npz"], "a.npy: expected what its axes count, the number of experts of a layer, a label (measured or"),
        (["--axes", "tokens,ids"], "--axes tokens,ids: expected tokens, layers, ids, each once"),
        ([], "a.npy: expected the number of experts of a layer and the phase of the rows"),
        (["--n-experts", "7"], "a.npy: expected the phase of the rows"),
        (["--n-experts", "7", "--n-prompt", "x"], "--n-prompt x: expected numbers of tokens"),
        (["--n-experts", "7", "--n-prompt", "-1"], "--n-prompt -1: expected numbers of tokens"),
        (["--column", "expert"], "--column expert: expected OURS=THEIRS"),
        (["--column", "a=b", "--column", "a=c"], "ours once"),
        (["--format", "vlm"], "unknown format 'vlm'"),
        (["--phase", "later"], "later"),
        (["--label", "bogus"], "--label bogus: expected measured or synthetic"),
        (["--column", "foo=bar"], "--column foo=bar: expected no column"),
        (["--model", "mixtral-8x7"], "did you mean 'mixtral-8x7b'?"),
    ]:
        form = [] if "--format" in arguments else ["--format", "vllm"]
        assert main(["trace", "import", str(path), "--out", str(out), *form, *arguments]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert words in lines[0]
        assert not out.exists()


def test_export_and_import_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = SOURCES["csv"].make(tmp_path), tmp_path / "t.safetensors"
    assert main(["trace", "import", str(path), "--out", str(out)]) == 0
    for form in ("csv", "parquet"):
        assert main(["trace", "export", str(out), "--format", form, "--out", str(tmp_path / f"b.{form}")]) == 0
        again = ["trace", "import", str(tmp_path / f"b.{form}"), "--out", str(tmp_path / "b.safetensors"), "--overwrite"]
        assert main(again) == 0
        back = Trace.read(tmp_path / "b.safetensors")
        np.testing.assert_array_equal(back.experts, IDS)
        np.testing.assert_array_equal(back.weights, WEIGHTS)
    capsys.readouterr()
    target = tmp_path / "b.bin"
    export = ["trace", "export", str(out), "--format", "oracleGeneral", "--out", str(target)]
    for arguments, words in [
        ([], "expected bytes of an expert, got none of the trace; give --model or --object-size"),
        (["--model", "mixtral-8x7b"], "expected 3 layers of 7 experts as the trace, got 32 of 8"),
        (["--model", "mixtral-8x7b", "--object-size", "1"], "expected it or --model, got both"),
        (["--object-size", "1", "--layer", "3"], "--layer 3: expected 0..2"),
    ]:
        assert main([*export, *arguments]) == 2
        assert words in capsys.readouterr().err
        assert not target.exists()
    assert main([*export, "--object-size", "1"]) == 0
    assert target.stat().st_size == 24 * IDS.size
    assert main(["trace", "export", str(out), "--format", "csv", "--out", str(tmp_path / "c.csv"), "--layer", "1"]) == 2


def test_a_model_may_be_a_base_with_changed_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its shape is that of the mapping where a trace is imported, and its bytes are where objects are exported."""
    path, out = SOURCES["vllm-npy"].make(tmp_path), tmp_path / "t.safetensors"
    small = f"base: mixtral-8x7b, n_layers: {IDS.shape[1]}, n_experts: 7, top_k: {IDS.shape[2]}"
    known = ["trace", "import", str(path), "--out", str(out), "--phase", "decode", "--format", "vllm"]
    assert main([*known, "--model", f"{{{small}}}"]) == 0
    imported = Trace.read(out)
    assert (imported.n_experts, imported.header["model"]) == (7, "mixtral-8x7b")
    sizes, kinds = {}, [("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")]
    for bits in (4, 8):
        target = tmp_path / f"{bits}.bin"
        model = f"{{{small}, expert_bits: {bits}}}"
        assert main(["trace", "export", str(out), "--format", "oracleGeneral", "--out", str(target), "--model", model]) == 0
        (sizes[bits],) = set(np.fromfile(target, kinds)["size"].tolist())
    assert sizes[8] == 2 * sizes[4] > 0
    capsys.readouterr()
    assert main([*known, "--overwrite", "--model", "{base: mixtral-8x7b, topk: 1}"]) == 2
    assert "--model: unknown model field 'topk'; did you mean 'top_k'?" in capsys.readouterr().err
    path = SOURCES["bigmoe"].make(tmp_path)  # of a source that says the bytes, they are those of the objects
    assert main(["trace", "import", str(path), "--out", str(out), "--overwrite"]) == 0
    assert main(["trace", "export", str(out), "--format", "oracleGeneral", "--out", str(tmp_path / "b.bin")]) == 0
    found = np.fromfile(tmp_path / "b.bin", kinds)
    assert set(zip((found["object"] // 7).tolist(), found["size"].tolist(), strict=True)) == {(0, 1000), (1, 1001), (2, 1002)}


# ----------------------------------------------------------------------------------------- recordings next to the checkout


def test_a_route_trace_and_its_model_in_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = shared_file("traces", "bigmoe-on-edge", "qwen.route.csv"), tmp_path / "qwen.safetensors"
    assert main(["trace", "import", str(source), "--out", str(out), "--model", "qwen3-30b-a3b"]) == 0
    printed = capsys.readouterr().err
    assert "27 tokens at the start of requests left out: layers [47] are not recorded for them" in printed
    found, recorded = Trace.read(out), read_route_trace(source)
    lengths = (found.requests.n_prompt.tolist(), found.requests.n_decode.tolist(), found.prompt_offset.tolist())
    assert lengths == ([1], [128], [27])
    wanted = [(x.step, x.layer, x.slot, x.expert) for x in recorded.lookups if x.step >= 27]
    for step, layer, slot, expert in wanted:
        assert found.experts[step - 27, layer, slot] == expert
    assert len(wanted) == found.experts.size
    raw = {
        "model": str(tmp_path / "qwen.model.yaml"), "hardware": "rtx3090-epyc7532", "trace": str(out), "cache": {"ratio": 0.25},
        "workload": {"decode_tokens": 8}, "policies": ["lru"],
    }  # fmt: skip
    experiment = Experiment(parse_config(raw, "test"), "test")
    model = experiment.specs[0].model
    assert {layer: model.expert_bytes(layer) for layer in range(48)} == recorded.expert_bytes
    assert model.labels == ("top_k=6", "expert_bytes_by_layer=2654208..3059712")


def test_gpt_oss_by_mapping(tmp_path: Path) -> None:
    source, out = shared_file("traces", "gpt-oss-20b", "decode_routing.npz"), tmp_path / "oss.safetensors"
    mapping = {"expert": "topk_ids", "weight": "topk_probs", "offsets": "seq_offsets", "name": "names"}
    columns = [word for ours, theirs in mapping.items() for word in ("--column", f"{ours}={theirs}")]
    said = ["--model", "gpt-oss-20b", "--phase", "decode", "--label", "measured"]
    assert main(["trace", "import", str(source), "--out", str(out), *columns, *said]) == 0
    found = Trace.read(out)
    with np.load(source, allow_pickle=False) as arrays:
        np.testing.assert_array_equal(found.experts, arrays["topk_ids"])
        np.testing.assert_array_equal(found.weights, arrays["topk_probs"])
        np.testing.assert_array_equal(found.prompt_offset, arrays["n_prompt"])
        np.testing.assert_array_equal(found.requests.n_decode, np.diff(arrays["seq_offsets"]))
        assert found.header["requests"] == arrays["names"].tolist()
    assert (found.n_experts, found.phase.min(), found.label) == (32, 1, "measured")
