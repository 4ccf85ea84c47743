"""A recording with one layer in memory at a time holds what the recorder with the whole model holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from moesim.errors import InputError
from moesim.recorder import streaming
from moesim.recorder.checkpoint import LayeredModel
from moesim.trace import Trace, shards
from tests.recorder.record_kit import CONFIGS, PROMPTS, make_home, run, save_tiny
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]

#: One is longer than the sliding window of the tiny gpt-oss.
TEXTS = [*PROMPTS, " ".join(f"w{5 * n % 60}" for n in range(20))]
KEEP = ("--keep-inputs", "2", "--signal-requests", "4", "--scores", "--keep-embeddings")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = make_home(tmp_path_factory.mktemp("record"))
    (home / "texts.txt").write_text("\n".join(TEXTS))
    return home


def check_same(one: Trace, other: Trace) -> None:
    """All that was recorded is the same to the bit, whatever counts as generated."""
    for name in ("experts", "weights", "scores", "embeddings", "request"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert one.inputs is not None and other.inputs is not None
    np.testing.assert_array_equal(one.inputs.rows, other.inputs.rows)
    np.testing.assert_array_equal(one.inputs.values, other.inputs.values)
    assert sorted(one.signals) == sorted(other.signals) != []
    for name, signal in one.signals.items():
        for part in ("rows", "scores", "ids"):
            np.testing.assert_array_equal(getattr(signal, part), getattr(other.signals[name], part))


@pytest.mark.parametrize("name", CONFIGS)
def test_every_architecture(name: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 10)
    save_tiny(home / "model", name)
    of = {"model": "model", "prompts": "texts.txt"}
    whole = run(home, tmp_path / "whole.safetensors", "--max-new-tokens", "0", *KEEP, **of)
    streamed = run(home, tmp_path / "streamed.safetensors", "--stream-layers", "--max-new-tokens", "2", *KEEP, **of)
    check_same(streamed, whole)
    lengths = [1 + len(text.split()) for text in TEXTS]
    assert streamed.requests.n_decode.tolist() == [min(2, n - 1) for n in lengths]
    assert streamed.requests.n_prompt.tolist() == [n - min(2, n - 1) for n in lengths]
    assert streamed.header["label"] == "measured"
    assert streamed.header["sampling"].startswith("none: the texts are given; the last 2 tokens")
    assert streamed.header["routers_sha256"] == whole.header["routers_sha256"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["streamed.safetensors", "whole.safetensors"]


class Stopped(Exception):
    """What stops a recording in a test."""


def test_a_stopped_recording_goes_on_at_its_layer(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is stopped after every file that it writes, and no text goes through a layer twice."""
    monkeypatch.setattr(streaming, "CHUNK_ROWS", 10)
    of: dict[str, Any] = {"model": "qwen3", "prompts": "texts.txt"}
    run(home, tmp_path / "whole.safetensors", "--stream-layers", *KEEP, **of)
    out, steps, write = tmp_path / "stopped.safetensors", [0], shards.write_tables
    real = LayeredModel.run_layer

    def counted(self: LayeredModel, *arguments: Any) -> Any:
        steps[0] += 1
        return real(self, *arguments)

    def write_and_stop(path: Path, *arguments: Any) -> None:
        write(path, *arguments)
        if path.name.startswith("states"):
            raise Stopped

    monkeypatch.setattr(LayeredModel, "run_layer", counted)
    monkeypatch.setattr(shards, "write_tables", write_and_stop)
    n_stops = 0
    while not out.exists():
        try:
            run(home, out, "--stream-layers", *KEEP, **of)
        except Stopped:
            n_stops += 1
            assert shards.is_begun(shards.parts_folder(out))
    n_chunks = 4  # of 4 + 6, 2 + 5 and 3 + 21 tokens, and the fifth text alone, which has no signals
    assert (n_stops, steps[0]) == (n_chunks * (3 + 1), len(TEXTS) * 3)
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stopped.safetensors", "whole.safetensors"]


