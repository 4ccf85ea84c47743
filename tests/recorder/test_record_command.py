"""``moesim trace record`` from prompts to a file: what is in it, and wrong input."""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from moesim.core.files import checked_line
from moesim.errors import InputError, MoesimError, TraceError
from moesim.recorder.recording import record_requests
from moesim.trace import Trace
from moesim.trace.shards import MANIFEST, finished_shards, join, read_shards
from tests.recorder.record_kit import EXPERTS, LAYERS, OTHERS, PROMPTS, run, save_tiny, tiny


def tokens_of(text: str) -> list[int]:
    return [0, *(3 + int(word[1:]) for word in text.split())]


@pytest.fixture(scope="module")
def calibrated(home: Path) -> Trace:
    return run(
        home, home / "calibrated.safetensors", "--calibrate", str(home / "others.txt"), "--batch-size", "2", "--keep-inputs", "2"
    )


def test_a_trace_holds_what_the_model_did(home: Path, calibrated: Trace) -> None:
    model = AutoModelForCausalLM.from_pretrained(home / "mixtral").eval()
    recordings = list(record_requests(model, [tokens_of(text) for text in PROMPTS], [6] * 5))
    ends = [r.tokens[r.n_prompt :].tolist().index(1) if 1 in r.tokens[r.n_prompt :] else 6 for r in recordings]
    assert calibrated.requests.n_prompt.tolist() == [len(tokens_of(text)) for text in PROMPTS]
    assert calibrated.requests.n_decode.tolist() == ends
    expected = np.concatenate([r.experts[: r.n_prompt + end] for r, end in zip(recordings, ends, strict=True)])
    np.testing.assert_array_equal(calibrated.experts, expected)
    assert calibrated.scores is not None  # no more than 16 experts
    assert (calibrated.n_layers, calibrated.n_experts, calibrated.top_k) == (LAYERS, EXPERTS, 2)
    assert sorted(calibrated.signals) == ["gate_next1", "gate_next2", "residual"]
    assert all(calibrated.has_signal(name, r) for name in calibrated.signals for r in range(5))
    assert calibrated.inputs is not None
    assert set(calibrated.request[calibrated.inputs.rows]) == {0, 1}


def test_a_header_says_where_it_comes_from(home: Path, calibrated: Trace) -> None:
    header = calibrated.header
    assert header["model"] == "mixtral"
    assert header["prompts"] == {"file": "prompts.txt", "sha256": hashlib.sha256((home / "prompts.txt").read_bytes()).hexdigest()}
    assert (header["dtype"], header["revision"], header["seed"], header["sampling"]) == ("float32", "local", 0, "greedy")
    assert header["quantisation"] is None
    assert header["torch"] == torch.__version__
    assert header["score_function"] == "softmax"
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in PROMPTS]
    assert [request["text_sha256"] for request in header["trace_requests"]] == hashes
    assert len(header["calibration_requests"]) == len(OTHERS)
    assert not set(hashes) & {request["text_sha256"] for request in header["calibration_requests"]}
    n_rows = sum(request["n_prompt"] + request["n_decode"] for request in header["calibration_requests"])
    assert calibrated.tables["coactivation"][0].sum() == n_rows * 2 * 2
    np.testing.assert_allclose(calibrated.tables["activation_frequency"].sum(axis=1), 1, rtol=1e-6)


def test_a_calibration_made_before_gives_the_same_trace(home: Path, calibrated: Trace, tmp_path: Path) -> None:
    before = str(home / "calibrated.safetensors")
    again = run(home, tmp_path / "again.safetensors", "--calibration", before, "--batch-size", "2")
    np.testing.assert_array_equal(again.signals["residual"].scores, calibrated.signals["residual"].scores)
    np.testing.assert_array_equal(again.tables["residual"], calibrated.tables["residual"])
    assert again.header["calibration_requests"] == calibrated.header["calibration_requests"]


