"""Inputs that claim more than they hold, or would make more than a machine has: one line and exit code 2 before any work."""

from __future__ import annotations

import json
import os
import shlex
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import yaml

from moesim.cli.main import main
from moesim.core import gate
from moesim.core.units import format_memory
from tests.cli.output_kit import everything
from tests.experiment.experiment_kit import small, write_trace

HEAD = "model,setting,value,unit,batch,spread\n"
RUN = ("run", "small.yaml", "--out", "out", "--jobs", "1")
GGUF = ("recommend", "--hardware", "rtx3090-epyc7532", "--model", "x.gguf", "--out", "out")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, n: int, inside: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, n) + inside


def tensor(name: str, *shape: int, offset: int = 0, n_axes: int | None = None) -> bytes:
    axes = struct.pack("<I", len(shape) if n_axes is None else n_axes) + struct.pack(f"<{len(shape)}Q", *shape)
    return text(name) + axes + struct.pack("<IQ", 1, offset)


def gguf(*fields: bytes, tensors: tuple[bytes, ...] = (), n_fields: int | None = None, n_tensors: int | None = None) -> bytes:
    counts = (len(tensors) if n_tensors is None else n_tensors, len(fields) if n_fields is None else n_fields)
    return b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join((*fields, *tensors)) + bytes(1000)


