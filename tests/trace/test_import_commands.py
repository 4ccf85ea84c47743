"""``moesim trace import`` and ``export``, from the command line, and on recordings of others."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from moesim.cli.main import main
from moesim.experiment.config import parse_config
from moesim.experiment.resolve import Experiment
from moesim.trace import Trace
from tests.helpers_bigmoe import read_route_trace
from tests.helpers_shared import shared_file
from tests.trace.import_kit import DECODE, IDS, PROMPT, SOURCES, WEIGHTS


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
        ([], "a.npy: expected the number of experts of a layer"),
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
        assert main(["trace", "import", str(path), "--out", str(out), *arguments]) == 2
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
        ([], "expected the bytes of an expert, got none from the trace; give --model or --object-size"),
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
    known = ["trace", "import", str(path), "--out", str(out), "--phase", "decode"]
    assert main([*known, "--model", f"{{{small}}}"]) == 0
    found = Trace.read(out)
    assert (found.n_experts, found.header["model"]) == (7, "mixtral-8x7b")
    sizes = {}
    for bits in (4, 8):
        target = tmp_path / f"{bits}.bin"
        model = f"{{{small}, expert_bits: {bits}}}"
        assert main(["trace", "export", str(out), "--format", "oracleGeneral", "--out", str(target), "--model", model]) == 0
        kinds = [("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")]
        (sizes[bits],) = set(np.fromfile(target, kinds)["size"].tolist())
    assert sizes[8] == 2 * sizes[4] > 0
    capsys.readouterr()
    assert main([*known, "--overwrite", "--model", "{base: mixtral-8x7b, topk: 1}"]) == 2
    assert "--model: unknown model field 'topk'; did you mean 'top_k'?" in capsys.readouterr().err


def test_bytes_of_the_source_are_those_of_the_objects(tmp_path: Path) -> None:
    path, out = SOURCES["bigmoe"].make(tmp_path), tmp_path / "t.safetensors"
    assert main(["trace", "import", str(path), "--out", str(out)]) == 0
    assert main(["trace", "export", str(out), "--format", "oracleGeneral", "--out", str(tmp_path / "b.bin")]) == 0
    sizes = np.fromfile(tmp_path / "b.bin", [("time", "<u4"), ("object", "<u8"), ("size", "<u4"), ("next", "<i8")])
    assert set(zip((sizes["object"] // 7).tolist(), sizes["size"].tolist(), strict=True)) == {(0, 1000), (1, 1001), (2, 1002)}


# ----------------------------------------------------------------------------------------- recordings beside the checkout


def test_a_route_trace_and_its_model_in_an_experiment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = shared_file("traces", "bigmoe-on-edge", "qwen.route.csv"), tmp_path / "qwen.safetensors"
    assert main(["trace", "import", str(source), "--out", str(out), "--model", "qwen3-30b-a3b"]) == 0
    printed = capsys.readouterr().err
    assert "27 tokens at the start of requests left out: layers [47] are not recorded for them" in printed
    found, recorded = Trace.read(out), read_route_trace(source)
    assert (found.requests.n_prompt.tolist(), found.requests.n_decode.tolist(), found.prompt_offset.tolist()) == (
        [1],
        [128],
        [27],
    )
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
