"""Every format becomes the trace that was recorded; what a source lacks is said, asked for, or left absent."""

from __future__ import annotations

import hashlib
import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.core import gate
from moesim.model import load_model
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace, calibrating, files
from moesim.trace.calibrating import Additions
from moesim.trace.formats.contract import AXES, Options, Part
from moesim.trace.formats.importing import _header, _says, find_format, formats, import_trace, write_model_file
from tests.trace import import_kit as kit
from tests.trace.import_kit import DECODE, EXPERTS, IDS, LAYERS, PROMPT, ROWS, SOURCES, TOP_K, WEIGHTS, refused

equal = np.testing.assert_array_equal


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "t.safetensors"


# ------------------------------------------------------------------------------------------- each format, alike


@pytest.mark.parametrize("name", SOURCES)
def test_what_was_recorded_is_imported_and_the_header_says_where_it_is_from(name: str, tmp_path: Path, out: Path) -> None:
    source = SOURCES[name]
    path = source.make(tmp_path)
    found = source.load(path, out).trace
    equal(found.experts, IDS)
    assert found.experts.dtype == np.uint8
    if source.weighted:
        equal(found.weights, WEIGHTS)
    assert (found.weights is not None) == source.weighted and found.scores is None
    assert (found.requests.n_prompt.tolist(), found.requests.n_decode.tolist()) == ([PROMPT], [DECODE])
    assert found.position.tolist() == list(range(ROWS))
    assert (found.model, found.label, found.n_experts) == ("tiny", "measured", EXPERTS)
    header = found.header
    assert (header["source"], header["importer"]) == (f"imported:{source.format}", "moesim.trace.formats 1")
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert header["source_files"] == [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256}]
    assert ("weights" in header["absent"]) == (not source.weighted)
    assert {"scores", "signals", "calibration tables"} <= set(header["absent"])
    assert header["said_by_user"].get("n_prompt") == ([PROMPT] if "n_prompt" in source.options else None)


@pytest.mark.parametrize("name", SOURCES)
def test_the_format_is_found_by_content(name: str, tmp_path: Path) -> None:
    other = SOURCES[name].make(tmp_path).rename(tmp_path / "without-a-suffix")
    assert find_format(other, None).name == ("npz" if name == "vllm-npy" else SOURCES[name].format)  # it may hold any array


@pytest.mark.parametrize("name", SOURCES)
def test_the_same_file_gives_the_same_bytes_and_leaves_nothing_else(name: str, tmp_path: Path, out: Path) -> None:
    source = SOURCES[name]
    path = source.make(tmp_path)
    first = source.load(path, out).path.read_bytes()
    assert source.load(path, out).path.read_bytes() == first
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    assert not list(tmp_path.glob(".*"))
    load = lambda: import_trace([path], out, Options(**source.options), label="bogus")  # noqa: E731
    refused(load, "--label bogus: expected measured or synthetic, got 'bogus'")


def test_every_format_is_tried_here() -> None:
    assert {source.format for source in SOURCES.values()} | {"sglang-recorder"} == set(formats())  # that one needs torch


# --------------------------------------------------------------------------- what only the user can say is asked for

UNKNOWN_MODEL = ("unknown model 'mixtral-8x7'; did you mean 'mixtral-8x7b'?", "correct --model, or give --")