def test_embeddings_are_kept_when_asked_for(home: Path, calibrated: Trace, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(home / "mixtral").eval()
    kept = run(home, tmp_path / "kept.safetensors", "--keep-embeddings", "--batch-size", "2")
    tokens = np.concatenate([r.tokens for r in record_requests(model, [tokens_of(text) for text in PROMPTS], [6] * 5)])
    tokens = tokens[np.concatenate([np.arange(n) < m for n, m in _lengths(kept)])]
    table = model.get_input_embeddings().weight.detach().numpy().astype(np.float16)
    np.testing.assert_array_equal(np.asarray(kept.embeddings), table[tokens])
    assert calibrated.embeddings is None and "--keep-embeddings" not in str(calibrated.header)


def _lengths(trace: Trace) -> list[tuple[int, int]]:
    """Rows of each request if it did not end early, and those it has."""
    table = trace.requests
    return [(p + 6, p + n) for p, n in zip(table.n_prompt.tolist(), table.n_decode.tolist(), strict=True)]


def test_json_lines_chats_and_options(home: Path, tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"text": "w1 w2"},
        {"messages": [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]},
        {"text": "w3 w4 w5 w6 w7 w8"},
        {"text": "w9"},
    ]
    (home / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    plain = ("--field", "text", "--limit", "3", "--max-prompt-tokens", "5", "--no-scores", "--lookahead", "1")
    trace = run(home, tmp_path / "plain.safetensors", *plain, "--signal-requests", "1", prompts="lines.jsonl")
    assert trace.requests.n_prompt.tolist() == [3, 5, 5]  # the template makes 'user w5 assistant w6 w9' of the chat
    assert trace.scores is None
    assert sorted(trace.signals) == ["gate_next1"]
    assert [trace.has_signal("gate_next1", r) for r in range(3)] == [True, False, False]
    trace = run(home, tmp_path / "chat.safetensors", *plain, "--chat-template", "--ignore-eos", prompts="lines.jsonl")
    assert trace.requests.n_prompt.tolist() == [4, 5, 5]  # 'user w1 w2 w9', without another <s>
    assert trace.requests.n_decode.tolist() == [6, 6, 6]
    trace = run(home, tmp_path / "whole.safetensors", "--whole-file")
    assert trace.requests.n_prompt.tolist() == [1 + sum(len(text.split()) for text in PROMPTS)]


def test_sampling_is_seeded(home: Path, tmp_path: Path) -> None:
    hot = ("--temperature", "1.5", "--ignore-eos", "--max-new-tokens", "8")
    one, two = (run(home, tmp_path / f"{n}.safetensors", *hot, "--seed", "3") for n in range(2))
    assert (tmp_path / "0.safetensors").read_bytes() == (tmp_path / "1.safetensors").read_bytes()
    batched = run(home, tmp_path / "batched.safetensors", *hot, "--seed", "3", "--batch-size", "3")
    np.testing.assert_array_equal(batched.experts, one.experts)
    other = run(home, tmp_path / "other.safetensors", *hot, "--seed", "4")
    assert not np.array_equal(other.experts, two.experts)
    assert one.header["sampling"] == "temperature 1.5, seeded per request"


def test_experts_beyond_sixteen_are_stored_as_the_best_ids(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moesim.recorder.signals.DENSE_EXPERTS", 4)
    monkeypatch.setattr("moesim.recorder.session.DENSE_EXPERTS", 4)
    trace = run(home, tmp_path / "few.safetensors", model="qwen3")
    assert trace.scores is None
    ids = trace.signals["gate_next1"].ids
    assert ids is not None
    assert ids.shape == (trace.n_rows, LAYERS - 1, 6)


def test_a_shadow_is_a_signal(home: Path, tmp_path: Path) -> None:
    trace = run(home, tmp_path / "s.safetensors", "--shadow", "int8", "--shadow", "nf4:T0:KV0", "--signal-requests", "2")
    assert {"shadow-int8:T1:KV1", "shadow-nf4:T0:KV0"} <= set(trace.signals)
    covered = trace.signals["shadow-int8:T1:KV1"].rows
    decoded = np.flatnonzero((trace.phase == 1) & (trace.request < 2))
    np.testing.assert_array_equal(covered, decoded)
    assert trace.header["batching"].startswith("1 at a time, padded")
    trace = run(home, tmp_path / "b.safetensors", "--shadow", "int8", "--signal-requests", "1", "--batch-size", "4")
    assert trace.header["batching"].startswith("4 at a time, requests with a shadow one at a time, padded")


def test_nothing_is_replaced_unasked(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "there.safetensors"
    out.write_text("precious")
    with pytest.raises(InputError, match="add --overwrite"):
        run(home, out)
    with pytest.raises(InputError, match="a file that it did not write"):
        run(home, out, "--overwrite")
    assert out.read_text() == "precious"
    out.unlink()
    run(home, out)
    with pytest.raises(InputError, match="add --overwrite"):
        run(home, out)
    assert run(home, out, "--overwrite").n_requests == 5


def file(name: str, text: str | bytes) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return ["--prompts", str(folder / name)]

    return write


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda f: ["--prompts", str(f / "none.txt")], "none.txt: expected a file of prompts, got nothing there"),
        (file("empty.txt", "\n \n"), "empty.txt: expected at least one prompt, got an empty file"),
        (file("latin.txt", b"w1 caf\xe9"), "latin.txt: expected UTF-8 text, got byte 0xe9"),
        (
            file("a.jsonl", '{"prompt": "w1"}\n{"text": "w2"}'),
            "a.jsonl:2: expected the field 'prompt' or 'messages', got ['text']",
        ),
        (file("b.jsonl", '{"prompt": "w1"\n'), "b.jsonl:1: expected a JSON object, got: "),
        (file("c.jsonl", "[1]"), "c.jsonl:1: expected a JSON object, got list"),
        (file("d.jsonl", '{"prompt": ""}'), "d.jsonl:1: prompt: expected a text that is not empty, got ''"),
        (file("e.jsonl", '{"messages": [{"role": "user"}]}'), "e.jsonl:1: messages: expected a list of objects"),
        (lambda f: [*file("f.jsonl", "{}")(f), "--whole-file"], "f.jsonl: expected a text file with --whole-file"),
        (file("long.txt", "w1 " * 123), "long.txt:1: expected at most 128 tokens, the model's positions, got 124 and 6"),
        (lambda f: ["--top-p", "0.9"], "--top-p: expected a --temperature above 0 with it"),
        (lambda f: ["--top-p", "0", "--temperature", "1"], "--top-p: expected a share above 0"),
        (lambda f: ["--temperature", "-1"], "--temperature: expected 0 (greedy) or more, got -1.0"),
        (lambda f: ["--keep-inputs", "some"], "--keep-inputs: expected a number of requests or 'all', got 'some'"),
        (lambda f: ["--dtype", "int4"], "--dtype: expected one of auto, float32, float16, bfloat16, got 'int4'"),
        (lambda f: ["--gpu-memory", "22GiB"], "--gpu-memory: expected --device-map auto with it, got none"),
        (lambda f: ["--device-map", "auto", "--cpu-memory", "lots"], "--cpu-memory: expected a size such as 22GiB, got 'lots'"),
        (lambda f: ["--load-in-4bit", "--load-in-8bit"], "expected one of them, got both"),
        (lambda f: ["--calibrate", str(f / "none.txt")], "none.txt: expected a file of prompts"),
        (lambda f: ["--calibrate", "a", "--calibration", "b"], "--calibrate and --calibration: expected one of them, got both"),
        (lambda f: ["--calibration", str(f / "none.safetensors")], "none.safetensors: expected a trace file, got nothing there"),
        (lambda f: ["--shadow", "int3"], "--shadow: expected one of fp16, int8, nf4, with or without :T1:KV1, got 'int3'"),
        (lambda f: ["--shadow", "int8", "--shadow", "int8:T1:KV1"], "--shadow: expected each once"),
        (lambda f: ["--out", str(f / "trace.bin")], "trace.bin: expected a name that ends in .safetensors"),
    ],
)
def test_wrong_input_is_one_line(home: Path, tmp_path: Path, arguments: Callable[[Path], list[str]], message: str) -> None:
    given = arguments(tmp_path)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError) as error:
        run(home, tmp_path / "out.safetensors", *given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.iterdir()) == before  # nothing was written