CLAIMS = {
    "a list": (gguf(field("a.list", 9, array(4, 2**33))), "entries of a.list, got 8589934592"),
    "a list of texts": (gguf(field("a.list", 9, array(8, 2**33))), "entries of a.list, got 8589934592"),
    "a list in a list": (gguf(field("a.list", 9, array(9, 1, array(0, 2**40)))), "entries of a.list, got 1099511627776"),
    "lists in lists": (gguf(field("a.list", 9, array(9, 1) * 30)), "at most 4 lists inside each other in a.list"),
    "a text": (gguf(field("a.text", 8, struct.pack("<Q", 2**62))), "bytes of a.text, got 4611686018427387904"),
    "a name": (gguf(struct.pack("<Q", 2**40)), "bytes of a name in the metadata, got 1099511627776"),
    "fields": (gguf(n_fields=2**40), "fields of metadata, got 1099511627776"),
    "a type": (gguf(field("a.key", 77, b"")), "expected a type of value from 0 to 12 of a.key, got 77"),
    "tensors": (gguf(n_tensors=2**40), "tensors, got 1099511627776"),
    "axes": (gguf(tensors=(tensor("t", n_axes=2**31),)), "axes of t, got 2147483648"),
    "weights": (gguf(tensors=(tensor("t", 2**40, 2**40),)), "weights of t, got 1208925819614629174706176"),
    "weights that overflow to none": (gguf(tensors=(tensor("t", 2**32, 2**32),)), "weights of t, got 18446744073709551616"),
    "an offset": (gguf(tensors=(tensor("t", 2, offset=2**60),)), "bytes to the data of t, got 1152921504606846976"),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good experiment, in which a command may write into `out` and `new.*`."""
    monkeypatch.chdir(tmp_path)
    write_trace(tmp_path / "small.safetensors", n_layers=4)
    model = {"base": "mixtral-8x7b", "expert_bits": 4, "n_layers": 4}
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(small(tmp_path, model=model)))
    return tmp_path


def refused(arguments: tuple[str, ...] | list[str], words: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run a command that is refused in one line with these words, and writes nothing."""
    before = everything(here)
    code = main(list(arguments))
    said = capsys.readouterr()
    assert code == 2, said.err
    assert words in said.err
    assert said.err.startswith("moesim: ") and said.err.count("\n") == 1
    assert not said.out
    assert everything(here) == before


@pytest.mark.parametrize("name", CLAIMS)
def test_counts_that_a_gguf_file_claims(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    content, words = CLAIMS[name]
    (here / "x.gguf").write_bytes(content)
    refused(GGUF, words, here, capsys)


def test_counts_that_a_gguf_file_holds(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """What is there in full is limited, too: each tensor becomes an object."""
    monkeypatch.setattr("moesim.model.gguf_header.TENSORS", 4)
    five = gguf(tensors=tuple(tensor(f"t{i}", 1) for i in range(5)))
    (here / "x.gguf").write_bytes(five)
    refused(GGUF, "expected at most 4 ", here, capsys)


LARGE: dict[str, tuple[str, gate.Form, tuple[str, ...]]] = {
    "experiment": ("big.yaml", gate.YAML, ("run", "big.yaml", "--out", "out")),
    "included": ("big.yaml", gate.YAML, ("run", "including.yaml", "--out", "out")),
    "league": ("big.yaml", gate.YAML, ("league", "big.yaml", "--out", "out")),
    "hardware": ("big.yaml", gate.YAML, (*RUN, "--set", "hardware=big.yaml")),
    "profile": ("big.yaml", gate.YAML, ("profile", "show", "big.yaml")),
    "model": ("big.yaml", gate.YAML, (*RUN, "--set", "model=./big.yaml")),
    "parameter set": ("big.yaml", gate.YAML, ("trace", "synthesize", "--parameters", "./big.yaml", "--requests", "1", "--prompt",
                      "1", "--decode", "1", "--out", "new.safetensors")),
    "targets": ("big.yaml", gate.YAML, ("trace", "fit", "--targets", "./big.yaml", "--out", "new.yaml")),
    "config.json": ("config.json", gate.JSON, (*RUN, "--set", "model=./config.json")),
    "observations": ("obs.csv", gate.TABLE, ("calibrate", "obs.csv", "--hardware", "rtx3090-epyc7532", "--out", "out")),
    "runs": ("result/runs.parquet", gate.RESULT, ("plot", "decode_speed", "result", "--out", "out")),
    "summary": ("result/summary.json", gate.RESULT, ("diff", "result:0", "result:1")),
    "list of files": ("out/.moesim-manifest.jsonl", gate.RESULT, RUN),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_files_that_are_larger_than_their_form_may_be(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    file, form, arguments = LARGE[name]
    (here / "including.yaml").write_text("include: big.yaml")
    (here / file).parent.mkdir(exist_ok=True)
    with (here / file).open("wb") as large:
        large.truncate(form.most + 1)  # zeros that take no space
    names = sorted(str(path) for path in here.rglob("*"))
    code = main(list(arguments))
    said = capsys.readouterr().err
    assert code == 2
    assert f"more than the {format_memory(form.most)} that {form.name} may have" in said
    assert said.startswith("moesim: ") and said.count("\n") == 1
    assert sorted(str(path) for path in here.rglob("*")) == names


def test_a_small_file_takes_little_memory_whatever_its_form_may_have(tmp_path: Path):
    (tmp_path / "small").write_bytes(b"x" * 1000)
    tracemalloc.start()
    try:
        assert gate.read_bytes(tmp_path / "small", gate.RESULT) == b"x" * 1000
        assert tracemalloc.get_traced_memory()[1] < 2**23
    finally:
        tracemalloc.stop()


NUMBERS = {
    "base 60": ("name: 1" + ":1" * 100_000, "expected a number of at most 300 digits"),
    "hexadecimal": (f"decision_us: 0x{'f' * 290}", "expected a number of at most 300 digits"),
    "binary": (f"decision_us: 0b{'1' * 100_000}", "expected a number of at most 300 digits"),
    "decimal": (f"decision_us: {'9' * 301}", "expected a number of at most 300 digits"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_that_no_double_holds(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    line, words = NUMBERS[name]
    key = line.partition(":")[0]
    kept = [one for one in (here / "small.yaml").read_text().splitlines() if not one.startswith(f"{key}:")]
    (here / "large.yaml").write_text("\n".join([*kept, line]))
    refused(("run", "large.yaml", "--out", "out"), words, here, capsys)


OBSERVED = {
    "spread": ("qwen3-30b-a3b,all_cpu,20,tokens/s,1,1\nqwen3-30b-a3b,gpu_experts=28,50,ms/token,1,9007199254740992\n",
               "spread: expected at most the value, 50, got 9.0072e+15"),
    "spread beyond doubles": ("qwen3-30b-a3b,all_cpu,20,tokens/s,1,1e400\n", "spread: "),
    "value": ("qwen3-30b-a3b,all_cpu,1e300,tokens/s,1,1\n", "value: expected a speed or time from 1e-09 to 1e+12, got 1e+300"),
    "least value": ("qwen3-30b-a3b,all_cpu,5e-324,ms/token,1,0\n", "value: expected a speed or time from 1e-09 to 1e+12"),
    "batch": (f"qwen3-30b-a3b,all_cpu,20,tokens/s,{'9' * 400},1\n", "batch: "),
}  # fmt: skip


@pytest.mark.parametrize("name", OBSERVED)
def test_observed_numbers_that_overflow(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    rows, words = OBSERVED[name]
    (here / "obs.csv").write_text(HEAD + rows)
    refused(("calibrate", "obs.csv", "--hardware", "rtx3090-epyc7532", "--out", "out"), words, here, capsys)


def routing(path: Path) -> Path:
    np.savez(path, routed_experts=np.zeros((6, 16, 2), np.int16) + np.arange(2, dtype=np.int16), n_prompt=4)
    return path


MADE: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "import": lambda here: ("trace", "import", str(routing(here / "a.npz")), "--n-experts", "65536", "--calibrate", "0.5",
                            "--hold-back", "ends", "--out", "new.safetensors"),
    "calibrate": lambda here: ("trace", "calibrate", str(wide(here)), "--share", "0.5", "--out", "new.safetensors"),
    "stats": lambda here: ("trace", "stats", str(wide(here, 20_000)), "-q"),
    "fit": lambda here: ("trace", "fit", "--trace", str(wide(here)), "--seeds", "1", "--fresh", "1", "--out", "new.yaml"),
}  # fmt: skip


def wide(here: Path, n_experts: int = 65536) -> Path:
    """Import a trace of many experts."""
    out = here / "wide.safetensors"
    paths = [str(routing(here / f"{name}.npz")) for name in "ab"]
    assert main(["trace", "import", *paths, "--n-experts", str(n_experts), "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("name", MADE)
def test_arrays_that_would_be_made(name: str, here: Path, capsys: pytest.CaptureFixture[str]):
    arguments = MADE[name](here)
    capsys.readouterr()
    refused(arguments, "expected at most 2 GiB of ", here, capsys)


def test_arrays_that_are_packed(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    from moesim.trace import Trace

    Trace.read(here / "small.safetensors").write(here / "packed.safetensors", packed=True)
    monkeypatch.setattr(gate, "MADE", 100)
    refused(("trace", "stats", "packed.safetensors", "-q"), "expected at most 100 B of an array that is packed", here, capsys)


def test_answers_of_a_server(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("moesim.trace.formats.records.ANSWERS", gate.Form("a JSON document", 100))
    (here / "a.json").write_text(json.dumps({"meta_info": {"routed_experts": "A" * 200}}))
    arguments = ("trace", "import", "a.json", "--n-layers", "4", "--top-k", "2", "--n-experts", "8", "--out", "new.safetensors")
    refused(arguments, "got more than the 100 B that a JSON document may have", here, capsys)


_ALONE = (
    "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (%d, %d)); from moesim.cli.main import main; sys.exit(main())"
)


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of a process's memory is Linux's")
@pytest.mark.parametrize("name", ["a list", "calibration", "YAML"])
def test_memory_does_not_grow(name: str, here: Path):
    """In a process that may have 2 GiB, these are refused; without the gate they need 10 GiB and more, or minutes."""
    if name == "a list" and find_spec("gguf") is None:
        pytest.skip("needs gguf")
    (here / "x.gguf").write_bytes(CLAIMS["a list"][0])
    with (here / "big.yaml").open("wb") as large:
        large.truncate(2**35)
    arguments = {"a list": GGUF, "calibration": MADE["import"](here), "YAML": ("run", "big.yaml")}[name]
    done = subprocess.run(
        [sys.executable, "-c", _ALONE % (2**31, 2**31), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1


WHATIF = "whatif small.yaml --out out --jobs 1 --vary 'decision_us 2' --vary"
STUDIES: dict[str, tuple[str, str]] = {
    "run": ("run sweep.yaml --out out", "missing.safetensors"),
    "league of a missing trace": ("league sweep.yaml --out out --jobs 1", "missing.safetensors"),
    "league of another model's trace": ("league sweep.yaml --out out --jobs 1 --set trace=other.safetensors", "layers"),
    "regret": ("regret sweep.yaml --out out --jobs 1", "missing.safetensors"),
    "whatif of a missing trace": (f"{WHATIF} 'trace missing.safetensors'", "missing.safetensors"),
    "whatif of a missing machine": (f"{WHATIF} 'hardware missing.yaml'", "missing.yaml"),
    "recommend for a missing model": ("recommend --hardware rtx3090-epyc7532 --model missing.json --calibrate obs.csv --out out",
                                      "missing.json"),
    "recommend by a missing trace": ("recommend --hardware rtx3090-epyc7532 --model mixtral-8x7b --trace missing.safetensors "
                                     "--calibrate obs.csv --out out", "missing.safetensors"),
    "validate": ("validate sweep.yaml --only-compare --out out", "missing.safetensors"),
    "replay": ("replay sweep.yaml --out out", "missing.safetensors"),
    "compare": ("compare --policies lru --trace mini-mixtral,missing.safetensors --out out", "missing.safetensors"),
    "plot": ("plot decode_speed result missing --out out", "missing: "),
}  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_every_input_of_a_study_is_read_before_its_first_run(
    name: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    command, words = STUDIES[name]
    raw = yaml.safe_load((here / "small.yaml").read_text())
    (here / "sweep.yaml").write_text(yaml.safe_dump(raw | {"trace": ["small.safetensors", "missing.safetensors"]}))
    write_trace(here / "other.safetensors", n_layers=5)
    (here / "obs.csv").write_text(HEAD + "qwen3-30b-a3b,all_cpu,20,tokens/s,1,1\n")
    assert main([*RUN[:2], "--out", "result"]) == 0
    capsys.readouterr()

    def never(*_: object, **__: object) -> None:
        raise AssertionError("it runs")

    for place in ("experiment.run._here", "experiment.run._elsewhere", "studies.validation.run.run_one"):
        monkeypatch.setattr(f"moesim.{place}", never)
    monkeypatch.setattr("moesim.studies.advice.recommend.identify", never)
    refused(shlex.split(command), words, here, capsys)
