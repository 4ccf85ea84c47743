"""Routing as people log it: each form gives the ids, order and weights that were written, and no flag says which form it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moesim.cli.main import main
from moesim.errors import InputError
from moesim.trace import Trace
from moesim.trace.formats.contract import AXES, Options
from moesim.trace.formats.importing import find_format, import_trace
from moesim.trace.formats.records import facts_in
from tests.trace import import_kit as kit
from tests.trace.import_kit import DECODE, EXPERTS, IDS, LAYERS, PROMPT, ROWS, SOURCES, TOP_K, WEIGHTS, refused

equal = np.testing.assert_array_equal
PLACES = [(t, layer) for t in range(ROWS) for layer in range(LAYERS)]
BY_LAYER = sorted(PLACES, key=lambda place: (place[1], place[0]))


def ids(t: int, layer: int, separator: str = "") -> Any:
    found = [int(one) for one in IDS[t, layer]]
    return separator.join(map(str, found)) if separator else found


def weights(t: int, layer: int, separator: str = "") -> Any:
    found = [float(one) for one in WEIGHTS[t, layer]]
    return separator.join(map(str, found)) if separator else found


def table(head: str, line: Callable[[int, int], str], places: list[tuple[int, int]] = PLACES) -> str:
    return "\n".join([head, *(line(*place) for place in places)]) + "\n"


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def tokens(record: Callable[[int], Any]) -> str:
    return lines(*(record(t) for t in range(ROWS)))


def each(record: Callable[[int, int], Any], places: list[tuple[int, int]] = PLACES, first: Any = None) -> str:
    return lines(*([] if first is None else [first]), *(record(*place) for place in places))


def objects(t: int, layer: int) -> list[dict[str, Any]]:
    return [{"id": one, "weight": factor} for one, factor in zip(ids(t, layer), weights(t, layer), strict=True)]


LAB = {"record_type": "metadata", "format": "moe-cache-lab.routing-jsonl", "format_version": 1, "model_id": "tiny",
       "num_experts": EXPERTS, "experts_per_token": TOP_K}  # fmt: skip
META = {"type": "meta", "model_id": "tiny", "layers_logged": [0, 1, 2], "top_k": TOP_K, "num_experts": EXPERTS}
RUN = {"type": "run", "run_id": "7", "model": "tiny", "prompt_tokens": PROMPT, "expert_count": EXPERTS}
PHASE = ["prefill"] * PROMPT + ["decode"] * DECODE


def vllm_logger(t: int, n: int) -> Any:
    return {"type": "route", "req_id": "r0", "token_idx": t, "layer": n, "topk_ids": ids(t, n), "topk_weights": weights(t, n)}


def llama_run(t: int, n: int) -> Any:
    place = {"type": "route", "run_id": "7", "phase": PHASE[t], "step": 9, "layer": n, "token_offset": t}
    return place | {"experts": ids(t, n), "weights": weights(t, n)}


def cache_lab(t: int, n: int) -> Any:
    place = {"record_type": "routing_selection", "phase": "prompt" if t < PROMPT else "generated", "token_position": t}
    return place | {"token_id": None, "layer": n, "selected_experts": ids(t, n), "selected_probabilities": weights(t, n)}


#: Form -> its text, and what it has or says itself: weights, the number of experts, phases, no position, positions from 1.
FORMS: dict[str, tuple[str, str]] = {
    "csv, ids in a cell": (table("token,layer,experts", lambda t, n: f"{t},{n},{ids(t, n, ' ')}"), ""),
    "csv, a list in a cell": (table("token,layer,experts", lambda t, n: f'{t},{n},"{ids(t, n)}"'), ""),
    "csv, a list without quotes": (table("token,layer,experts", lambda t, n: f"{t},{n},{ids(t, n)}"), ""),
    "csv, weights in a cell": (
        table("layer,tok,topk_ids,topk_weights", lambda t, n: f"{n},{t},{ids(t, n, ';')},{weights(t, n, ';')}", BY_LAYER),
        "weights",
    ),
    "csv, a column an expert": (table("token,layer,expert_0,expert_1", lambda t, n: f"{t},{n},{ids(t, n, ',')}"), ""),
    "csv, columns of weights": (
        table("layer_id,token_idx,e0,e1,w0,w1", lambda t, n: f"{n},{t},{ids(t, n, ',')},{weights(t, n, ',')}"), "weights",
    ),
    "csv, columns from 1": (table("topk_2,topk_1,pos,layer", lambda t, n: f"{ids(t, n)[1]},{ids(t, n)[0]},{t},{n}"), ""),
    "csv, tabs": (table("layer\tposition\texpert", lambda t, n: "\n".join(f"{n}\t{t}\t{one}" for one in ids(t, n))), ""),
    "csv, no position": (table("layer,experts", lambda t, n: f"{n},{ids(t, n, ' ')}", BY_LAYER), "counted"),
    "csv, a preamble": (
        table(f"# model=tiny num_experts={EXPERTS} top_k: {TOP_K}\nphase,token,layer,experts",
              lambda t, n: f"{PHASE[t]},{t},{n},{ids(t, n, '|')}"), "n_experts phase",
    ),
    "json lines, layers of a token": (tokens(lambda t: {"token": t, "experts": IDS[t].tolist()}), ""),
    "json lines, tok from 1": (tokens(lambda t: {"tok": t + 1, "layers": IDS[t].tolist()}), "from 1"),
    "json lines, no token": (tokens(lambda t: {"layers": IDS[t].tolist()}), "counted"),
    "json lines, a batch a layer": (
        lines(*({"layer": n, "batch_id": 0, "origin_rows": [0] * 7, "topk_experts": IDS[:, n].tolist()} for n in range(LAYERS))),
        "",
    ),
    "json lines, a map of layers": (tokens(lambda t: {"t": t, "layers": {str(n): ids(t, n) for n in range(LAYERS)}}), ""),
    "json lines, names of layers": (
        tokens(lambda t: {"pos": t, "layers": {f"model.layers.{n}.mlp": ids(t, n) for n in range(LAYERS)}}), "",
    ),
    "json lines, objects": (each(lambda t, n: {"layer": n, "token": t, "experts": objects(t, n)}, BY_LAYER), "weights"),
    "json lines, nested objects": (
        tokens(lambda t: {"token": t, "layers": [{"layer": n, "experts": objects(t, n)} for n in range(LAYERS)]}), "weights",
    ),
    "json lines, one expert a line": (
        lines(*({"layer": n, "token": t, "expert": one} for t, n in PLACES for one in ids(t, n))), "",
    ),
    "json lines, a logger of vLLM": (each(vllm_logger, first=META), "weights n_experts"),
    "json lines, a run of llama.cpp": (each(llama_run, BY_LAYER, RUN), "weights n_experts phase"),
    "json lines, moe-cache-lab": (each(cache_lab, first=LAB), "weights n_experts phase"),
    "json, a document": (
        json.dumps({"model": "tiny", "num_experts": EXPERTS, "tokens": [{"layers": one.tolist()} for one in IDS]}, indent=1),
        "n_experts",
    ),
    "json, layers of tokens": (json.dumps({f"layer_{n}": IDS[:, n].tolist() for n in range(LAYERS)}, indent=1), ""),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_form_gives_what_was_logged(form: str, tmp_path: Path) -> None:
    text, says = FORMS[form]
    path, first = tmp_path / "log", int("from 1" in says)
    path.write_text(text)
    assert find_format(path, None).name == ("csv" if form.startswith("csv") else "jsonl")
    options: dict[str, Any] = {} if "phase" in says else {"phase": "decode"} if first else {"n_prompt": (PROMPT,)}
    options |= {} if "n_experts" in says else {"n_experts": EXPERTS}
    found = import_trace([path], tmp_path / "t.safetensors", Options(**options), label="measured").trace
    equal(found.experts, IDS)
    assert (found.weights is not None) == ("weights" in says)
    if "weights" in says:
        equal(found.weights, WEIGHTS)
    assert found.position.tolist() == list(range(first, first + ROWS))
    assert found.phase.tolist() == ([1] * ROWS if first else [0] * PROMPT + [1] * DECODE)
    assert found.model == ("tiny" if "n_experts" in says else "unknown")
    assert len(found.header["left_out"]) == ("counted" in says)


def test_requests_of_a_log_stay_apart(tmp_path: Path) -> None:
    rows = [{"request_id": name, "token": t, "layer": n, "experts": one[t, n].tolist()}
            for name, one in {"b": IDS, "a": IDS[::-1]}.items() for t, n in PLACES]  # fmt: skip
    (tmp_path / "a.jsonl").write_text(lines(*rows))
    found = import_trace(
        [tmp_path / "a.jsonl"], tmp_path / "t.safetensors", Options(n_experts=EXPERTS, phase="decode"), label="measured"
    )
    equal(found.trace.experts, np.concatenate([IDS, IDS[::-1]]))
    assert found.trace.requests.n_decode.tolist() == [ROWS, ROWS]


def test_a_log_that_stops_within_a_token_loses_that_token(tmp_path: Path) -> None:
    text = FORMS["json lines, objects"][0]
    options, out = Options(n_experts=EXPERTS, phase="decode"), tmp_path / "t.safetensors"
    by_token = each(lambda t, n: {"layer": n, "token": t, "experts": ids(t, n)})
    (tmp_path / "a.jsonl").write_text(by_token[: by_token.rindex("{")])
    found = import_trace([tmp_path / "a.jsonl"], out, options, label="measured")
    equal(found.trace.experts, IDS[:-1])
    assert found.notes == ("a.jsonl: the last token left out: the file ends before its last layer",)
    (tmp_path / "a.jsonl").write_text(text[: text.rindex('{"layer"')])  # layer by layer, it is not known what else is missing
    refused(
        lambda: import_trace([tmp_path / "a.jsonl"], out, options, label="measured"), "position 6, layer 2: expected 2 experts"
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (1, 2, 0)])
def test_axes_are_stated_or_follow_from_the_sizes_or_are_asked_for(order: tuple[int, ...], tmp_path: Path) -> None:
    path, out = tmp_path / "a.npy", tmp_path / "t.safetensors"
    np.save(path, IDS.transpose(order))
    axes = tuple(AXES[axis] for axis in order)

    def load(**options: Any) -> Trace:
        given = {"n_experts": EXPERTS, "phase": "decode"} | options
        return import_trace([path], out, Options(**given), label="measured").trace

    text = refused(load, f"a.npy: expected what its axes count, got shape {IDS.transpose(order).shape}, which fits")
    assert "--axes tokens,layers,ids" in text and not out.exists()
    equal(load(axes=axes).experts, IDS)
    equal(load(n_layers=LAYERS).experts, IDS)  # three layers, and no expert twice in a token: one order fits
    refused(lambda: load(n_layers=4), "which fits no orders")
    (tmp_path / "a.json").write_text(json.dumps(IDS.transpose(order).tolist()))
    path = tmp_path / "a.json"
    refused(load, "expected what its axes count, got lists of 3 axes without keys")
    if axes[-1] == "ids":
        equal(load(axes=axes).experts, IDS)
    else:
        refused(lambda: load(axes=axes), "expected ids as the last axis of nested lists")
    path = tmp_path / "a.csv"
    path.write_text(FORMS["csv, tabs"][0])
    refused(lambda: load(axes=axes), f"--axes {','.join(axes)}: expected none, since csv has axes of its own")


def test_maps_with_numbers_as_keys_need_axes_and_hold_no_counts(tmp_path: Path) -> None:
    path, out = tmp_path / "a.json", tmp_path / "t.safetensors"

    def load(value: Any, axes: str | None = None, **places: Any) -> Trace:
        path.write_text("".join(json.dumps(one | places) + "\n" for one in value))
        options = Options(n_experts=EXPERTS, phase="decode", axes=None if axes is None else tuple(axes.split(",")))
        return import_trace([path], out, options, label="measured").trace

    by_token = [{str(n): ids(t, n) for n in range(LAYERS)} for t in range(ROWS)]
    by_layer = [{str(t): ids(t, n) for t in range(ROWS)} for n in range(LAYERS)]
    for lines_of, axes in [(by_token, "tokens,layers,ids"), (by_layer, "layers,tokens,ids")]:
        for value in (lines_of, [{str(i): one for i, one in enumerate(lines_of)}]):
            refused(lambda: load(value), "expected what its axes count, got maps whose keys are numbers; give --axes")  # noqa: B023
            equal(load(value, axes).experts, IDS)
        whole = [{str(i): list(one.values()) for i, one in enumerate(lines_of)}]  # lists in a map
        equal(load(whole, axes).experts, IDS)
    counts = [{"0": {"0": 50, "1": 87}, "1": {"0": 3, "1": 4}}]
    for axes in (None, "tokens,layers,ids"):
        text = refused(lambda: load(counts, axes), "expected")  # noqa: B023
        assert "what its axes count" in text or "a list of experts, got 50; counts are read by" in text
    refused(lambda: load([{"token": 0, "layers": {"0": 5}}]), "expected a list of experts, got 5; counts are read by")


def test_arrays_of_an_archive_are_found_by_their_names_and_shapes(tmp_path: Path) -> None:
    scores = np.zeros((ROWS, LAYERS, EXPERTS))
    np.savez(tmp_path / "a.npz", probs=WEIGHTS.transpose(1, 0, 2), topk_ids=IDS.transpose(1, 0, 2), scores=scores, token=[1, 2])
    options = Options(n_experts=EXPERTS, n_layers=LAYERS, phase="decode")
    found = import_trace([tmp_path / "a.npz"], tmp_path / "t.safetensors", options, label="measured").trace
    equal(found.experts, IDS)
    equal(found.weights, WEIGHTS)
    mixed = {"request": np.array([5, 2, 5, 2, 5, 5, 5]), "expert": IDS, "weight": WEIGHTS}  # rows of requests in turns
    np.savez(tmp_path / "a.npz", **mixed)
    found = import_trace([tmp_path / "a.npz"], tmp_path / "t.safetensors", options, label="measured").trace
    rows = [0, 2, 4, 5, 6, 1, 3]
    equal(found.experts, IDS[rows])
    equal(found.weights, WEIGHTS[rows])
    assert found.requests.n_decode.tolist() == [5, 2]


def test_all_that_is_missing_is_named_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "a.csv", tmp_path / "t.safetensors"
    path.write_text(FORMS["csv, ids in a cell"][0])
    command = ["trace", "import", str(path), "--out", str(out)]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    what, ways = line.split("; give ")
    asked = "the number of experts of a layer, a label (measured or synthetic) and the phase of the rows"
    assert what.endswith(f"expected {asked}, got none")
    assert all(option in ways for option in ("--n-experts", "--model", "--label", "--phase", "--n-prompt"))
    assert main([*command, "--n-experts", str(EXPERTS), "--label", "measured", "--phase", "decode"]) == 0
    assert main(["trace", "stats", str(out), "-q"]) == 0


@pytest.mark.parametrize("name", ["olmoe", "OLMoE-1B-7B", "config.json"])
def test_a_model_is_any_that_moesim_knows(name: str, tmp_path: Path) -> None:
    from moesim.model import load_model

    if name == "config.json":
        name = str(tmp_path / name)
        Path(name).write_text(json.dumps({
            "architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32,
            "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3, "num_experts": 7,
            "num_experts_per_tok": 2, "vocab_size": 100, "tie_word_embeddings": False, "norm_topk_prob": False}))  # fmt: skip
    spec = load_model(name)
    some = np.tile(np.arange(spec.top_k), (4, spec.n_layers, 1))
    (tmp_path / "a.jsonl").write_text(lines(*({"token": t, "experts": some[t].tolist()} for t in range(4))))
    options = Options(model=name, phase="decode")
    found = import_trace([tmp_path / "a.jsonl"], tmp_path / "t.safetensors", options, label="measured").trace
    assert (found.n_experts, found.n_layers, found.model) == (spec.n_experts, spec.n_layers, spec.name)


def test_a_model_that_cannot_be_read_is_no_name(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    (tmp_path / "a.jsonl").write_text(FORMS["json lines, layers of a token"][0])
    with pytest.raises(InputError, match=r"m\.gguf"):
        import_trace([tmp_path / "a.jsonl"], tmp_path / "t.safetensors", Options(model=str(tmp_path / "m.gguf"), phase="decode"))


# ------------------------------------------------------------------------------------------- formats of single programs


def test_windows_of_strata_without_tags_are_single_tokens(tmp_path: Path) -> None:
    path, out, options = tmp_path / "a.bin", tmp_path / "t.safetensors", Options(n_experts=EXPERTS, phase="decode")
    path.write_bytes(kit.strata_words([([t], 0, 1) for t in range(ROWS)], tags=False))
    assert find_format(path, None).name == "strata"
    equal(import_trace([path], out, options).trace.experts, IDS)
    path.write_bytes(kit.strata_words([([0, 1], 1, 1), ([2], 0, 1)], tags=False))
    refused(
        lambda: import_trace([path], out, options), "expected tags that say which drafts were accepted, got windows of several"
    )


def test_weights_of_strata_that_are_zeros_were_not_recorded_and_an_open_window_is_left_out(tmp_path: Path) -> None:
    path, words = tmp_path / "a.bin", np.frombuffer(kit.strata_words([([t], 0, 1) for t in range(ROWS)]), "<i4").copy()
    floats = words.view("<f4")
    floats[(floats > 1e-30) & (floats < 10)] = 0
    path.write_bytes(words[: -(2 + 2 * 4)].tobytes())  # the last window has no tag
    found = import_trace([path], tmp_path / "t.safetensors", Options(n_experts=EXPERTS)).trace
    equal(found.experts, IDS[:-1])
    assert found.weights is None and found.phase.tolist() == [1] * (ROWS - 1)


def test_lines_of_llama_cpp_with_names_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "moe.log"
    path.write_text("".join(f"blk.{n}.ffn_gate_exps.weight {ids(t, n, ' ')}\n" for t, n in PLACES))
    found = import_trace([path], tmp_path / "t.safetensors", Options(n_experts=EXPERTS, n_prompt=(PROMPT,))).trace
    equal(found.experts, IDS)
    path.write_text("route 0 2 2 1 3:-1 4:-1\n" + SOURCES["llama-cpp-routes"].make(tmp_path).read_text())
    imported = import_trace([path], tmp_path / "t.safetensors", Options(n_experts=EXPERTS, phase="decode"))
    equal(imported.trace.experts, IDS)  # of the end of a prompt only the last layer was observed
    assert imported.notes == ("moe.log: 1 tokens at the start of requests left out: layers [0, 1] are not recorded for them",)
    for line, words in [
        ("route 9 0 2 1 3:-1", "line 1: expected a line like the first, with 2 experts of each token, got b'route 9 0 2 1 3:-1"),
        ("route 9 0 2 1 3:-1 4:-1\nroute 9 1 3 1 1:0 2:0 3:0", "line 2: expected a line like the first, with 2 experts"),
    ]:
        path.write_text(f"{line}\n")
        refused(lambda: import_trace([path], tmp_path / "u.safetensors", Options(n_experts=EXPERTS, phase="decode")), words)


def test_requests_of_a_recorder_that_ran_together(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path, out = tmp_path / "a.pt", tmp_path / "t.safetensors"

    def load(*passes: Any) -> Trace:
        kit.save_recorded(path, [kit.recorded(*one, number=number) for number, one in enumerate(passes)])
        return import_trace([path], out, Options()).trace

    both = kit.recorded(1, [0, 1, 2, 3, 4], 0, [0, 1, 0, 1, 2]) | {"extend_seq_lens": [2, 3]}
    later = [kit.recorded(2, [5, 6], 1, [2, 3]), kit.recorded(2, [0], 2, [4]), kit.recorded(1, [1], 3, [5])]
    kit.save_recorded(path, [later[1], both, later[0], later[2]])  # in any order
    found = import_trace([path], out, Options()).trace
    assert (found.n_experts, found.header["layers"]) == (EXPERTS, [1, 2, 3])
    assert found.requests.n_prompt.tolist() == [2, 3, 1] and found.requests.n_decode.tolist() == [1, 2, 0]
    equal(found.experts, IDS[[0, 1, 5, 2, 3, 4, 6, 0, 1]])  # the last begins after a prefix that was cached
    assert found.prompt_offset.tolist() == [0, 0, 5]
    chunks = load((1, [0, 1]), (1, [2, 3]), (2, [4]))  # a prompt in two pieces
    assert (chunks.requests.n_prompt.tolist(), chunks.requests.n_decode.tolist()) == ([4], [1])
    for passes, words in [
        ([kit.recorded(1, [0, 1, 2, 3], 0, [0, 1, 0, 1]) | {"extend_seq_lens": [2, 2]}, kit.recorded(2, [4, 5], 1, [2, 2])],
         "pass 1: expected requests of one batch at different positions, got several at 2; record one request at a time"),
        ([kit.recorded(3, [0], 0)], "expected a prompt or a decode pass, got forward_mode 3"),
        ([{"global_physical_count": kit.recorded(1, [0], 0)["global_physical_count"], "forward_pass_id": 0}],
         "expected routes, of the recorder's mode per_token, got counts; counts have no tokens"),
    ]:  # fmt: skip
        kit.save_recorded(path, passes)
        refused(lambda: import_trace([path], out, Options()), words)


# ------------------------------------------------------------------------------------------------------------- counts

COUNTED = np.arange(1, LAYERS * EXPERTS + 1).reshape(LAYERS, EXPERTS)[:, ::-1]


def write_counts(path: Path) -> None:
    cells = [f"{n + 3},{e},{COUNTED[n, e]}" for n in range(LAYERS) for e in range(EXPERTS)]
    if path.suffix == ".csv":  # as SGLang wrote them: layers by their number in the model
        path.write_text("\n".join(["layer_id,expert_id,count", *cells, ""]))
    elif path.suffix == ".json":
        path.write_text(json.dumps({"logical_count": [np.zeros_like(COUNTED).tolist(), COUNTED.tolist()]}))
    elif path.suffix == ".npy":
        np.save(path, np.vstack([np.zeros((2, EXPERTS), int), COUNTED]))
    elif path.suffix == ".npz":
        np.savez(path, logical_count=np.stack([COUNTED - 1, np.ones_like(COUNTED)]))
    else:
        import torch

        dense = np.zeros((1, EXPERTS + 1), np.int32)
        copies = np.hstack([COUNTED[:, -1:] - 1, COUNTED[:, :-1], np.ones((LAYERS, 1), int)])  # the last expert has two
        counts = torch.tensor(np.vstack([dense, copies]).astype(np.int32))
        mapped = torch.tensor([EXPERTS - 1, *range(EXPERTS)]).repeat(LAYERS + 1, 1)
        torch.save(
            {"records": [{"forward_pass_id": 0, "global_physical_count": counts}], "last_physical_to_logical_map": mapped}, path
        )


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.npy", "a.npz", "a.pt"])
def test_counts_are_popularity_and_no_routes(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if name.endswith("pt"):
        pytest.importorskip("torch")
    path, out, trace = tmp_path / name, tmp_path / "t.safetensors", kit.trace(header={"absent": ["calibration tables"]})
    write_counts(path)
    if not name.endswith("npy"):  # an array of two axes may be anything
        text = refused(
            lambda: import_trace([path], out, Options(n_experts=EXPERTS)), "got counts; counts have no tokens in order"
        )
        assert f"moesim trace calibrate TRACE --counts {path} --out NAME.safetensors" in text and not out.exists()
    trace.write(tmp_path / "real.safetensors")
    command = ["trace", "calibrate", str(tmp_path / "real.safetensors"), "--counts", str(path), "--out", str(out)]
    assert main(command) == 0
    assert f"popularity counted in {name}; tables activation_frequency" in capsys.readouterr().err
    found = Trace.read(out)
    np.testing.assert_allclose(found.tables["activation_frequency"], COUNTED / COUNTED.sum(axis=1, keepdims=True), rtol=1e-6)
    equal(found.experts, IDS)  # nothing is held back: the counts are of another recording
    absent = set(found.header["absent"])
    assert (
        "calibration table coactivation" in absent
        and not {"calibration table activation_frequency", "calibration tables"} & absent
    )
    assert main([*command, "--overwrite", "--share", "0.5"]) == 2
    assert "expected no --share next to it" in capsys.readouterr().err
    again = [*command[:2], str(out), *command[3:5], "--out", str(tmp_path / "u.safetensors")]
    assert main(again) == 2
    assert "without calibration tables, got tables activation_frequency" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("layer,expert,count\n0,0,1\n", "expected counts of 3 layers as the trace has, got 1 with any; choose another trace"),
        ("layer,expert,count\n0,0,1\n1,0,0\n2,1,1\n", "expected counts of 3 layers as the trace has, got 2 with any"),
        ("layer,expert,count\n" + "".join(f"{n},{9},1\n" for n in range(3)), "at least 0, of up to 7 experts, got shape (3, 10)"),
        ("layer,expert,count\n" + "".join(f"{n},{1},-1\n" for n in range(3)), "at least 0, of up to 7 experts, got shape (3, 2)"),
        ("layer,expert,count\n0,99999999,1\n", "layers and experts within their limits"),
        ("layer,expert\n0,1\n", "expected the columns layer, expert and count, got layer, expert; name them so"),
        ('{"logical_count": "x"}\n', "expected counts of each expert in each layer, got ValueError"),
        (None, "a.csv: expected a file of at most 4 GiB, got none, or a larger one; check the path"),
        ('{"other": 1}\n', "expected counts of each expert in each layer, got KeyError"),
    ],
)
def test_counts_that_do_not_fit(text: str | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kit.trace().write(tmp_path / "real.safetensors")
    if text is not None:
        (tmp_path / "a.csv").write_text(text)
    out = tmp_path / "t.safetensors"
    command = ["trace", "calibrate", str(tmp_path / "real.safetensors"), "--counts", str(tmp_path / "a.csv"), "--out", str(out)]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and not out.exists()


def test_counts_of_a_real_model_are_none_of_a_synthetic_trace(tmp_path: Path) -> None:
    from moesim.trace.calibrating import with_popularity

    made = kit.trace(label="synthetic")
    refused(
        lambda: with_popularity(made, COUNTED.astype(float), "a.csv"), "got a synthetic one, whose experts are not those counted"
    )


@pytest.mark.parametrize("wrong", [0, -1, 2**31, True, 1.0, None, [], "8"])
def test_facts_of_a_file_are_counts_and_a_name(wrong: Any) -> None:
    model = "" if wrong == "8" else wrong
    assert facts_in({"num_experts": wrong, "meta": {"top_k": wrong, "model": model}}) == {}
    assert [facts_in({"meta": [{}] * n + [{"model_id": "a"}]}) for n in (7, 8)] == [{"model": "a"}, {}]  # nor in long lists
    assert facts_in({"num_experts": 8, "meta": [{"top_k": 1}, {"model_id": "a"}, wrong]}) == {
        "n_experts": 8,
        "top_k": 1,
        "model": "a",
    }