KILLED = """
import sys
from pathlib import Path
import torch
from moesim.trace import shards
from tests.recorder.record_kit import run

torch.set_num_threads(1)
write = shards.write_tables


def write_and_wait(path, *arguments):
    write(path, *arguments)
    if path.name.startswith("states.0002."):
        sys.stdin.read()  # until it is killed


shards.write_tables = write_and_wait
run(Path(sys.argv[1]), Path(sys.argv[2]), "--stream-layers", *sys.argv[3:], model="qwen3", prompts="texts.txt")
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_a_recording_that_is_killed_between_layers_goes_on(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed.safetensors"
    parts = shards.parts_folder(out)
    command = [sys.executable, "-c", KILLED, str(home), str(out), *KEEP]
    with subprocess.Popen(command, stdin=subprocess.PIPE, cwd=ROOT) as process:
        wait_until(lambda: any(parts.glob("states.0002.*.safetensors")) or process.poll() is not None, "two layers")
        process.kill()
    assert process.returncode == -9, "SIGKILL"
    assert len(list(parts.glob("states.0002.*"))) == 1, "one chunk is through two layers, the other through one"
    of: dict[str, Any] = {"model": "qwen3", "prompts": "texts.txt"}
    run(home, out, "--stream-layers", *KEEP, **of)
    run(home, tmp_path / "whole.safetensors", "--stream-layers", *KEEP, **of)
    assert out.read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed.safetensors", "whole.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--temperature", "1"), "--temperature: expected none with --stream-layers"),
        (("--seed", "1"), "--seed: expected none"),
        (("--ignore-eos",), "--ignore-eos: expected none"),
        (("--batch-size", "2"), "--batch-size: expected none"),
        (("--shadow", "int8"), "--shadow: expected none"),
        (("--device-map", "auto"), "--device-map: expected a device such as cuda"),
        (("--memory", "1MB"), "--memory: expected at least"),
        (("--memory", "much"), "--memory: expected"),
    ],
)
def test_what_does_not_go_together(home: Path, tmp_path: Path, arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(InputError, match=named) as error:
        run(home, tmp_path / "x.safetensors", "--stream-layers", *arguments)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_memory_needs_layers(home: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--memory: expected --stream-layers with it"):
        run(home, tmp_path / "x.safetensors", "--memory", "6GB")


def test_models_that_cannot_be_streamed(home: Path, tmp_path: Path) -> None:
    save_tiny(home / "dense", "mixtral")
    LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(home / "dense")
    with pytest.raises(InputError, match=r"--stream-layers: expected an architecture whose layers .* got 'llama'"):
        run(home, tmp_path / "x.safetensors", "--stream-layers", model="dense")


MEASURED = """
import json, resource, sys
from pathlib import Path
import torch
from transformers import AutoModelForCausalLM, MixtralConfig
from moesim.recorder import streaming
from moesim.recorder.loading import LoadOptions, quiet
from moesim.recorder.session import RecordOptions
from moesim.recorder.session import record_trace

torch.set_num_threads(1)
quiet()
home, folder = Path(sys.argv[1]), Path(sys.argv[2])
needed = streaming.Layerwise.memory_needed
said = []
streaming.Layerwise.memory_needed = lambda self: said.append((streaming._resident_bytes(), needed(self))) or said[-1][1]
load = LoadOptions(str(folder / "model"), stream_layers=True, memory="9GB")
record_trace(RecordOptions(load, home / "texts.txt", folder / "out.safetensors", progress=False))
print(json.dumps([*said[0], streaming._resident_bytes()]))
"""

MADE = """
import sys
from transformers import AutoModelForCausalLM, MixtralConfig
sizes = dict(hidden_size=512, intermediate_size=1792, num_hidden_layers=5, num_attention_heads=8, num_key_value_heads=2)
model = AutoModelForCausalLM.from_config(MixtralConfig(vocab_size=64, num_local_experts=8, num_experts_per_tok=2, **sizes))
model.save_pretrained(sys.argv[1])
print(sum(parameter.nbytes for parameter in model.parameters()))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform == "win32", reason="Windows does not tell the peak of memory this way")
def test_memory_stays_below_what_is_said_to_be_needed(home: Path, tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "mixtral")  # for its tokenizer
    made = subprocess.run([sys.executable, "-c", MADE, str(tmp_path / "model")], capture_output=True, text=True, check=True)
    command = [sys.executable, "-c", MEASURED, str(home), str(tmp_path)]
    before, needed, most = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert most < needed < before + int(made.stdout)


@pytest.mark.parametrize("name", ["deepseek_v3", "gpt_oss"])
def test_half_precision_and_a_calibration_made_before(name: str, home: Path, tmp_path: Path) -> None:
    """What transformers keeps in float32 stays so; the mean steps of a calibration give the signal residual."""
    save_tiny(home / "half", name)
    of: dict[str, Any] = {"model": "half", "prompts": "texts.txt"}
    how = ("--dtype", "bfloat16", "--max-new-tokens", "0", *KEEP)
    whole = run(home, tmp_path / "whole.safetensors", "--calibrate", str(home / "others.txt"), *how, **of)
    before = ("--calibration", str(tmp_path / "whole.safetensors"))
    streamed = run(home, tmp_path / "streamed.safetensors", "--stream-layers", *before, *how, **of)
    assert "residual" in streamed.signals
    check_same(streamed, whole)