def test_calibration_with_prompts_of_the_trace_is_refused(home: Path, tmp_path: Path) -> None:
    (tmp_path / "same.txt").write_text(f"{OTHERS[0]}\n{PROMPTS[3]}\n")
    with pytest.raises(InputError, match=r"prompts.txt:5: expected a prompt that is not among .* got the one of .*same.txt:2"):
        run(home, tmp_path / "o.safetensors", "--calibrate", str(tmp_path / "same.txt"))
    # Cut to their first tokens they are the same, though the texts differ.
    (tmp_path / "longer.txt").write_text(f"{PROMPTS[0]} w60\n")
    run(home, tmp_path / "apart.safetensors", "--calibrate", str(tmp_path / "longer.txt"))
    cut = ("--max-prompt-tokens", "4", "--calibrate", str(tmp_path / "longer.txt"))
    with pytest.raises(InputError, match=r"prompts.txt:1: expected a prompt that is not among"):
        run(home, tmp_path / "o.safetensors", *cut)


def test_calibration_made_before_is_checked(home: Path, calibrated: Trace, tmp_path: Path) -> None:
    before = ("--calibration", str(home / "calibrated.safetensors"))
    with pytest.raises(InputError, match=r"expected calibration of this model's routers \(.*\), got that of 'mixtral'"):
        run(home, tmp_path / "o.safetensors", *before, model="qwen3")
    with pytest.raises(InputError, match=r"others.txt:1: expected a prompt that is not among .*calibration request 0"):
        run(home, tmp_path / "o.safetensors", *before, prompts="others.txt")
    bare = run(home, tmp_path / "bare.safetensors")
    with pytest.raises(InputError, match="expected calibration tables"):
        run(home, tmp_path / "o.safetensors", "--calibration", str(tmp_path / "bare.safetensors"))
    assert not bare.tables