@pytest.mark.parametrize(
    ("name", "lacking", "words"),
    [
        ("vllm-npy", {"n_prompt": None}, ("the phase of the rows", "--phase decode or prefill")),
        ("vllm-npy", {"n_experts": None}, ("a.npy: expected the number of experts", "give --n-experts")),
        ("vllm-npy", {"n_experts": None, "n_prompt": None, "model": None},
         ("a.npy: expected the number of experts of a layer and the phase of the rows, got none; give --n-experts",)),
        ("npz", {"axes": None, "n_experts": None, "n_prompt": None, "columns": {"expert": "topk_ids"}},
         ("expected what its axes count, the number of experts of a layer and the phase of the rows, got shape (7, 3, 2)",)),
        ("vllm-npy", {"n_experts": 5}, ("a.npy: expert[", "expected 0..4, got", "; check --n-experts or --model")),
        ("vllm-npy", {"n_prompt": (8,)}, ("at least the 8 rows of the prompt, got 7",)),
        ("vllm-npy", {"n_prompt": (1, 2)}, ("one number, or one for each of 1 requests",)),
        ("vllm-npy", {"n_prompt": None, "phase": "both"}, ("prompt lengths for --phase both",)),
        ("vllm-npy", {"columns": {"layer": "l"}},
         ("--column layer=l: expected no column, since those of vllm have fixed names",)),
        ("vllm-npy", {"model": "mixtral-8x7", "n_experts": None}, (*UNKNOWN_MODEL, "--n-experts")),
        ("bigmoe", {"phase": "decode"}, ("no --phase and no --n-prompt, since the file says both",)),
        ("bigmoe", {"n_experts": 9}, ("n_experts: expected 9 as --n-experts says, got 7",)),
        ("sglang", {"n_layers": None}, ("expected the number of layers, got base64 without a shape", "give --n-layers")),
        ("sglang", {"n_layers": None, "top_k": None, "n_experts": None},
         ("the number of layers, the number of experts of a token and the number of experts of a layer, got base64",)),
        ("sglang", {"model": "mixtral-8x7", "n_layers": None}, (*UNKNOWN_MODEL, "--n-layers")),
        ("llama-cpp-passes", {"top_k": None}, ("the number of experts of a token", "give --top-k")),
        ("llama-cpp-passes", {"top_k": 4},
         ("expected a multiple of 4 lines, the experts of whole tokens, got 6 lines of layer 0 from row 0",)),
        ("llama-cpp-passes", {"model": "mixtral-8x7", "top_k": None}, (*UNKNOWN_MODEL, "--top-k")),
        ("npz", {"columns": {"expert": "ids"}}, ("an array 'ids' for expert", "'topk_ids'", "--column expert=NAME")),
        *((name, {"columns": {"foo": "bar"}}, ("--column foo=bar: expected one of OURS", "unknown column 'foo'; known: expert, ",
                                              "weight", "position", "phase")) for name in ("npz", "csv", "parquet", "jsonl")),
    ],
)  # fmt: skip
def test_nothing_is_guessed(name: str, lacking: dict[str, Any], words: tuple[str, ...], tmp_path: Path, out: Path) -> None:
    source = SOURCES[name]
    path = source.make(tmp_path)
    source.refused(path, out, *words, **lacking)
    if "model" in lacking:
        assert "unknown model" not in source.refused(path, out, **lacking | {"model": None})


def test_a_label_is_asked_for_and_out_is_a_trace(tmp_path: Path, out: Path) -> None:
    plain, array = SOURCES["npz"], SOURCES["vllm-npy"]
    words = ("expected a label (measured or synthetic), got none", "give --label")
    refused(lambda: import_trace([plain.make(tmp_path)], out, Options(**plain.options)), *words)
    array.refused(array.make(tmp_path), tmp_path / "t.npz", "ends in .safetensors", "t.npz")


def test_a_phase_for_all_rows(tmp_path: Path, out: Path) -> None:
    source = SOURCES["vllm-npy"]
    path = source.make(tmp_path)
    assert source.load(path, out, n_prompt=None, phase="prefill").trace.phase.tolist() == [0] * ROWS
    decode = source.load(path, out, phase="decode").trace  # the prompt has a length, and no rows
    assert (decode.phase.tolist(), decode.prompt_offset.tolist()) == ([1] * ROWS, [PROMPT])


def test_names_of_models_give_their_shape_and_none_is_unknown(tmp_path: Path, out: Path) -> None:
    path, ids, asked = tmp_path / "a.npy", kit.routing(5, layers=32, experts=8), Options(model="mixtral-8x7b", phase="decode")
    np.save(path, ids)
    found = import_trace([path], out, asked, form="vllm").trace
    assert (found.model, found.n_experts, found.n_layers) == ("mixtral-8x7b", 8, 32)
    np.save(path, ids[:, :31])
    refused(lambda: import_trace([path], out, asked, form="vllm"), "expected 32 layers with experts as mixtral-8x7b has, got 31")
    source = SOURCES["vllm-npy"]
    found = source.load(source.make(tmp_path), out, model=None).trace
    assert found.model == "unknown" and "model" in found.header["absent"]


# --------------------------------------------------------------------------------------------- detecting a format


