"""What the catalogue says of a public recording is so, and its commands make traces."""

from __future__ import annotations

import csv
import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from moesim.cli.main import main
from moesim.model import load_model
from moesim.trace import Trace
from moesim.trace.formats.importing import formats
from moesim.trace.recordings import Entry, recordings
from moesim.trace.synthesis import parameter_names
from tests.helpers_shared import shared_file
from tests.trace.import_kit import routing

ENTRIES = recordings()
IMPORTED = {"gpt-oss-20b": ("gpt-oss-20b", "decode_routing.npz"), "bigmoe-edge": ("bigmoe-on-edge", "qwen.route.csv")}
"""Where the files of recordings may lie."""


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["trace", "catalogue", *words]) == 0
    return capsys.readouterr().out


def option(entry: Entry, name: str) -> str:
    words = shlex.split(str(entry.command))
    return words[words.index(name) + 1]


# ------------------------------------------------------------------------------------------------------------ entries


def test_every_recording_that_can_be_imported_has_its_test() -> None:
    assert {entry.name for entry in ENTRIES.values() if entry.kind == "routing"} == set(IMPORTED)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *(("gpt-oss-20b", change) for change in (
            {"licence": None}, {"revision": "main"}, {"lacks": ["tokens"]}, {"lacks": ["scores", "scores"]}, {"lacks": ["speed"]},
            {"command": "moesim trace synthesize"}, {"size": {"requests": 0, "prompt_tokens": 0, "decode_tokens": 1}},
        )),
        *(("klotski", change) for change in ({"format": "npz"}, {"kind": "routing"}, {"stars": 5}, {"note": " "})),
    ],
)  # fmt: skip
def test_an_entry_that_contradicts_itself_is_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Entry.model_validate(ENTRIES[name].model_dump() | change)


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_formats_and_shapes_are_known(entry: Entry) -> None:
    assert entry.format is None or entry.format in formats()
    if entry.shape is not None:
        model = load_model(option(entry, "--model" if entry.kind == "routing" else "--parameters"))
        assert (entry.shape.layers, entry.shape.experts) == (model.n_layers, model.n_experts)
        assert entry.shape.top_k == model.top_k or f"{entry.shape.top_k} experts a token" in entry.note


# ----------------------------------------------------------------------------------------------------------- commands


def make_npz(path: Path) -> None:
    """Two requests, of which the second has the longer prompt."""
    ids = routing(5, layers=24, experts=32, top_k=4).astype(np.int8)
    weights = np.full(ids.shape, 0.25, np.float16)
    more = {"n_prompt": np.array([3, 9]), "names": np.array(["a", "b"])}
    np.savez(path, topk_ids=ids, topk_probs=weights, seq_offsets=np.array([0, 2, 5]), **more)


def make_route(path: Path) -> None:
    """Two prompt tokens, the first without the last layer, and one decoded."""
    ids = routing(3, layers=48, experts=128, top_k=6)
    lines = ["# route_trace v1", "# model=/x/qwen.gguf arch=qwen3moe n_layer=48 n_expert=128 n_expert_used=6"]
    lines += [f"# layer={layer} expert_bytes=10 dense_bytes=5" for layer in range(48)]
    lines += ["turn,phase,step,layer,slot,expert,weight,residency,expert_bytes"]
    lines += [f"0,{int(t == 2)},{t},{layer},{slot},{expert},0.125,0,10"
              for (t, layer, slot), expert in np.ndenumerate(ids) if (t, layer) != (0, 47)]  # fmt: skip
    path.write_text("\n".join(lines) + "\n")


def run_command(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Trace:
    """Run the command of an entry in the folder in which its file lies."""
    monkeypatch.chdir(folder)
    words = shlex.split(str(ENTRIES[name].command))
    assert main(words[1:]) == 0
    return Trace.read(folder / option(ENTRIES[name], "--out"))


@pytest.mark.parametrize(("name", "make"), [("gpt-oss-20b", make_npz), ("bigmoe-edge", make_route)])
def test_the_command_imports_a_file_of_this_layout(
    name: str, make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / IMPORTED[name][1])
    trace = run_command(name, tmp_path, monkeypatch)
    assert f" from {ENTRIES[name].format}: " in capsys.readouterr().err, "it says which format it took the file for"
    assert trace.label == "measured"
    assert trace.prompt_offset.tolist() == {"gpt-oss-20b": [3, 9], "bigmoe-edge": [1]}[name]
    check_lacks(ENTRIES[name], trace)


@pytest.mark.parametrize("name", IMPORTED)
def test_size_and_shape_are_those_of_the_recording(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, entry = shared_file("traces", *IMPORTED[name]), ENTRIES[name]
    (tmp_path / source.name).symlink_to(source)
    trace = run_command(name, tmp_path, monkeypatch)
    assert entry.bytes in (None, source.stat().st_size)
    assert entry.shape is not None and entry.size is not None
    assert (trace.n_layers, trace.n_experts, trace.top_k) == (entry.shape.layers, entry.shape.experts, entry.shape.top_k)
    assert (trace.n_requests, trace.requests.n_decode.sum()) == (entry.size.requests, entry.size.decode_tokens)
    if "prompt routing" not in entry.lacks:
        # Tokens of the prompt that were left out count as its offset.
        assert (trace.prompt_offset + trace.requests.n_prompt).sum() == entry.size.prompt_tokens
    check_lacks(entry, trace)


def check_lacks(entry: Entry, trace: Trace) -> None:
    assert (trace.weights is None) == ("weights" in entry.lacks)
    assert (trace.scores is None) == ("scores" in entry.lacks)
    assert (trace.requests.n_prompt.sum() == 0) == ("prompt routing" in entry.lacks)


def test_the_command_makes_a_synthetic_trace_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in ENTRIES.values():
        if entry.kind != "routing" and entry.command is not None:
            assert option(entry, "--parameters") in parameter_names()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(str(ENTRIES["mt-bench"].command))
    assert main([*words[1:], "--requests", "1", "--prompt", "1", "--decode", "1"]) == 0
    assert Trace.read(tmp_path / option(ENTRIES["mt-bench"], "--out")).label == "synthetic"


# -------------------------------------------------------------------------------------------------------------- print


def test_the_table_fits_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys)
    assert max(map(len, text.splitlines())) <= 80
    for entry in ENTRIES.values():
        assert f"\n{entry.name} " in text
    assert "not stated" in text


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_in_full(entry: Entry, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, entry.name)
    assert max(map(len, text.splitlines())) <= 80
    for fact in ("repository", "revision", "licence"):
        assert f"\n{fact}: {getattr(entry, fact) or 'not stated'}\n" in text
    assert " ".join(entry.note.split()) in " ".join(text.split())
    if entry.command is not None:
        shell = text[text.index("\nmoesim trace ") :].replace("\\\n", "")
        assert shlex.split(shell) == shlex.split(entry.command)


def test_for_other_programs(capsys: pytest.CaptureFixture[str]) -> None:
    whole = json.loads(printed(capsys, "-o", "json"))
    assert [Entry.model_validate(one) for one in whole] == list(ENTRIES.values())
    lines = printed(capsys, "klotski", "-o", "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == [ENTRIES["klotski"].model_dump()]
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "-o", "csv"))))
    assert [(row["name"], row["revision"]) for row in rows] == [
        (entry.name, entry.revision or "not stated") for entry in ENTRIES.values()
    ]
    assert printed(capsys, "-o", "md").startswith("| name | kind | models |")
    assert main(["trace", "catalogue", "gpt-oss"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("moesim: unknown recording 'gpt-oss'; did you mean 'gpt-oss-20b'?")