def test_wrong_models_are_one_line(home: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nowhere: expected a folder with a model, got nothing there"):
        run(home, tmp_path / "o.safetensors", model="nowhere")
    for name, got in (("nopemodel", "nothing there"), ("prompts.txt", "a file")):
        with (
            contextlib.chdir(home),
            pytest.raises(InputError, match=f"^{name}: expected a folder or a hub name like organisation/name, got {got}"),
        ):
            run(Path(), tmp_path / "o.safetensors", model=name)
    (home / "bare").mkdir(exist_ok=True)
    tiny("mixtral").save_pretrained(home / "bare")
    with pytest.raises(InputError, match="bare: expected a tokenizer of transformers, got"):
        run(home, tmp_path / "o.safetensors", model="bare")
    with pytest.raises(InputError, match=r"prompts.txt:1: expected a tokenizer with a chat template, got one without"):
        run(home, tmp_path / "o.safetensors", "--chat-template", model="qwen3")
    weights = home / "mixtral" / "model.safetensors"
    save_tiny(home / "cut", "mixtral")
    (home / "cut" / "model.safetensors").write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(MoesimError, match="cut: expected a causal language model of transformers, got"):
        run(home, tmp_path / "o.safetensors", model="cut")
    assert not list(tmp_path.iterdir())


def test_a_dense_model_is_refused(home: Path, tmp_path: Path) -> None:
    save_tiny(home / "dense", "mixtral")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    LlamaForCausalLM(config).save_pretrained(home / "dense")
    with pytest.raises(
        InputError, match=r"model of type 'llama': expected a router next to a module 'experts'.*layer 0 has \[.*mlp"
    ):
        run(home, tmp_path / "o.safetensors", model="dense")
    assert not list(tmp_path.iterdir())


def test_a_memory_budget_changes_nothing(home: Path, tmp_path: Path, calibrated: Trace) -> None:
    pytest.importorskip("accelerate")
    trace = run(home, tmp_path / "spread.safetensors", "--device-map", "auto", "--cpu-memory", "2 GiB")
    np.testing.assert_array_equal(trace.experts, calibrated.experts)
    with pytest.raises(InputError, match="mixtral: expected a causal language model of transformers, got: "):
        run(home, tmp_path / "o.safetensors", "--device-map", "auto", "--cpu-memory", "0.01MiB")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
@pytest.mark.parametrize("option", ["--load-in-4bit", "--load-in-8bit"])
def test_quantised_loading_needs_cuda(home: Path, tmp_path: Path, option: str) -> None:
    with pytest.raises(InputError, match=f"{option}: expected a CUDA device, got none"):
        run(home, tmp_path / "o.safetensors", option)
    with pytest.raises(InputError, match="--gpu-memory: expected a CUDA device, got none"):
        run(home, tmp_path / "o.safetensors", "--device-map", "auto", "--gpu-memory", "22 GiB")


def test_a_quantised_checkpoint_is_warned_of(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    facts = {"method": "fp8", "by": "checkpoint", "may_change_routing": True}
    monkeypatch.setattr("moesim.recorder.loading.quantisation", lambda model, bits: facts)
    trace = run(home, tmp_path / "q.safetensors")
    assert trace.header["quantisation"] == facts
    assert "warning: the checkpoint is quantised (fp8): routing may differ" in capsys.readouterr().err


KILLED_AGAIN_AND_AGAIN = """
import dataclasses, os, signal, sys
from pathlib import Path
import torch
from moesim.recorder import RecordError
from moesim.recorder.loading import LoadOptions, quiet
from moesim.recorder.session import RecordOptions
from moesim.recorder.session import record_trace
from moesim.errors import TraceError
from moesim.trace.shards import MANIFEST, parts_folder, read_shards

torch.set_num_threads(1)
quiet()
home, out = Path(sys.argv[1]), Path(sys.argv[2])
options = RecordOptions(
    LoadOptions(str(home / "mixtral")), home / "prompts.txt", out, calibrate=home / "others.txt", batch_size=2,
    input_requests=3, temperature=1.0, max_new_tokens=6, progress=False,
)
record_trace(dataclasses.replace(options, out=out.with_name("whole.safetensors")))
replace = os.replace


def record_and_die(files, before):
    left = [files]

    def replace_and_die(*arguments):
        left[0] -= 1
        if left[0] < 0 and before:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*arguments)
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = replace_and_die
    record_trace(options)
    os._exit(0)


for attempt in range(30):
    child = os.fork()
    if child == 0:
        # Each attempt finishes one file and dies: just after, or before the next is there; at the end, ever later.
        record_and_die(attempt % 2 + max(0, attempt - 8), before=bool(attempt % 2))
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
    if out.exists() and not (parts_folder(out) / MANIFEST).exists():
        break
    if parts_folder(out).exists():
        try:
            trace = read_shards(parts_folder(out))
            print(trace.n_requests, trace.header.get("incomplete", {}).get("planned"), sorted(trace.signals))
        except TraceError as error:
            print("none" if "finished batch" in str(error) else error)
print("done after", attempt)
try:
    record_trace(options)
except RecordError as error:
    print(error)
"""


@pytest.mark.long
def test_a_killed_recording_goes_on_and_gives_the_same_bytes(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed.safetensors"
    command = [sys.executable, "-c", KILLED_AGAIN_AND_AGAIN, str(home), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *seen, last, refused = done.stdout.splitlines()
    assert int(last.split()[-1]) > 8
    assert "expected nothing there, got a file" in refused
    # Calibration first, then more and more requests, never a damaged one.
    counts = [0 if line == "none" else int(line.split()[0]) for line in seen]
    assert counts == sorted(counts)
    assert set(counts) == {0, 2, 3, 5}
    assert f"2 5 {['gate_next1', 'gate_next2', 'residual']}" in seen
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.safetensors", "whole.safetensors"]


class Stopped(Exception):
    """What stops a recording in a test."""


@pytest.fixture
def begun(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording that was stopped before its last request."""
    out = tmp_path / "begun.safetensors"
    real = Trace.write

    def write(trace: Trace, path: Path) -> Path:
        if path.name.startswith("00000004"):
            raise Stopped
        return real(trace, path)

    with monkeypatch.context() as patch:
        patch.setattr(Trace, "write", write)
        with pytest.raises(Stopped):
            run(home, out)
    assert len(finished_shards(out.with_name("begun.safetensors.parts"))) == 4
    return out


def test_shards_count_up_to_the_first_gap(tmp_path: Path) -> None:
    for first, stop in ((0, 2), (2, 3), (4, 5)):
        (tmp_path / f"{first:08}-{stop:08}.safetensors").touch()
    assert [(shard.first, shard.stop) for shard in finished_shards(tmp_path)] == [(0, 2), (2, 3)]


def test_what_was_complete_can_be_read(begun: Path, home: Path, tmp_path: Path) -> None:
    folder = Path(f"{begun}.parts")
    part = read_shards(folder)
    assert part.header["incomplete"] == {"planned": 5, "recorded": 4}
    with pytest.raises(TraceError, match=r"expected 5 recorded requests, got 4; go on recording"):
        join(folder, begun)
    whole = run(home, begun)
    assert "incomplete" not in whole.header
    np.testing.assert_array_equal(whole.experts[: part.n_rows], part.experts)
    run(home, tmp_path / "at_once.safetensors")
    assert begun.read_bytes() == (tmp_path / "at_once.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--seed", "1"), "--seed as the recording was begun with (0), got 1"),
        (("--batch-size", "2"), "--batch-size as"),
        (("--max-new-tokens", "7"), "--max-new-tokens as"),
        (("--limit", "4"), "prompts' tokens as"),
        (("--keep-inputs", "all"), "--keep-inputs as the recording was begun with (0), got None"),
        (("--keep-embeddings",), "--keep-embeddings as the recording was begun with (None), got True"),
        (("--dtype", "bfloat16"), "model's dtype as the recording was begun with (float32), got bfloat16"),
    ],
)
def test_other_options_do_not_go_on(begun: Path, home: Path, arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(InputError) as error:
        run(home, begun, *arguments)
    assert named in str(error.value)
    assert Path(f"{begun}.parts").is_dir()
    assert not begun.exists()


def test_another_model_does_not_go_on(begun: Path, home: Path) -> None:
    with pytest.raises(InputError, match="expected model as the recording was begun with"):
        run(home, begun, model="qwen3")


def test_damaged_parts_are_told(begun: Path) -> None:
    folder = Path(f"{begun}.parts")
    shard = finished_shards(folder)[1].path
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(TraceError, match=f"{shard.name}.*truncated"):
        read_shards(folder)
    (folder / MANIFEST).write_bytes(checked_line({"options": {}, "header": {}}))
    with pytest.raises(TraceError, match=r"expected .*options.*got no n_requests; delete"):
        read_shards(folder)


def test_a_changed_bit_of_what_a_recording_was_begun_with_is_told(begun: Path) -> None:
    """Its header goes into the trace."""
    folder = Path(f"{begun}.parts")
    whole = (folder / MANIFEST).read_bytes()
    for at in range(0, 8 * len(whole), 37):
        (folder / MANIFEST).write_bytes(whole[: at // 8] + bytes([whole[at // 8] ^ (1 << at % 8)]) + whole[at // 8 + 1 :])
        with pytest.raises(TraceError, match=r"manifest\.json: expected the manifest of a recording, got a damaged one"):
            read_shards(folder)