def test_ambiguous_content_lists_the_candidates(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("".join(f"{layer},{expert}\n" for layer in range(3) for expert in (1, 2)))
    refused(lambda: find_format(path, None), "content that fits llama-cpp, csv", "--format")
    assert find_format(path, "llama-cpp").name == "llama-cpp"


@pytest.mark.parametrize("name", ["llama-cpp-passes", "llama-cpp-positions"])
def test_headless_llama_cpp_by_name(name: str, tmp_path: Path, out: Path) -> None:
    path = SOURCES[name].make(tmp_path)
    path.write_text(path.read_text().split("\n", 1)[1])
    equal(SOURCES[name].load(path, out).trace.experts, IDS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("INFO 05-01 10:00:00 [engine.py:161] Initializing, config: x\n", "expected the columns layer, position, expert, got"),
        ("llama_model_loader: loaded meta data with 33 key-value pairs\n", "got text that begins with 'llama_model_loader"),
        ("layer=3 pos=5 experts=1,2\n", "the log of an engine holds no routing: vLLM and SGLang return it"),
        ("[INFO] layer 3: experts 1 2\n", "got text that begins with '[INFO]"),
        ("step layer expert\n0 0 1\n", "separate the columns by commas instead of blanks"),
        ("layer of what\n0 0 1\n", "got text that begins with 'layer of what'; the log of an engine holds no routing"),
        ("y" * 90 + "\n", f"got text that begins with '{'y' * 80}'; the log"),
        ('{"token": 0, "experts": [[[1, 2]]]}\n', "line 1: expected a list of the experts of a token in a layer, got lists of 3"),
        ('{"layer": 0, "who": [1, 2]}\n', "line 1: expected experts, got the fields layer, who; map them with --column"),
        ('{\n "who": 0\n}\n', "expected experts of at least one token, got none among the fields who; map them with --column"),
    ],
)  # fmt: skip
def test_text_that_is_no_table_is_told_apart(content: str, words: str, tmp_path: Path, out: Path) -> None:
    (tmp_path / "engine.log").write_text(content)
    refused(lambda: import_trace([tmp_path / "engine.log"], out), "engine.log: ", words)


