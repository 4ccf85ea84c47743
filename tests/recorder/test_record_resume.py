"""A recording that is stopped goes on where it was, and what was complete can be read before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="recorder tests need torch: install moesim[record]")
pytest.importorskip("transformers", reason="recorder tests need transformers: install moesim[record]")
pytest.importorskip("tokenizers", reason="recorder tests need tokenizers: install moesim[record]")

from moesim.core.files import checked_line
from moesim.errors import InputError, TraceError
from moesim.trace import Trace
from moesim.trace.shards import MANIFEST, finished_shards, join, read_shards
from tests.recorder.record_kit import make_home, run


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_home(tmp_path_factory.mktemp("record"))


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
