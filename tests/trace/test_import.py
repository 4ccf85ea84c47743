"""Every format becomes the trace that was recorded; what a source lacks is said, asked for, or left absent."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.core import gate
from moesim.errors import InputError, TraceError
from moesim.model import load_model
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace, calibrating, files
from moesim.trace.calibrating import Additions
from moesim.trace.formats.contract import Options
from moesim.trace.formats.importing import find_format, formats, import_trace, write_model_file
from tests.trace import import_kit as kit
from tests.trace.import_kit import DECODE, EXPERTS, IDS, LAYERS, PROMPT, ROWS, SOURCES, TOP_K, WEIGHTS


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out" / "t.safetensors"


def said(error: pytest.ExceptionInfo[InputError], *parts: str) -> None:
    text = str(error.value)
    assert "\n" not in text
    for part in parts:
        assert part in text


# ------------------------------------------------------------------------------------------- each format, alike


@pytest.mark.parametrize("name", SOURCES)
def test_what_was_recorded_is_imported(name: str, tmp_path: Path, out: Path) -> None:
    source = SOURCES[name]
    found = source.load(source.make(tmp_path), out).trace
    np.testing.assert_array_equal(found.experts, IDS)
    assert found.experts.dtype == np.uint8
    if source.weighted:
        np.testing.assert_array_equal(found.weights, WEIGHTS)
    else:
        assert found.weights is None
    assert found.scores is None
    assert found.requests.n_prompt.tolist() == [PROMPT]
    assert found.requests.n_decode.tolist() == [DECODE]
    assert found.position.tolist() == list(range(ROWS))
    assert (found.model, found.label, found.n_experts) == ("tiny", "measured", EXPERTS)


@pytest.mark.parametrize("name", SOURCES)
def test_the_header_says_where_it_is_from(name: str, tmp_path: Path, out: Path) -> None:
    import hashlib

    source = SOURCES[name]
    path = source.make(tmp_path)
    header = source.load(path, out).trace.header
    assert header["source"] == f"imported:{source.format}"
    assert header["importer"] == "moesim.trace.formats 1"
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    assert header["source_files"] == [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256}]
    assert ("weights" in header["absent"]) == (not source.weighted)
    assert {"scores", "signals", "calibration tables"} <= set(header["absent"])
    assert header["said_by_user"].get("n_prompt") == ([PROMPT] if "n_prompt" in source.options else None)


@pytest.mark.parametrize("name", SOURCES)
def test_the_format_is_found_by_content(name: str, tmp_path: Path) -> None:
    source = SOURCES[name]
    path = source.make(tmp_path)
    other = path.rename(tmp_path / "without-a-suffix")
    assert find_format(other, None).name == source.format


@pytest.mark.parametrize("name", SOURCES)
def test_the_same_file_gives_the_same_bytes_and_leaves_nothing_else(name: str, tmp_path: Path, out: Path) -> None:
    source = SOURCES[name]
    path = source.make(tmp_path)
    first = source.load(path, out).path.read_bytes()
    assert source.load(path, out).path.read_bytes() == first
    assert [p.name for p in out.parent.iterdir()] == [out.name]
    assert not list(tmp_path.glob(".*"))


def test_every_format_is_tried_here() -> None:
    assert {source.format for source in SOURCES.values()} == set(formats())


# --------------------------------------------------------------------------- what only the user can say is asked for


def test_nothing_is_guessed(tmp_path: Path, out: Path) -> None:
    array, plain = SOURCES["vllm-npy"], SOURCES["npz"]
    for source, lacking, words in [
        (array, {"n_prompt": None}, ("the phase of the rows", "--phase decode or prefill")),
        (array, {"n_experts": None}, ("a.npy: expected the number of experts", "give --n-experts")),
        (array, {"n_experts": 5}, ("a.npy: expert[", "expected 0..4, got", "; check --n-experts or --model")),
        (array, {"n_prompt": (8,)}, ("at least the 8 rows of the prompt, got 7",)),
        (array, {"n_prompt": (1, 2)}, ("one number, or one for each of 1 requests",)),
        (array, {"n_prompt": None, "phase": "both"}, ("prompt lengths for --phase both",)),
        (SOURCES["bigmoe"], {"phase": "decode"}, ("no --phase and no --n-prompt, since the file says both",)),
        (SOURCES["bigmoe"], {"n_experts": 9}, ("n_experts: expected 9 as --n-experts says, got 7",)),
        (SOURCES["sglang"], {"n_layers": None}, ("the number of layers and top_k", "give --n-layers")),
        (SOURCES["llama-cpp-passes"], {"top_k": None}, ("the number of experts of a token", "give --top-k")),
        (plain, {"columns": {}}, ("an array 'expert' for expert", "'topk_ids'", "--column expert=NAME")),
    ]:
        with pytest.raises(TraceError) as error:
            source.load(source.make(tmp_path), out, **lacking)
        said(error, *words)
        assert not out.exists()
    with pytest.raises(TraceError) as error:
        import_trace([plain.make(tmp_path)], out, Options(**plain.options))
    said(error, "expected a label, measured or synthetic, got no word of it", "give --label")


def test_a_phase_for_all_rows(tmp_path: Path, out: Path) -> None:
    source = SOURCES["vllm-npy"]
    path = source.make(tmp_path)
    assert source.load(path, out, n_prompt=None, phase="prefill").trace.phase.tolist() == [0] * ROWS
    decode = source.load(path, out, phase="decode").trace  # the prompt has a length, and no rows
    assert decode.phase.tolist() == [1] * ROWS
    assert decode.prompt_offset.tolist() == [PROMPT]


def test_names_of_models_give_their_shape(tmp_path: Path, out: Path) -> None:
    ids = kit.routing(5, layers=32, experts=8)
    np.save(tmp_path / "a.npy", ids)
    found = import_trace([tmp_path / "a.npy"], out, Options(model="mixtral-8x7b", phase="decode")).trace
    assert (found.model, found.n_experts, found.n_layers) == ("mixtral-8x7b", 8, 32)
    np.save(tmp_path / "a.npy", ids[:, :31])
    with pytest.raises(TraceError) as error:
        import_trace([tmp_path / "a.npy"], out, Options(model="mixtral-8x7b", phase="decode"))
    said(error, "expected 32 layers with experts as mixtral-8x7b has, got 31")


def test_a_model_that_is_not_named_is_unknown(tmp_path: Path, out: Path) -> None:
    source = SOURCES["vllm-npy"]
    found = source.load(source.make(tmp_path), out, model=None).trace
    assert found.model == "unknown"
    assert "model" in found.header["absent"]


def test_out_is_a_trace(tmp_path: Path) -> None:
    source = SOURCES["vllm-npy"]
    with pytest.raises(InputError) as error:
        source.load(source.make(tmp_path), tmp_path / "t.npz")
    said(error, "ends in .safetensors", "t.npz")


# --------------------------------------------------------------------------------------------- detecting a format


def test_ambiguous_content_lists_the_candidates(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("".join(f"{layer},{expert}\n" for layer in range(3) for expert in (1, 2)))
    with pytest.raises(TraceError) as error:
        find_format(path, None)
    said(error, "content that fits llama-cpp, csv", "--format")
    assert find_format(path, "llama-cpp").name == "llama-cpp"


def test_headless_llama_cpp_by_name(tmp_path: Path, out: Path) -> None:
    for name in ("llama-cpp-passes", "llama-cpp-positions"):
        source = SOURCES[name]
        path = source.make(tmp_path)
        path.write_text(path.read_text().split("\n", 1)[1])
        np.testing.assert_array_equal(source.load(path, out).trace.experts, IDS)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("INFO 05-01 10:00:00 [engine.py:161] Initializing, config: x\n", "expected the columns layer, position, expert, got"),
        ("llama_model_loader: loaded meta data with 33 key-value pairs\n", "got text that begins with 'llama_model_loader"),
        ("layer=3 pos=5 experts=1,2\n", "the log of an engine holds no routing: vLLM and SGLang return it"),
        ("[INFO] layer 3: experts [1; 2]\n", "got text that begins with '[INFO]"),
        ("layer\tposition\texpert\n0\t0\t1\n", "separate the columns by commas instead of tabs"),
        ("step;layer;expert\n0;0;1\n", "separate the columns by commas instead of semicolons"),
        ("step layer expert\n0 0 1\n", "separate the columns by commas instead of blanks"),
        ('{"layer": 0, "experts": [1, 2]}\n', "JSON with the fields layer, experts; if a line is a token in a layer, give"),
        ('{\n "layer": 0\n}\n', "JSON that is not an object a line; write one object a line"),
    ],
)  # fmt: skip
def test_text_that_is_no_table_is_told_apart(content: str, words: str, tmp_path: Path, out: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_text(content)
    with pytest.raises(TraceError) as error:
        import_trace([path], out)
    said(error, "engine.log: ", words)


# -------------------------------------------------------------------------------------------- forward passes

_STEPS = [0] * PROMPT + list(range(1, DECODE + 1))
_REMEDY = "map it with --column step=NAME"


def by_steps(form: str, path: Path, steps: list[int], column: str = "pass") -> Options:
    """Write the routing of the kit, with the forward pass of each token instead of its phase."""
    places = [(t, layer) for t in range(ROWS) for layer in range(LAYERS)]
    columns = {"step": column}
    if form == "csv":
        lines = [f"{steps[t]},{t},{layer},{k},{IDS[t, layer, k]}" for t, layer in places for k in range(TOP_K)]
        path.write_text(f"{column},position,layer,rank,expert\n" + "\n".join(lines) + "\n")
    elif form == "jsonl":
        rows = [{"layer_idx": b, "token_idx": t, "selected_ids": IDS[t, b].tolist(), column: steps[t]} for t, b in places]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        np.savez(path, expert=IDS, **{column: np.array(steps)})
    return Options(n_experts=EXPERTS, columns=columns)


@pytest.mark.parametrize("form", ["csv", "jsonl", "npz"])
def test_the_first_forward_pass_of_a_request_is_its_prompt(form: str, tmp_path: Path, out: Path) -> None:
    path = tmp_path / f"a.{form}"
    options = by_steps(form, path, [7 + step for step in _STEPS])
    found = import_trace([path], out, options, form=form, label="measured").trace
    np.testing.assert_array_equal(found.experts, IDS)
    assert (found.requests.n_prompt.tolist(), found.requests.n_decode.tolist()) == ([PROMPT], [DECODE])
    for steps, words in [
        (list(range(ROWS)), "expected a first step with the tokens of the prompt, got one token in every step"),
        ([*_STEPS[:-1], _STEPS[-2]], "request 0: expected one token in each step after the first, got several in step"),
        ([*_STEPS[:-1], 0], "expected a step of at least"),
    ]:
        options = by_steps(form, path, steps)
        with pytest.raises(TraceError) as error:
            import_trace([path], out, options, form=form, label="measured")
        said(error, f"a.{form}", words)


@pytest.mark.parametrize("form", ["csv", "jsonl", "npz"])
def test_a_step_is_no_phase(form: str, tmp_path: Path, out: Path) -> None:
    """What a user tries first: the number of the pass as the phase. Nothing is guessed, and the line says how it goes."""
    path = tmp_path / f"a.{form}"
    options = by_steps(form, path, _STEPS)
    with pytest.raises(TraceError) as error:
        import_trace([path], out, Options(n_experts=EXPERTS, columns={"phase": "pass"}), form=form, label="measured")
    said(error, f"a.{form}", "phase", _REMEDY)
    with pytest.raises(InputError) as error:
        import_trace([path], out, Options(columns={"phase": "pass", "step": "pass"}), form=form, label="measured")
    said(error, "--column step=pass: expected it or a phase, got both")
    # A column that happens to be called step is not taken for one.
    options = by_steps(form, path, _STEPS, "step")
    with pytest.raises(TraceError) as error:
        import_trace([path], out, Options(n_experts=EXPERTS), form=form, label="measured")
    said(error, "expected the phase of the rows, got no word of it")
    assert import_trace([path], out, options, form=form, label="measured").trace.requests.n_prompt.tolist() == [PROMPT]


def test_unknown_content_and_names(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(b"\x01\x02\x03 nothing known")
    with pytest.raises(TraceError) as error:
        find_format(path, None)
    said(error, "a.bin: expected a format among vllm, sglang", "name it with --format")
    with pytest.raises(InputError, match="unknown format 'vlm'; did you mean 'vllm'"):
        find_format(path, "vlm")


def test_missing_and_mixed_sources(tmp_path: Path, out: Path) -> None:
    (tmp_path / "empty").mkdir()
    for sources, words in [
        ([tmp_path / "no.npy"], "expected a file or a folder, got nothing there"),
        ([tmp_path / "empty"], "a folder with .npy or .npz files, got none in it"),
        ([SOURCES["vllm-npy"].make(tmp_path), SOURCES["jsonl"].make(tmp_path)], "expected the format vllm as"),
    ]:
        with pytest.raises(TraceError) as error:
            import_trace(sources, out, Options(n_experts=EXPERTS, phase="decode"))
        said(error, words)


# ------------------------------------------------------------------------------------------- vLLM, SGLang and NPZ


def test_a_folder_of_requests(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "requests"
    folder.mkdir()
    for i in range(3):
        np.savez(folder / f"{i}.npz", routed_experts=kit.routing(4 + i, seed=i), n_prompt=np.int64(2))
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda asked: iter(sorted(listed(asked), reverse=True)))  # folders have any order
    found = import_trace([folder], out, Options(n_experts=EXPERTS)).trace
    assert found.requests.n_prompt.tolist() == [2, 2, 2]
    assert found.requests.n_decode.tolist() == [2, 3, 4]
    np.testing.assert_array_equal(found.experts, np.concatenate([kit.routing(4 + i, seed=i) for i in range(3)]))
    assert [file["name"] for file in found.header["source_files"]] == ["0.npz", "1.npz", "2.npz"]
    np.savez(folder / "3.npz", routed_experts=kit.routing(3))
    with pytest.raises(TraceError, match="prompt lengths in all files or in none"):
        import_trace([folder], out, Options(n_experts=EXPERTS))
    np.savez(folder / "3.npz", routed_experts=kit.routing(3, top_k=3), n_prompt=np.int64(1))
    with pytest.raises(TraceError, match=r"3\.npz: routed_experts: expected 3 layers and 2 experts a token as before"):
        import_trace([folder], out, Options(n_experts=EXPERTS))


def test_dense_layers_are_left_out(tmp_path: Path, out: Path) -> None:
    ids = np.concatenate([np.zeros((ROWS, 1, TOP_K), np.int64), IDS], axis=1)
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(TraceError, match=r"zeros only in layer 0; if it is dense, give --first-layer 1$"):
        SOURCES["vllm-npy"].load(tmp_path / "a.npy", out)
    found = SOURCES["vllm-npy"].load(tmp_path / "a.npy", out, first_layer=1).trace
    np.testing.assert_array_equal(found.experts, IDS)
    spec = load_model("deepseek-v2-lite")  # one dense layer, then 26
    wide = kit.routing(4, layers=spec.n_layers, experts=64, top_k=6)
    np.save(tmp_path / "a.npy", np.concatenate([np.zeros((4, 1, 6), np.int64), wide], axis=1))
    found = import_trace([tmp_path / "a.npy"], out, Options(model="deepseek-v2-lite", phase="decode")).trace
    np.testing.assert_array_equal(found.experts, wide)


def test_dense_layers_that_nobody_named(tmp_path: Path, out: Path) -> None:
    """Each source ends with the option that makes it work, or without one if none does."""
    zeros = np.zeros((ROWS, 2, TOP_K), np.int64)
    ids = np.concatenate([zeros, IDS], axis=1)
    np.save(tmp_path / "a.npy", ids)
    np.savez(tmp_path / "a.npz", topk_ids=ids)
    (tmp_path / "a.json").write_text(json.dumps(kit.response(ids)))
    npz = {"columns": {"expert": "topk_ids"}}
    for name, file, options in [("vllm-npy", "a.npy", {}), ("npz", "a.npz", npz), ("sglang", "a.json", {"n_layers": LAYERS + 2})]:
        with pytest.raises(TraceError) as error:
            SOURCES[name].load(tmp_path / file, out, **options)
        said(error, f"{file}: expert: ", "zeros only in layers 0..1; if they are dense, give --first-layer 2")
        with pytest.raises(TraceError) as error:
            SOURCES[name].load(tmp_path / file, out, **options, first_layer=1)
        said(error, "zeros only in layer 1; if it is dense, give --first-layer 2")
        np.testing.assert_array_equal(SOURCES[name].load(tmp_path / file, out, **options, first_layer=2).trace.experts, IDS)
    ids[4, 1] = [1, 2]  # so that only the first is all zeros
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(TraceError, match=r"zeros only in layer 0; if it is dense, give --first-layer 1$"):
        SOURCES["vllm-npy"].load(tmp_path / "a.npy", out)
    ids[5, 0] = [1, 2]
    np.save(tmp_path / "a.npy", ids)
    with pytest.raises(TraceError, match=r"expert\[0, 0\]: expected distinct experts, got \[0, 0\]"):
        SOURCES["vllm-npy"].load(tmp_path / "a.npy", out)
    np.save(tmp_path / "a.npy", zeros)
    with pytest.raises(TraceError, match="no routing was recorded; record it again"):
        SOURCES["vllm-npy"].load(tmp_path / "a.npy", out)


def test_an_id_that_the_file_itself_contradicts(tmp_path: Path, out: Path) -> None:
    path = SOURCES["bigmoe"].make(tmp_path)
    path.write_text(path.read_text().replace("n_expert=7", "n_expert=5"))
    with pytest.raises(TraceError, match=r"expected 0\.\.4, got [56]; export it again"):
        SOURCES["bigmoe"].load(path, out)


def test_a_model_name_that_gives_no_shape(tmp_path: Path, out: Path) -> None:
    unknown = ("unknown built-in model 'mixtral-8x7'; did you mean 'mixtral-8x7b'?", "correct --model, or give --")
    for name, lacking in [("vllm-npy", "n_experts"), ("sglang", "n_layers"), ("llama-cpp-passes", "top_k")]:
        source = SOURCES[name]
        with pytest.raises(TraceError) as error:
            source.load(source.make(tmp_path), out, model="mixtral-8x7", **{lacking: None})
        said(error, *unknown, f"--{lacking.replace('_', '-')}")
        with pytest.raises(TraceError) as error:
            source.load(source.make(tmp_path), out, model=None, **{lacking: None})
        assert "built-in" not in str(error.value)


@pytest.mark.parametrize("name", ["npz", "csv", "parquet", "jsonl"])
def test_columns_that_a_format_does_not_have(name: str, tmp_path: Path, out: Path) -> None:
    source = SOURCES[name]
    with pytest.raises(InputError) as error:
        source.load(source.make(tmp_path), out, columns={"foo": "bar"})
    said(error, "--column foo=bar: expected one of OURS", "unknown column 'foo'; known: expert, ")
    for ours in ("weight", "position", "phase"):
        assert ours in str(error.value)


def test_columns_of_a_format_with_names_of_its_own(tmp_path: Path, out: Path) -> None:
    with pytest.raises(InputError, match="--column layer=l: expected no column, since those of vllm have fixed names"):
        SOURCES["vllm-npy"].load(SOURCES["vllm-npy"].make(tmp_path), out, columns={"layer": "l"})


@pytest.mark.parametrize("name", SOURCES)
def test_labels_are_two(name: str, tmp_path: Path, out: Path) -> None:
    source = SOURCES[name]
    with pytest.raises(InputError, match=r"^--label bogus: expected measured or synthetic, got 'bogus'"):
        import_trace([source.make(tmp_path)], out, Options(**source.options), label="bogus")


def test_arrays_without_three_axes(tmp_path: Path, out: Path) -> None:
    np.save(tmp_path / "a.npy", IDS[:, 0])
    np.savez(tmp_path / "a.npz", ids=IDS[:, 0])
    for file, form in [("a.npy", None), ("a.npy", "vllm"), ("a.npz", None)]:
        with pytest.raises(TraceError) as error:
            import_trace([tmp_path / file], out, Options(n_experts=EXPERTS), form=form)
        said(error, f"{file}: expected ", "that is (tokens, layers, top_k), got ", "(7, 2); save it with these axes")


def test_sglang_lists_lines_and_choices(tmp_path: Path, out: Path) -> None:
    source, path = SOURCES["sglang"], tmp_path / "a.json"
    two = [kit.response(kit.routing(5, seed=i), prompt=2 + i) for i in range(2)]
    for text in (
        json.dumps(two),
        json.dumps(two, indent=1),
        "\n".join(json.dumps(r) for r in two) + "\n\n",
        json.dumps({"choices": two, "usage": {}}),
    ):
        path.write_text(text)
        found = source.load(path, out).trace
        assert found.requests.n_prompt.tolist() == [2, 3]
        np.testing.assert_array_equal(found.experts[5:], kit.routing(5, seed=1))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"routed_experts": "!"}, "line 1.meta_info.routed_experts: expected base64"),
        ({"routed_experts": 3}, "expected base64 text, got int"),
        ({"routed_experts": "AAAA"}, "expected int32 for tokens x 3 layers x 2 experts, got 3 bytes"),
        ({"completion_tokens": 9}, "expected 11 rows for 12 tokens, got 7 with 3 layers and top-2"),
        ({"prompt_tokens": -1}, "prompt_tokens: expected a number of tokens, got -1"),
        ({"prompt_tokens": 99, "completion_tokens": None}, "at least the 99 rows of the prompt"),
    ],
)
def test_sglang_says_what_is_wrong(change: dict[str, Any], words: str, tmp_path: Path, out: Path) -> None:
    answer = kit.response(IDS)
    answer["meta_info"] |= change
    (tmp_path / "a.json").write_text(json.dumps(answer))
    with pytest.raises(TraceError) as error:
        SOURCES["sglang"].load(tmp_path / "a.json", out)
    said(error, words)


def test_npz_with_requests_and_prompts(tmp_path: Path, out: Path) -> None:
    path = tmp_path / "a.npz"
    arrays = {
        "expert": IDS,
        "weight": WEIGHTS.astype(np.float32),
        "offsets": np.array([0, 3, ROWS]),
        "n_prompt": np.array([2, 1]),
    }
    np.savez(path, **arrays)
    options = {"n_experts": EXPERTS}
    with pytest.raises(TraceError) as error:
        import_trace([path], out, Options(**options), label="measured")
    said(error, "the lengths of the prompts are there: give --phase both if their rows are too")
    both = import_trace([path], out, Options(**options, phase="both"), label="measured").trace
    assert both.requests.n_prompt.tolist() == [2, 1]
    decode = import_trace([path], out, Options(**options, phase="decode"), label="synthetic").trace
    assert (decode.prompt_offset.tolist(), decode.label) == ([2, 1], "synthetic")
    np.testing.assert_array_equal(decode.weights, WEIGHTS)
    rows = {
        "request": np.array([4] * 3 + [2] * 4),
        "position": np.array([5, 6, 7, 0, 1, 2, 3]),
        "phase": np.array([0, 1, 1] * 2 + [1]),
    }
    np.savez(path, expert=IDS, **rows)
    found = import_trace([path], out, Options(**options), label="measured").trace
    assert found.position.tolist() == rows["position"].tolist()
    assert found.phase.tolist() == rows["phase"].tolist()
    assert found.request.tolist() == [0] * 3 + [1] * 4


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": np.array([0, 3])}, "offsets: expected ascending rows from 0 to 7"),
        ({"offsets": np.arange(9)}, "offsets: expected shape (n,)"),
        ({"request": np.array([0, 1, 0, 0, 0, 0, 0])}, "request: expected rows of a request together"),
        ({"position": np.array([0, 1, 2, 4, 5, 6, 7])}, "position[3]: expected 3, one after the row before, got 4"),
        ({"phase": np.array([0, 1, 0, 1, 1, 1, 1])}, "phase[2]: expected 0 (prefill), then 1 (decode)"),
        ({"phase": np.zeros(6, int)}, "phase: expected shape (7)"),
        ({"n_prompt": np.array([0.5])}, "n_prompt: expected whole numbers"),
        ({"weight": WEIGHTS[:, :2]}, "weight: expected shape (7, 3, 2), as the experts"),
        ({"name": np.arange(1)}, "name: expected short texts"),
    ],
)
def test_npz_says_what_is_wrong(change: dict[str, Any], words: str, tmp_path: Path, out: Path) -> None:
    np.savez(tmp_path / "a.npz", expert=IDS, **change)
    with pytest.raises(TraceError) as error:
        import_trace([tmp_path / "a.npz"], out, Options(n_experts=EXPERTS, phase="decode"), label="measured")
    said(error, "a.npz: ", words)


# -------------------------------------------------------------------------------------------------------- llama.cpp


def positions(prompt: list[int], decode: list[int], layers_of: dict[int, int] | None = None) -> str:
    """Lines of the dialect with positions; `layers_of` limits the layers of the i-th token."""
    lines = ["pos,layer,id0,id1"]
    order = [(i, layer) for layer in range(LAYERS) for i in range(len(prompt))]
    order += [(len(prompt) + i, layer) for i in range(len(decode)) for layer in range(LAYERS)]
    for i, layer in order:
        if layer < (layers_of or {}).get(i, LAYERS):
            lines.append(f"{[*prompt, *decode][i]},{layer},{IDS[i, layer, 0]},{IDS[i, layer, 1]}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("prompt", "decode"),
    [([-3, -2, -1], [0, 1, 2, 3]), ([-1, -2, -3], [0, 1, 2, 3]), ([-1, -1, -1], [0, 1, 2, 3]), ([-3, -2, -1], [3, 4, 5, 6])],
)
def test_positions_below_zero_are_prefill(prompt: list[int], decode: list[int], tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.csv").write_text(positions(prompt, decode))
    found = SOURCES["llama-cpp-positions"].load(tmp_path / "a.csv", out).trace
    np.testing.assert_array_equal(found.experts, IDS)
    assert found.phase.tolist() == [0] * 3 + [1] * 4


@pytest.mark.parametrize("prompt", [[-3, -2, -1], [-1, -1, -1]])
def test_prompt_tokens_without_the_last_layer_are_left_out(prompt: list[int], tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.csv").write_text(positions(prompt, [0, 1, 2, 3], {0: 2, 1: 2}))
    imported = SOURCES["llama-cpp-positions"].load(tmp_path / "a.csv", out)
    assert imported.notes == ("a.csv: 2 tokens at the start of requests left out: layers [2] are not recorded for them",)
    assert imported.trace.header["left_out"] == list(imported.notes)
    np.testing.assert_array_equal(imported.trace.experts, IDS[2:])
    assert imported.trace.phase.tolist() == [0, 1, 1, 1, 1]
    assert imported.trace.prompt_offset.tolist() == [2]
    kept = SOURCES["llama-cpp-positions"].load(tmp_path / "a.csv", out, incomplete="layers").trace
    np.testing.assert_array_equal(kept.experts, IDS[:, :2])


def test_prefill_after_decode_is_the_next_request(tmp_path: Path, out: Path) -> None:
    text = positions([-3, -2, -1], [0, 1, 2, 3])
    (tmp_path / "a.csv").write_text(text + text.split("\n", 1)[1])
    found = SOURCES["llama-cpp-positions"].load(tmp_path / "a.csv", out).trace
    assert found.requests.n_prompt.tolist() == [3, 3]
    np.testing.assert_array_equal(found.experts, np.concatenate([IDS, IDS]))


def test_decode_alone_keeps_its_positions(tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.csv").write_text(positions([], [9, 10, 11]))
    found = SOURCES["llama-cpp-positions"].load(tmp_path / "a.csv", out).trace
    assert (found.prompt_offset.tolist(), found.phase.tolist()) == ([9], [1, 1, 1])


@pytest.mark.parametrize(
    ("prompt", "decode", "words"),
    [
        ([-4, -2, -1], [0], "count evenly up or down"),
        ([-2, -1], [5], "expected decode from position 0 or 2, got 5"),
        ([], [0, 1, 3], "position 2"),
    ],
)
def test_gaps_in_positions(prompt: list[int], decode: list[int], words: str, tmp_path: Path, out: Path) -> None:
    (tmp_path / "a.csv").write_text(positions(prompt, decode))
    with pytest.raises(TraceError) as error:
        SOURCES["llama-cpp-positions"].load(tmp_path / "a.csv", out)
    said(error, "a.csv: ", words)


def test_a_layer_for_a_part_of_a_pass_is_not_matched_to_tokens(tmp_path: Path, out: Path) -> None:
    source = SOURCES["llama-cpp-passes"]
    lines = source.make(tmp_path).read_text().splitlines()
    n_before = 1 + PROMPT * TOP_K * (LAYERS - 1)  # of the last layer of the prompt, keep one token of three
    (tmp_path / "a.csv").write_text("\n".join(lines[: n_before + TOP_K] + lines[n_before + PROMPT * TOP_K :]) + "\n")
    imported = source.load(tmp_path / "a.csv", out)
    np.testing.assert_array_equal(imported.trace.experts, IDS[PROMPT:])
    assert imported.trace.phase.tolist() == [1] * DECODE
    assert imported.trace.prompt_offset.tolist() == [PROMPT]
    assert "1 entries left out" in imported.notes[0]
    assert "3 tokens at the start" in imported.notes[1]


def test_passes_of_half_a_token(tmp_path: Path, out: Path) -> None:
    source = SOURCES["llama-cpp-passes"]
    with pytest.raises(
        TraceError, match=r"expected a multiple of 4 lines, the experts of whole tokens, got 6 lines of layer 0 from row 0"
    ):
        source.load(source.make(tmp_path), out, top_k=4)


# ----------------------------------------------------------------------------------------------------- BigMoeOnEdge


def test_bytes_of_experts_become_a_model(tmp_path: Path, out: Path) -> None:
    spec = load_model("qwen3-30b-a3b")
    lines = ["# route_trace v1", f"# model=q.gguf arch=q n_layer={spec.n_layers} n_expert=128 n_expert_used=2"]
    lines += [f"# layer={n} expert_bytes={3_000_000 + n} dense_bytes=50" for n in range(spec.n_layers)]
    lines += ["turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]
    lines += [f"0,1,{t},{n},{slot},{slot + t},0.5,0,0" for t in range(2) for n in range(spec.n_layers) for slot in range(2)]
    (tmp_path / "q.csv").write_text("\n".join(lines) + "\n")
    imported = import_trace([tmp_path / "q.csv"], out, Options(model="qwen3-30b-a3b"))
    path = write_model_file(imported)
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
    np.testing.assert_array_equal(imported.trace.experts, IDS[PROMPT - 1 :])
    np.testing.assert_array_equal(imported.trace.weights, WEIGHTS[PROMPT - 1 :])
    assert imported.trace.prompt_offset.tolist() == [PROMPT - 1]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("v1", "v2", "line 1: expected # route_trace v1"),
        ("n_layer=3", "n_layer=x", "n_layer: expected a whole number, got 'x'"),
        ("# layer=1 ", "# layer=2 ", "a line '# layer=' for each of the 3 layers"),
        ("n_expert_used=2", "n_expert_used=3", "3 layers and 3 experts a token as the preamble says, got 3 and 2"),
        ("0,1,5,1,0,", "0,1,5,1,9,", "rank of row 32: expected 0..1, got 9"),
        ("0,1,5,1,0,", "0,1,5,1,1,", "request 0, position 5, layer 1: expected an expert of rank 0"),
        ("0,1,5,1,0,", "0,0,5,1,0,", "phase of row 32: expected one phase for a token"),
        ("0,1,5,", "0,1,9,", "position"),
    ],
)
def test_route_traces_say_what_is_wrong(old: str, new: str, words: str, tmp_path: Path, out: Path) -> None:
    text = "\n".join(kit.bigmoe_lines()) + "\n"
    assert old in text
    (tmp_path / "a.csv").write_text(text.replace(old, new))
    with pytest.raises(TraceError) as error:
        SOURCES["bigmoe"].load(tmp_path / "a.csv", out)
    said(error, "a.csv: ", words)


# -------------------------------------------------------------------------------------- JSON Lines, CSV and Parquet


def test_json_lines_without_weights_and_in_layer_order(tmp_path: Path, out: Path) -> None:
    rows = [{"layer_idx": n, "token_idx": t, "selected_ids": IDS[t, n].tolist()} for n in range(LAYERS) for t in range(ROWS)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    found = SOURCES["jsonl"].load(path, out).trace
    np.testing.assert_array_equal(found.experts, IDS)
    assert found.weights is None


def test_a_new_request_when_the_first_token_comes_again(tmp_path: Path, out: Path) -> None:
    path = SOURCES["jsonl"].make(tmp_path)
    path.write_text(path.read_text() * 2)
    found = SOURCES["jsonl"].load(path, out).trace
    assert found.requests.n_decode.tolist() == [DECODE, DECODE]
    np.testing.assert_array_equal(found.experts[ROWS:], IDS)


def test_named_requests_may_be_interleaved(tmp_path: Path, out: Path) -> None:
    rows = []
    for t in range(ROWS):
        for n in range(LAYERS):
            for name, ids in (("b", IDS), ("a", IDS[::-1])):
                rows.append({"request": name, "layer_idx": n, "token_idx": t, "selected_ids": ids[t, n].tolist()})
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    found = SOURCES["jsonl"].load(tmp_path / "a.jsonl", out).trace
    np.testing.assert_array_equal(found.experts, np.concatenate([IDS, IDS[::-1]]))  # in the order in which they come up


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"selected_ids": [1, 2, 3]}, "expert of row 4: expected 2 values as in the row before, got 3"),
        ({"selected_ids": [1, -2]}, "expert[4, 1]: expected an id in 0..65535, got -2"),
        ({"gate_weights": [0.5, -0.5]}, "weight[4, 1]: expected a weight in 0.."),
        ({"gate_weights": [0.5]}, "weight of row 4: expected 2 values"),
        ({"selected_ids": None}, "expert of row 4: expected a value, got none"),
        ({"token_idx": 9_000_000_000}, "token of row 4: expected 0..2147483647"),
        ({"layer_idx": -1}, "layer of row 4: expected 0..4095, got -1"),
        ({"token_idx": 1.5}, "expected rows of a table"),
        ({"selected_ids": "x"}, "expected rows of a table"),
        ({"token_idx": 2}, "request 0, position 2, layer 1: expected 2 experts as elsewhere, got 4"),
    ],
)
def test_json_lines_say_what_is_wrong(row: dict[str, Any], words: str, tmp_path: Path, out: Path) -> None:
    path = SOURCES["jsonl"].make(tmp_path)
    lines = path.read_text().splitlines()
    lines[4] = json.dumps(json.loads(lines[4]) | row)
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(TraceError) as error:
        SOURCES["jsonl"].load(path, out)
    said(error, "a.jsonl: ", words)


def test_columns_of_other_names(tmp_path: Path, out: Path) -> None:
    lines = ["l,unused,e,t"] + [
        f"{n},x,{IDS[t, n, rank]},{t}" for t in range(ROWS) for n in range(LAYERS) for rank in range(TOP_K)
    ]
    (tmp_path / "a.csv").write_text("\n".join(lines) + "\n")
    columns = {"layer": "l", "expert": "e", "position": "t"}
    options = Options(n_experts=EXPERTS, phase="decode", columns=columns)
    found = import_trace([tmp_path / "a.csv"], out, options, label="measured").trace
    np.testing.assert_array_equal(found.experts, IDS)
    with pytest.raises(TraceError, match=r"expected a column 'position' for position, got l, unused, e, t; map it with --column"):
        import_trace([tmp_path / "a.csv"], out, Options(n_experts=EXPERTS, columns={"layer": "l"}), label="measured")


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
    np.testing.assert_array_equal(found.experts, IDS)
    np.testing.assert_array_equal(found.weights, WEIGHTS)
    assert found.prompt_offset.tolist() == [4]


def test_layers_that_do_not_count_from_zero_are_named(tmp_path: Path, out: Path) -> None:
    path = SOURCES["jsonl"].make(tmp_path)
    path.write_text(path.read_text().replace('"layer_idx": 2', '"layer_idx": 5'))
    found = SOURCES["jsonl"].load(path, out).trace
    np.testing.assert_array_equal(found.experts, IDS)
    assert found.header["layers"] == [0, 1, 5]


# ------------------------------------------------------------------------------------------------------ large sources


def test_a_source_that_would_not_fit_into_memory_is_refused(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = SOURCES["vllm-npy"].make(tmp_path)
    monkeypatch.setattr(gate, "MADE", IDS.size)
    with pytest.raises(TraceError, match=r"expert ids of all sources, got 84 B \(7 x 3 x 2\); import fewer requests at a time"):
        SOURCES["vllm-npy"].load(path, out)
    with path.open("ab") as file:
        file.truncate(2**32 + 1)
    with pytest.raises(TraceError, match="expected at most 4 GiB of recorded routing, got 4 GiB"):
        SOURCES["vllm-npy"].load(path, out)
    assert not out.exists()


def test_a_trace_larger_than_memory_is_mapped(tmp_path: Path) -> None:
    """1 TiB of a sparse file: more than any machine that runs this has, and it opens."""
    n_rows = 2**28
    arrays = {
        "experts": ("U8", [n_rows, 512, 8]),
        "request": ("I32", [n_rows]),
        "position": ("I32", [n_rows]),
        "phase": ("U8", [n_rows]),
    }
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
    assert found.experts.nbytes == 2**40
    assert last.sum() == 0
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
    ],
)
def test_models_from_yaml_say_what_is_wrong(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.model.yaml").write_text(text)
    with pytest.raises(InputError) as error:
        load_model(str(tmp_path / "a.model.yaml"))
    said(error, "a.model.yaml", words)
    with pytest.raises(InputError, match=r"b\.yaml: expected a model as YAML, got: No such file"):
        load_model("b.yaml")


def test_made_up_scores_are_set_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = synthetic_trace(2, 8, 2, 3, 4, 5)
    given = Additions(weights=True, scores=True)
    whole = calibrating.extend(replace(trace, weights=None), given, "t").scores
    monkeypatch.setattr(files, "_PIECE_BYTES", 1)
    found = calibrating.extend(replace(trace, weights=None), given, "t").scores
    assert found is not None and whole is not None
    wanted = np.zeros((27, 2, 8), np.float16)
    np.put_along_axis(wanted, trace.experts.astype(np.int64), np.float16(0.5), axis=2)
    assert np.array_equal(found, wanted) and np.array_equal(whole, wanted)


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
    np.testing.assert_array_equal(np.concatenate([rows[:0], *found]), rows)