def test_unknown_content_and_names(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\x01\x02\x03 nothing known")
    refused(lambda: find_format(path, None), "a.bin: expected a format among vllm, sglang", "name it with --format")
    refused(lambda: find_format(path, "vlm"), "unknown format 'vlm'; did you mean 'vllm'")


def test_missing_and_mixed_sources(tmp_path: Path, out: Path) -> None:
    (tmp_path / "empty").mkdir()
    for sources, words in [
        ([tmp_path / "no.npy"], "expected a file or a folder, got nothing there"),
        ([tmp_path / "empty"], "a folder with .npy or .npz files, got none in it"),
        ([SOURCES["vllm-npy"].make(tmp_path), SOURCES["jsonl"].make(tmp_path)], "expected the format npz as"),
    ]:
        refused(lambda: import_trace(sources, out, Options(n_experts=EXPERTS, phase="decode")), words)  # noqa: B023


# -------------------------------------------------------------------------------------------- forward passes

_STEPS = [0] * PROMPT + list(range(1, DECODE + 1))


def by_steps(path: Path, steps: list[int], column: str = "pass") -> None:
    """Write the routing of the kit, with the forward pass of each token instead of its phase."""
    places = [(t, layer) for t in range(ROWS) for layer in range(LAYERS)]
    if path.suffix == ".csv":
        lines = [f"{steps[t]},{t},{layer},{k},{IDS[t, layer, k]}" for t, layer in places for k in range(TOP_K)]
        path.write_text(f"{column},position,layer,rank,expert\n" + "\n".join(lines) + "\n")
    elif path.suffix == ".jsonl":
        rows = [{"layer_idx": b, "token_idx": t, "selected_ids": IDS[t, b].tolist(), column: steps[t]} for t, b in places]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        np.savez(path, expert=IDS, **{column: np.array(steps)})


@pytest.mark.parametrize("form", ["csv", "jsonl", "npz"])
def test_the_first_forward_pass_of_a_request_is_its_prompt_and_a_step_is_no_phase(form: str, tmp_path: Path, out: Path) -> None:
    path = tmp_path / f"a.{form}"

    def load(**columns: str) -> Trace:
        options = Options(n_experts=EXPERTS, columns=columns, axes=AXES if form == "npz" else None)
        return import_trace([path], out, options, form=form, label="measured").trace

    by_steps(path, [7 + step for step in _STEPS])
    found = load(step="pass")
    equal(found.experts, IDS)
    assert (found.requests.n_prompt.tolist(), found.requests.n_decode.tolist()) == ([PROMPT], [DECODE])
    for steps, words in [
        (list(range(ROWS)), "expected a first step with the tokens of the prompt, got one token in every step"),
        ([*_STEPS[:-1], _STEPS[-2]], "request 0: expected one token in each step after the first, got several in step"),
        ([*_STEPS[:-1], 0], "expected a step of at least"),
    ]:
        by_steps(path, steps)
        refused(lambda: load(step="pass"), f"a.{form}", words)
    by_steps(path, _STEPS)  # what a user tries first, the pass as the phase, is not guessed: the line says how it goes
    refused(lambda: load(phase="pass"), f"a.{form}", "map it with --column step=NAME")
    refused(lambda: load(phase="pass", step="pass"), "--column step=pass: expected it or a phase, got both")
    by_steps(path, _STEPS, "step")  # a column that happens to be called step is not taken for one
    refused(load, "expected the phase of the rows, got none")
    assert load(step="step").requests.n_prompt.tolist() == [PROMPT]


# ------------------------------------------------------------------------------------------- vLLM, SGLang and NPZ


def test_a_folder_of_requests(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    for i in range(3):
        np.savez(folder / f"{i}.npz", routed_experts=kit.routing(4 + i, seed=i), n_prompt=np.int64(2))
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda asked: iter(sorted(listed(asked), reverse=True)))  # folders have any order
    found = import_trace([folder], out, Options(n_experts=EXPERTS)).trace
    assert (found.requests.n_prompt.tolist(), found.requests.n_decode.tolist()) == ([2, 2, 2], [2, 3, 4])
    equal(found.experts, np.concatenate([kit.routing(4 + i, seed=i) for i in range(3)]))
    assert [file["name"] for file in found.header["source_files"]] == ["0.npz", "1.npz", "2.npz"]
    for arrays, words in [
        ({"routed_experts": kit.routing(3)}, "prompt lengths in all files or in none"),
        ({"routed_experts": kit.routing(3, top_k=3), "n_prompt": np.int64(1)},
         "3.npz: expected 3 layers and 2 experts a token as before"),
    ]:  # fmt: skip
        np.savez(folder / "3.npz", **arrays)
        refused(lambda: import_trace([folder], out, Options(n_experts=EXPERTS)), words)


def test_dense_layers_are_left_out(tmp_path: Path, out: Path) -> None:
    source, path = SOURCES["vllm-npy"], tmp_path / "a.npy"
    np.save(path, np.concatenate([np.zeros((ROWS, 1, TOP_K), np.int64), IDS], axis=1))
    equal(source.load(path, out, first_layer=1).trace.experts, IDS)
    too_many = f"--first-layer: expected less than the {LAYERS + 1} layers of the array, got {LAYERS + 1}"
    source.refused(path, out, too_many, first_layer=LAYERS + 1)
    spec = load_model("deepseek-v2-lite")  # one dense layer, then 26
    wide = kit.routing(4, layers=spec.n_layers, experts=64, top_k=6)
    np.save(path, np.concatenate([np.zeros((4, 1, 6), np.int64), wide], axis=1))
    equal(import_trace([path], out, Options(model="deepseek-v2-lite", phase="decode"), form="vllm").trace.experts, wide)
    zeros = np.zeros((ROWS, 2, TOP_K), np.int64)
    ids = np.concatenate([zeros, IDS], axis=1)
    first, none = ids.copy(), ids.copy()
    first[4, 1] = none[4, 1] = none[5, 0] = [1, 2]
    for wrong, words in [
        (first, "zeros only in layer 0; if it is dense, give --first-layer 1"),
        (none, "expert[0, 0]: expected distinct experts, got [0, 0]"),
        (zeros, "no routing was recorded; record it again"),
    ]:
        np.save(path, wrong)
        source.refused(path, out, words)


@pytest.mark.parametrize(
    ("name", "options"), [("vllm-npy", {}), ("npz", {"columns": {"expert": "topk_ids"}}), ("sglang", {"n_layers": LAYERS + 2})]
)
def test_dense_layers_that_nobody_named(name: str, options: dict[str, Any], tmp_path: Path, out: Path) -> None:
    """Each source ends with the option that makes it work."""
    source, ids = SOURCES[name], np.concatenate([np.zeros((ROWS, 2, TOP_K), np.int64), IDS], axis=1)
    path = tmp_path / source.file
    {"vllm-npy": lambda: np.save(path, ids), "npz": lambda: np.savez(path, topk_ids=ids),
     "sglang": lambda: path.write_text(json.dumps(kit.response(ids)))}[name]()  # fmt: skip
    words = "zeros only in layers 0..1; if they are dense, give --first-layer 2"
    source.refused(path, out, f"{path.name}: expert: ", words, **options)
    source.refused(path, out, "zeros only in layer 1; if it is dense, give --first-layer 2", **options, first_layer=1)
    equal(source.load(path, out, **options, first_layer=2).trace.experts, IDS)


def test_arrays_without_three_axes(tmp_path: Path, out: Path) -> None:
    np.save(tmp_path / "a.npy", IDS[:, 0])
    np.savez(tmp_path / "a.npz", ids=IDS[:, 0])
    words = ("that is (tokens, layers, top_k), got ", "(7, 2); save it with these axes")
    for file, form in [("a.npy", None), ("a.npy", "vllm"), ("a.npz", None)]:
        load = lambda: import_trace([tmp_path / file], out, Options(n_experts=EXPERTS), form=form)  # noqa: B023, E731
        refused(load, f"{file}: expected ", *words)


def test_sglang_lists_lines_and_choices(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "a.json"
    two = [kit.response(kit.routing(5, seed=i), prompt=2 + i) for i in range(2)]
    lines = "\n".join(json.dumps(r) for r in two) + "\n\n"
    for text in (json.dumps(two), json.dumps(two, indent=1), lines, json.dumps({"choices": two, "usage": {}})):
        path.write_text(text)
        found = SOURCES["sglang"].load(path, out).trace
        assert found.requests.n_prompt.tolist() == [2, 3]
        equal(found.experts[5:], kit.routing(5, seed=1))


def test_npz_with_requests_and_prompts(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "a.npz"

    def load(label: str = "measured", **options: Any) -> Trace:
        return import_trace([path], out, Options(n_experts=EXPERTS, **options), label=label).trace

    offsets, n_prompt = np.array([0, 3, ROWS]), np.array([2, 1])
    np.savez(path, expert=IDS, weight=WEIGHTS.astype(np.float32), offsets=offsets, n_prompt=n_prompt)
    refused(load, "give --phase both if the prompts have rows too, --phase decode if not: their lengths are there")
    assert load(phase="both").requests.n_prompt.tolist() == [2, 1]
    decode = load("synthetic", phase="decode")
    assert (decode.prompt_offset.tolist(), decode.label) == ([2, 1], "synthetic")
    equal(decode.weights, WEIGHTS)
    rows = {"request": [4] * 3 + [2] * 4, "position": [5, 6, 7, 0, 1, 2, 3], "phase": [0, 1, 1] * 2 + [1]}
    np.savez(path, expert=IDS, **{name: np.array(values) for name, values in rows.items()})
    found = load()
    assert (found.position.tolist(), found.phase.tolist()) == (rows["position"], rows["phase"])
    assert found.request.tolist() == [0] * 3 + [1] * 4


# -------------------------------------------------------------------------------------------------------- llama.cpp


def positions(prompt: list[int], decode: list[int], layers_of: dict[int, int] | None = None) -> str:
    """Lines of the dialect with positions; `layers_of` limits the layers of the i-th token."""
    order = [(i, layer) for layer in range(LAYERS) for i in range(len(prompt))]
    order += [(len(prompt) + i, layer) for i in range(len(decode)) for layer in range(LAYERS)]
    order = [(i, layer) for i, layer in order if layer < (layers_of or {}).get(i, LAYERS)]
    lines = [f"{[*prompt, *decode][i]},{layer},{IDS[i, layer, 0]},{IDS[i, layer, 1]}\n" for i, layer in order]
    return "pos,layer,id0,id1\n" + "".join(lines)


@pytest.mark.parametrize(
    ("prompt", "decode"),
    [([-3, -2, -1], [0, 1, 2, 3]), ([-1, -2, -3], [0, 1, 2, 3]), ([-1, -1, -1], [0, 1, 2, 3]), ([-3, -2, -1], [3, 4, 5, 6])],
)
def test_positions_below_zero_are_prefill(prompt: list[int], decode: list[int], tmp_path: Path, out: Path) -> None:
    source, path, text = SOURCES["llama-cpp-positions"], tmp_path / "a.csv", positions(prompt, decode)
    path.write_text(text)
    found = source.load(path, out).trace
    equal(found.experts, IDS)
    assert found.phase.tolist() == [0] * 3 + [1] * 4
    path.write_text(text + text.split("\n", 1)[1])  # prefill after decode is the next request
    found = source.load(path, out).trace
    assert found.requests.n_prompt.tolist() == [3, 3]
    equal(found.experts, np.concatenate([IDS, IDS]))


@pytest.mark.parametrize("prompt", [[-3, -2, -1], [-1, -1, -1]])
def test_prompt_tokens_without_the_last_layer_are_left_out(prompt: list[int], tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.csv").write_text(positions(prompt, [0, 1, 2, 3], {0: 2, 1: 2}))
    imported = SOURCES["llama-cpp-positions"].load(tmp_path / "a.csv", out)
    assert imported.notes == ("a.csv: 2 tokens at the start of requests left out: layers [2] are not recorded for them",)
    assert imported.trace.header["left_out"] == list(imported.notes)
    equal(imported.trace.experts, IDS[2:])
    assert (imported.trace.phase.tolist(), imported.trace.prompt_offset.tolist()) == ([0, 1, 1, 1, 1], [2])
    equal(SOURCES["llama-cpp-positions"].load(tmp_path / "a.csv", out, incomplete="layers").trace.experts, IDS[:, :2])


def test_decode_alone_keeps_its_positions_and_none_may_be_missing(tmp_path: Path, out: Path) -> None:
    source, path = SOURCES["llama-cpp-positions"], tmp_path / "a.csv"
    path.write_text(positions([], [9, 10, 11]))
    found = source.load(path, out).trace
    assert (found.prompt_offset.tolist(), found.phase.tolist()) == ([9], [1, 1, 1])
    out.unlink()
    for prompt, decode, words in [
        ([-4, -2, -1], [0], "count evenly up or down"),
        ([-2, -1], [5], "expected decode from position 0 or 2, got 5"),
        ([], [0, 1, 3], "position 2"),
    ]:
        path.write_text(positions(prompt, decode))
        source.refused(path, out, "a.csv: ", words)


def test_a_layer_for_a_part_of_a_pass_is_not_matched_to_tokens(tmp_path: Path, out: Path) -> None:
    source = SOURCES["llama-cpp-passes"]
    lines = source.make(tmp_path).read_text().splitlines()
    n_before = 1 + PROMPT * TOP_K * (LAYERS - 1)  # of the last layer of the prompt, keep one token of three
    (tmp_path / "a.csv").write_text("\n".join(lines[: n_before + TOP_K] + lines[n_before + PROMPT * TOP_K :]) + "\n")
    imported = source.load(tmp_path / "a.csv", out)
    equal(imported.trace.experts, IDS[PROMPT:])
    assert (imported.trace.phase.tolist(), imported.trace.prompt_offset.tolist()) == ([1] * DECODE, [PROMPT])
    assert "1 entries left out" in imported.notes[0] and "3 tokens at the start" in imported.notes[1]


# ----------------------------------------------------------------------------------------------------- BigMoeOnEdge


def test_bytes_of_experts_become_a_model(tmp_path: Path, out: Path) -> None:
    spec = load_model("qwen3-30b-a3b")
    lines = ["# route_trace v1", f"# model=q.gguf arch=q n_layer={spec.n_layers} n_expert=128 n_expert_used=2"]
    lines += [f"# layer={n} expert_bytes={3_000_000 + n} dense_bytes=50" for n in range(spec.n_layers)]
    lines += ["turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]
    lines += [f"0,1,{t},{n},{slot},{slot + t},0.5,0,0" for t in range(2) for n in range(spec.n_layers) for slot in range(2)]
    (tmp_path / "q.csv").write_text("\n".join(lines) + "\n")
    path = write_model_file(import_trace([tmp_path / "q.csv"], out, Options(model="qwen3-30b-a3b")))
    assert path == out.with_name("t.model.yaml")
    model = load_model(str(path))
    assert model.expert_bytes_by_layer == tuple(3_000_000 + n for n in range(spec.n_layers))
    assert (model.name, model.top_k) == ("qwen3-30b-a3b", 2)
    assert "q.csv" in model.source
    assert load_model({"base": str(path), "kv_bits": 8}).kv_bits == 8
    named = import_trace([tmp_path / "q.csv"], out, Options(model="another"))  # its other figures are not known
    assert write_model_file(named) is None
    assert named.trace.header["expert_bytes_by_layer"][1] == 3_000_001


def test_a_prompt_without_its_last_layer(tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.csv").write_text("\n".join(kit.bigmoe_lines(last_layer_of_prompt=False)) + "\n")
    imported = SOURCES["bigmoe"].load(tmp_path / "a.csv", out)
    assert imported.notes == ("a.csv: 2 tokens at the start of requests left out: layers [2] are not recorded for them",)
    equal(imported.trace.experts, IDS[PROMPT - 1 :])
    equal(imported.trace.weights, WEIGHTS[PROMPT - 1 :])
    assert imported.trace.prompt_offset.tolist() == [PROMPT - 1]


# -------------------------------------------------------------------------------------- JSON Lines, CSV and Parquet


def test_json_lines_without_weights_in_layer_order_and_with_several_requests(tmp_path: Path, out: Path) -> None:
    source, path = SOURCES["jsonl"], tmp_path / "a.jsonl"

    def found(rows: list[dict[str, Any]]) -> Trace:
        path.write_text("\n".join(json.dumps(row) for row in rows) + "\n")
        return source.load(path, out).trace

    plain = [{key: row[key] for key in ("layer_idx", "token_idx", "selected_ids")} for row in kit.json_rows()]
    by_layer = found(sorted(plain, key=lambda row: (row["layer_idx"], row["token_idx"])))
    equal(by_layer.experts, IDS)
    assert by_layer.weights is None
    again = found(plain * 2)  # a new request when the first token comes again
    assert again.requests.n_decode.tolist() == [DECODE, DECODE]
    equal(again.experts[ROWS:], IDS)
    names = {"b": IDS, "a": IDS[::-1]}  # named requests may be interleaved, and keep the order in which they come up
    mixed = [row | {"request": name, "selected_ids": ids[row["token_idx"], row["layer_idx"]].tolist()}
             for row in plain for name, ids in names.items()]  # fmt: skip
    equal(found(mixed).experts, np.concatenate([IDS, IDS[::-1]]))
    gap = found([row | {"layer_idx": 5} if row["layer_idx"] == 2 else row for row in plain])  # layers have names then
    equal(gap.experts, IDS)
    assert gap.header["layers"] == [0, 1, 5]


def test_columns_of_other_names(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,unused,b,c\n" + "".join(f"{n},x,{expert},{t}\n" for (t, n, _), expert in np.ndenumerate(IDS)))

    def load(**columns: str) -> Trace:
        return import_trace([path], out, Options(n_experts=EXPERTS, phase="decode", columns=columns), label="measured").trace

    equal(load(layer="a", expert="b", position="c").experts, IDS)
    refused(lambda: load(layer="a"), "expected a column 'expert' for expert, got a, unused, b, c; map it with --column expert=")
    refused(lambda: load(layer="a", expert="b"), "expected a column for position, got layer; map it with --column position=")


def test_parquet_with_lists(tmp_path: Path, out: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    flat = IDS.reshape(-1, TOP_K)
    columns = {
        "layer": np.tile(np.arange(LAYERS), ROWS),
        "position": np.repeat(np.arange(ROWS), LAYERS) + 4,
        "topk_ids": pa.array(flat.tolist(), pa.list_(pa.int16(), TOP_K)),
        "weight": WEIGHTS.reshape(-1, TOP_K).astype(np.float32).tolist(),
        "phase": ["decode"] * len(flat),
    }
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    options = Options(n_experts=EXPERTS, columns={"expert": "topk_ids"})
    found = import_trace([tmp_path / "a.parquet"], out, options, label="measured").trace
    equal(found.experts, IDS)
    equal(found.weights, WEIGHTS)
    assert found.prompt_offset.tolist() == [4]


# ------------------------------------------------------------------------------------------------------ large sources


def test_a_source_that_would_not_fit_into_memory_is_refused(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = SOURCES["vllm-npy"]
    path = source.make(tmp_path)
    monkeypatch.setattr(gate, "MADE", IDS.size)
    source.refused(path, out, "expert ids of tokens, got 84 B (7 x 1 x 6); import fewer requests at a time")
    with path.open("ab") as file:
        file.truncate(2**32 + 1)
    source.refused(path, out, "expected at most 4 GiB of recorded routing, got 4 GiB")


def test_a_trace_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    """1 TiB of a sparse file: more than any machine that runs this has, and it opens."""
    n_rows = 2**28
    arrays = {"experts": ("U8", [n_rows, 512, 8]), "request": ("I32", [n_rows]), "position": ("I32", [n_rows]),
              "phase": ("U8", [n_rows])}  # fmt: skip
    table: dict[str, Any] = {}
    end = 0
    for name, (dtype, lengths) in arrays.items():
        begin, end = end, end + int(np.prod(lengths)) * (1 if dtype == "U8" else 4)
        table[name] = {"dtype": dtype, "shape": lengths, "data_offsets": [begin, end]}
    header = {"schema_version": 1, "model": "m", "label": "measured", "n_layers": 512, "n_experts": 64, "top_k": 8}
    table["__metadata__"] = {"moesim": json.dumps(header | {"sha256": {}, "signals": {}})}
    text = json.dumps(table).encode()
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        try:
            file.truncate(8 + len(text) + end)
        except OSError:
            pytest.skip("this file system has no files of 1 TiB")
    tracemalloc.start()
    try:
        found = Trace.read(path, verify=False)
        last = found.experts[-1]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.experts.nbytes, last.sum()) == (2**40, 0)
    assert peak < 2**22


# --------------------------------------------------------------------------------------------------- models from YAML


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- 1", "expected a mapping with 'base', got list"),
        ("base: [", "expected valid YAML"),
        ("base: other.yaml", "base: expected a built-in name or a config.json, got 'other.yaml'"),
        ("base: mixtral-8x7b\nexpert_bytes_by_layer: [1, 2]", "expert_bytes_by_layer: expected 32 values"),
        ("base: mixtral-8x7b\nexpert_byte: 1", "unknown model field 'expert_byte'"),
        (None, "expected a model as YAML, got: No such file"),
    ],
)
def test_models_from_yaml_say_what_is_wrong(text: str | None, words: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "a.model.yaml").write_text(text)
    refused(lambda: load_model(str(tmp_path / "a.model.yaml")), "a.model.yaml", words)


def test_made_up_scores_are_set_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = synthetic_trace(2, 8, 2, 3, 4, 5)
    wanted = np.zeros((27, 2, 8), np.float16)
    np.put_along_axis(wanted, trace.experts.astype(np.int64), np.float16(0.5), axis=2)
    for most in (files._PIECE_BYTES, 1):
        monkeypatch.setattr(files, "_PIECE_BYTES", most)
        found = calibrating.extend(replace(trace, weights=None), Additions(weights=True, scores=True), "t").scores
        equal(found, wanted)


@pytest.mark.parametrize(
    ("shape", "most", "lengths"),
    [((10, 4), 12, [3, 3, 3, 1]), ((10, 4), 2, [1] * 10), ((10, 4), 1000, [10]), ((3, 0), 1, [1] * 3), ((0, 4), 12, [])],
)
def test_pieces_are_as_large_as_they_may_be(
    shape: tuple[int, int], most: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PIECE_BYTES", most)
    rows = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    found = files.pieces(rows)
    assert [len(piece) for piece in found] == lengths
    assert all(np.shares_memory(piece, rows) for piece in found if piece.size)
    equal(np.concatenate([rows[:0], *found]), rows)


def test_one_of_several_files_may_say_what_holds_for_all(tmp_path: Path) -> None:
    np.save(file := tmp_path / "a.npy", kit.routing(5, layers=2, experts=4))
    lengths = np.ones(1, np.int64)
    for some in (
        [],
        [Part(lengths)],
        [Part(lengths, n_experts=4, model="m")],
        [Part(lengths), Part(lengths, n_experts=4, model="m")],
    ):
        said = any(part.model for part in some)
        header = _header([file] * len(some), find_format(file, "vllm"), some, Options(), (), True)
        assert ("model" not in header["absent"], _says(some, "n_experts")) == (said, said)
