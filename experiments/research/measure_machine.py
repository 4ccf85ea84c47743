"""Measure a machine with a GPU in a few minutes: raw samples, a hardware profile, a validation pack.

``python -m experiments.research.measure_machine OUT`` runs steps one after the other, each in a process of its own with an end
of its own: a step that fails, hangs or finds no time is named in the report, and the others run. All files are written anew
after each step. Without a GPU, steps that need one are skipped.
"""
# ruff: noqa: E402 - packages are looked for before the first one is imported

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import io
import json
import math
import multiprocessing
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

PACKAGES: Final = "torch numpy pandas scipy yaml pydantic simpy typer rich matplotlib pyarrow jinja2 threadpoolctl safetensors"


def lacking(packages: str) -> str:
    """Name the packages that are not installed."""
    return ", ".join(name for name in packages.split() if importlib.util.find_spec(name) is None)


if __name__ == "__main__" and lacking(PACKAGES):
    print(f"measure_machine: expected Python packages, got none of: {lacking(PACKAGES)}; install them", file=sys.stderr)
    sys.exit(2)

from moesim import __version__
from moesim.core.files import Journal, OutputFolder, write_bytes
from moesim.errors import ConfigError, MoesimError, describe_exception
from moesim.live.kernels.host import describe, usable_cores
from moesim.live.kernels.plans import ExpertShape
from moesim.live.profiler import probes
from moesim.live.profiler.plan import Block, Plan, transfers
from moesim.live.profiler.probes import Layout, Probe, Wanted, layout_of, ring_length, sized_shapes, subject_of
from moesim.live.profiler.samples import COMMAND, PART, Store, sample
from moesim.model import bits_to_bytes, load_model

NAME: Final = "machine"  # of the profile
FILE_BYTES: Final = 16 * 2**20  # no file is larger
MOST_MINUTES: Final = 60
FORMATS: Final = {32: "fp32", 16: "bf16", 8: "int8", 4: "int4"}
POLICIES: Final = ("on-demand", "lru", "fiddler", "hybrimoe-paper", "dali")
COLUMNS: Final = "step,kind,device,subject,variant,format,threads,rows,bytes,calls,repetition,ns"


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    models: tuple[dict[str, Any], ...]  # real shapes with few layers
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    bits: tuple[float, ...] = (16, 8, 4)
    copies: int = 2**30  # bytes of the largest
    paired: tuple[int, ...] = (2**20, 2**24, 2**27)  # bytes of copies while something else is executed
    sizes: int = 3  # how many of `sized_shapes`
    kernels: tuple[int, ...] = (1, 10, 100, 500)  # launched at once: a stream's queue has room for 1,024
    repeats: int = 10
    memory: int | None = None  # bytes of the host for profile and replays; None: half of what is free
    tokens: int = 16
    runtime: bool = True  # whether the profile has the runtime and experts of other sizes


_BASES = ("qwen3-30b-a3b", "deepseek-v2-lite", "mixtral-8x7b")
_TINY = {"n_layers": 2, "n_experts": 8, "hidden": 512, "expert_intermediate": 1024, "vocab": 256}
FULL: Final = Scale(tuple({"base": base, "n_layers": n} for base, n in zip(_BASES, (4, 4, 2), strict=True)))
SMALL: Final = Scale(
    tuple(_TINY | {"base": base} for base in _BASES), (1, 4), (16, 8), 2**22, (2**20,), 1, (1, 10), 5, 10**9, 4, False
)


@dataclass(frozen=True)
class Setting:
    """Everything that a step must know."""

    scale: Scale
    work: Path  # where steps write
    place: str = "cpu"  # or "cuda:0"

    @property
    def gpu(self) -> int | None:
        return int(self.place.partition(":")[2]) if self.place.startswith("cuda") else None

    @property
    def layout(self) -> Layout:
        return layout_of(usable_cores(), gpu=self.gpu)

    def shapes(self, *, models: bool = True) -> list[ExpertShape]:
        """Return the experts of models, and of the sizes of processors' experts, each at all precisions."""
        own = [load_model(model | {"expert_bits": bits}) for model in self.scale.models for bits in self.scale.bits if models]
        others = zip(*(sized_shapes(bits)[: self.scale.sizes] for bits in self.scale.bits), strict=True)
        return [*map(ExpertShape.of, own), *chain.from_iterable(others)]

    def begin(self, step: str) -> tuple[Plan, Store]:
        """Return a plan without probes, and the file of a step's readings."""
        layout, wanted = self.layout, (Wanted(load_model(self.scale.models[0]), tuple(self.shapes())),)
        plan = Plan(layout, wanted, "quick", 0, self.scale.repeats, (), (), 0, probes.turning_bytes(layout), ())
        return plan, Store(self.work / step, plan, {}, resume=False)


Notes = list[str]  # what a step left out, and why
Call = Callable[[], object]


def copies(setting: Setting, until: float) -> Notes:
    """Time copies of each kind and size while nothing else is executed."""
    tier, sizes = setting.layout.tiers[0], probes.byte_sizes(setting.scale.copies, 4)
    kinds = [(link.name, kind) for link in tier.links for kind in transfers(tier)]
    each = [tuple(Probe("copy", link, variant=kind, size=n, unit="bytes") for n in sizes) for link, kind in kinds]
    return _measure(setting, "copies", until, list(map(Block, map(" ".join, kinds), each)))


def contention(setting: Setting, until: float) -> Notes:
    """Time pairs of activities, each alone and both together; copies of several kinds and sizes."""
    tier, blocks = setting.layout.tiers[0], []
    pairs = [(*pair, kind) for pair in tier.pairs if "->" in "".join(pair) for kind in transfers(tier) if kind != "chunked"]
    for a, b, kind in pairs:
        sizes = setting.scale.paired
        each = tuple(Probe("pair", a, b, variant=kind, size=n, unit="bytes") for n in sizes)
        blocks.append(Block(f"{a} with {b} {kind}", each))
    return _measure(setting, "contention", until, blocks)


def experts(role: str, setting: Setting, until: float) -> Notes:
    """Time experts by size, format and rows as replays run them; on a host by threads, too."""
    device, host = next(one for one in setting.layout.tiers[0].devices if one.role == role), role == "host"
    threads = sorted({1, max(1, len(device.cores) // 2), len(device.cores)}, reverse=True) if host else [device.threads]
    blocks = []
    for shape in setting.shapes(models=not host):
        which = [(n, rows) for n in threads for rows in setting.scale.rows]
        each = (Probe("expert", device.name, subject_of(shape), shape.bits, n, size=rows, unit="rows") for n, rows in which)
        blocks.append(Block(_words(shape), tuple(each)))
    return _measure(setting, f"{role} experts", until, blocks)


def _words(shape: ExpertShape) -> str:
    return f"{subject_of(shape)} {FORMATS[int(shape.bits)]}"


def _measure(setting: Setting, step: str, until: float, blocks: Sequence[Block]) -> Notes:
    """Measure blocks of probes, each in its share of the time; one that fails is a note."""
    from moesim.live.profiler.bench import Machine, RealBench  # PyTorch: the processes of steps alone need it

    (plan, store), notes, n_measured, began = setting.begin(step), [], 0, time.monotonic()
    for number, block in enumerate(blocks, start=1):
        end = began + (until - began) * min(1.0, (number + 2) / len(blocks))  # the first calls load libraries
        bench = RealBench(plan, Machine())  # one a block: results that a failed one left under way reach no other
        try:
            sample(replace(plan, blocks=(block,)), bench, store, until=end)
        except (MoesimError, RuntimeError, MemoryError) as error:
            notes.append(f"{block.name}: {describe_exception(error)}")
        else:
            n_short = sum(not store.has(probe, plan.repeats - 1) for probe in block.probes)
            notes += [f"{block.name}: no time for all repeats of {n_short} of {len(block.probes)} probes"] if n_short else []
            n_measured += n_short < len(block.probes)
        finally:
            bench.close()
    if not n_measured:
        raise ConfigError(f"expected some measurement to end, got: {'; '.join(notes)}")
    return notes + [f"{probe}: {why}" for probe, why in store.skipped.items()]


class Stream:
    """A stream of a GPU on which calls are timed, launched one by one or as a graph."""

    def __init__(self, place: str) -> None:
        import torch

        self._cuda: Any = torch.cuda
        self._cuda.set_device(place)
        self._stream = self._cuda.Stream(device=place)

    def time(self, call: Call) -> dict[str, float]:
        """Return in how many us an idle GPU's call is launched, executed, and launched and waited for."""
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda.synchronize()
        with self._cuda.stream(self._stream):
            begin.record(self._stream)
            start = time.perf_counter_ns()
            call()
            launched = time.perf_counter_ns()
            end.record(self._stream)
            end.synchronize()
            waited = time.perf_counter_ns()
        return {"launch": (launched - start) / 1e3, "device": 1e3 * begin.elapsed_time(end), "wait": (waited - start) / 1e3}

    def graph(self, call: Call) -> Call:
        """Capture a call, whose inputs must stay where they are as long as the graph is used."""
        self._cuda.synchronize()  # inputs were made on another stream
        with self._cuda.stream(self._stream):
            for _ in range(3):  # libraries choose kernels and allocate workspaces, which a capture must not see
                call()
        self._cuda.synchronize()
        graph = self._cuda.CUDAGraph()
        with self._cuda.graph(graph, stream=self._stream):
            call()
        replay: Call = graph.replay  # it keeps the graph
        return replay


def launches(setting: Setting, until: float) -> Notes:
    """Time small kernels one by one and in a CUDA graph."""
    import torch

    stream, number = Stream(setting.place), torch.ones(1, device=setting.place)
    _, store = setting.begin("launches")
    for n in setting.scale.kernels:
        eager = partial(_all, [partial(number.add_, 1)] * n)
        for how, call in (("eager", eager), ("graph", stream.graph(eager))):
            stream.time(call)
            for repeat in range(2 * setting.scale.repeats):
                if time.monotonic() > until:
                    return [f"{n} kernels and more: no time"]
                for what, us in stream.time(call).items():
                    probe = Probe("launch", "gpu0", variant=f"{how} {what}", size=n)
                    store.append(probe, repeat, [(probe, us)])
    return []


def _all(calls: Iterable[Call]) -> None:
    for call in calls:
        call()


def graphs(setting: Setting, until: float) -> Notes:
    """Time the products of experts one by one and in a CUDA graph, with weights not in the cache."""
    from moesim.live.kernels.host import empty_gpu_caches

    stream, (plan, store), notes = Stream(setting.place), setting.begin("graphs"), []
    for shape in plan.wanted[0].shapes:
        try:
            _products(setting, stream, shape, plan.turning[setting.place], store, until)
        except (MoesimError, RuntimeError) as error:
            notes.append(f"{_words(shape)}: {error}")
        empty_gpu_caches()  # a graph has memory of its own
    return notes


def _products(setting: Setting, stream: Stream, shape: ExpertShape, turning: int, store: Store, until: float) -> None:
    import torch

    from moesim.live.profiler.bench import Machine

    ring, n = Machine().ring(shape, setting.place, turning, 0), ring_length(shape.n_bytes, turning)
    weights = [ring.next() for _ in range(n)]
    for rows in setting.scale.rows:
        if time.monotonic() > until:
            raise ConfigError(f"no time for {rows} rows and more")
        x = torch.randn(rows, shape.hidden, device=setting.place).to(ring.kernel.act_dtype)
        products = partial(_all, [partial(ring.kernel.run, one, x) for one in weights])
        for variant, call in (("products", products), ("products in a graph", stream.graph(products))):
            probe = Probe("expert", "gpu0", subject_of(shape), shape.bits, None, variant, rows, "rows")
            stream.time(call)
            for repeat in range(setting.scale.repeats):
                store.append(probe, repeat, [(probe, stream.time(call)["device"] / n)])


def profile(setting: Setting, until: float) -> Notes:
    """Measure a profile of the three models, as `moesim profile measure --mode quick` does."""
    from moesim.live.profiler.bench import Machine
    from moesim.live.profiler.measure import measure
    from moesim.live.profiler.request import Request, prepare

    scale, notes = setting.scale, Notes()
    models = tuple(load_model(model) for model in scale.models)
    request = Request(NAME, models, mode="quick", memory_bytes=scale.memory, gpu=setting.gpu, out=setting.work / "profile")
    prepared = prepare(request, Machine())
    first = ("copies", f"model {models[0].name}", "latencies", "pairs", *(f"model {model.name}" for model in models[1:]))
    blocks = sorted(prepared.plan.blocks, key=lambda block: first.index(block.name) if block.name in first else len(first))
    if not scale.runtime:
        few = [block for block in blocks if block.name in first]
        blocks = [replace(block, probes=tuple(probe for probe in block.probes if probe.kind != "runtime")) for block in few]
    measure(replace(prepared, plan=replace(prepared.plan, blocks=tuple(blocks))), progress=False, warn=notes.append, until=until)
    return notes


def replay(number: int, setting: Setting, until: float) -> Notes:
    """Validate a model by the profile that was measured: five policies, simulated and replayed."""
    from moesim.experiment.config import parse_config
    from moesim.experiment.resolve import Experiment
    from moesim.studies.replay import live_execution, live_machine
    from moesim.studies.validation.report import Report
    from moesim.studies.validation.run import validate
    from moesim.testing.traces import synthetic_trace

    scale, file = setting.scale, setting.work / "profile" / f"{NAME}.yaml"
    if not file.exists():
        raise ConfigError("expected this machine's profile, got none, since it was not measured")
    model = load_model(scale.models[number])
    trace, folder = setting.work / f"{model.name}.safetensors", setting.work / "validation" / model.name
    synthetic_trace(
        n_layers=model.n_layers, n_experts=model.n_experts, top_k=model.top_k, prompt=8, decode=scale.tokens, calibration=True,
        signals={"gate_next1": 0.8, "gate_next2": 0.8, "gate_next3": 0.8, "residual": 0.7},
    ).write(trace)  # fmt: skip
    config = {
        "engine": "machine", "model": scale.models[number], "hardware": str(file), "trace": str(trace),
        "workload": {"batch_size": 1, "prompt_tokens": 8, "decode_tokens": scale.tokens}, "cache": {"ratio": 0.5},
        "policies": list(POLICIES),
    }  # fmt: skip
    experiment, backend = Experiment(parse_config(config, "replay"), "replay"), "cpu" if setting.gpu is None else "cuda"
    memory = None if scale.memory is None else f"{scale.memory} B"
    with live_machine(experiment, backend, memory, None) as live:
        for repeats in (1, 2):  # a report of one replay of each run, and with time left of two
            if repeats == 1 or time.monotonic() < until:
                how = {"backend": backend, "memory": memory}
                report = Report(validate(experiment, folder, live_execution(live), repeats=repeats, how=how))
                report.write(folder)
    return list(report.problems)


GPU_TESTS: Final = ("-k", "on_a_gpu or a_real_product", "tests/recorder", "tests/live")


def tests(setting: Setting, until: float) -> Notes:
    """Run the tests of the recorder and of the kernels that need a GPU."""
    if names := lacking("pytest hypothesis cachetools transformers tokenizers"):
        raise ConfigError(f"expected pytest and what the tests import, got no {names}; install them")
    command, file = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *GPU_TESTS], setting.work / "tests.txt"
    with file.open("wb") as output:
        seconds, root = until - time.monotonic(), Path(__file__).resolve().parents[2]
        done = subprocess.run(command, cwd=root, stdout=output, stderr=output, timeout=seconds, check=False)
    last = file.read_text(errors="replace").strip().splitlines()[-1:]
    if done.returncode:
        raise ConfigError(f"expected all tests to pass, got exit code {done.returncode}: {''.join(last)}")
    return last


@dataclass(frozen=True)
class Step:
    """A part of the measurement."""

    name: str
    seconds: float  # its share of eight minutes; the time that earlier steps leave is added
    run: Callable[[Setting, float], Notes]
    needs_gpu: bool = False


STEPS: Final = (
    Step("copies", 35, copies),
    Step("contention", 45, contention),
    Step("launches", 10, launches, needs_gpu=True),
    Step("accelerator experts", 35, partial(experts, "accelerator")),
    Step("graphs", 30, graphs, needs_gpu=True),
    Step("host experts", 35, partial(experts, "host")),
    Step("profile", 125, profile),
    *(Step(f"replay of {base}", 35, partial(replay, number)) for number, base in enumerate(_BASES)),
    Step("tests", 45, tests, needs_gpu=True),
)
WHOLE_S: Final = 480.0  # of which the steps take somewhat less
_LEAST = 0.25  # of its share: with less time left a step is skipped
_ENDING = 0.15, 5.0  # of its time, and at least seconds: a step begins nothing new then, so that it ends by itself


def _in_process(run: Callable[[Setting, float], Notes], setting: Setting, until: float, outcome: Path) -> None:
    try:
        text = json.dumps({"state": "measured", "notes": run(setting, until)})
    except Exception as error:
        reason = str(error) if isinstance(error, MoesimError) else describe_exception(error)
        text = json.dumps({"state": "failed", "reason": reason})
    write_bytes(outcome, text.encode())


def run_step(step: Step, setting: Setting, until: float) -> dict[str, Any]:
    """Run a step in a process of its own, which is ended at a time of the monotonic clock."""
    began, outcome = time.monotonic(), setting.work / f"{step.name}.json"
    seconds = until - began
    soft = until - min(max(_ENDING[0] * seconds, _ENDING[1]), seconds / 2)
    arguments = (step.run, setting, soft, outcome)
    process = multiprocessing.get_context("spawn").Process(target=_in_process, args=arguments, daemon=True)
    process.start()
    process.join(seconds)
    ended = process.exitcode
    process.kill()
    process.join()
    if outcome.exists():
        found = json.loads(outcome.read_text())
    else:
        words = f"it did not end within {seconds:.0f} s" if ended is None else f"its process ended with code {ended}"
        found = {"state": "failed", "reason": words}
    return {"name": step.name, **found, "seconds": round(time.monotonic() - began, 1)}


def run_steps(steps: Sequence[Step], setting: Setting, out: Path, words: dict[str, str], minutes: float) -> list[dict[str, Any]]:
    """Run steps up to their ends, and write all files after each."""
    end, share = time.monotonic(), 60 * minutes / WHOLE_S
    report: list[dict[str, Any]] = [{"name": step.name, "state": "skipped", "reason": "not begun"} for step in steps]
    for number, step in enumerate(steps):
        end += step.seconds * share
        left = end - time.monotonic()
        if step.needs_gpu and setting.gpu is None:
            report[number]["reason"] = "it needs a CUDA GPU"
        elif left < _LEAST * step.seconds * share:
            report[number]["reason"] = f"no time: {max(0.0, left):.0f} of {step.seconds * share:.0f} s are left"
        else:
            report[number] |= {"state": "failed", "reason": "the measurement was ended meanwhile"}
            collect(setting, out, words, report)
            report[number] = run_step(step, setting, end)
        print(*(report[number][key] for key in ("name", "state", "reason") if key in report[number]), sep=": ", flush=True)
        collect(setting, out, words, report)
    return report


def collect(setting: Setting, out: Path, words: dict[str, str], report: Sequence[dict[str, Any]]) -> None:
    """Write all files of a measurement, as far as there is something to write."""
    work, files = setting.work, {"samples.csv.gz": _samples(setting.work, [one["name"] for one in report])}
    for name in (f"profile/{NAME}.yaml", "tests.txt"):
        if (work / name).exists():
            files[Path(name).name] = (work / name).read_bytes()
    for name in ("profile", "validation"):
        paths = sorted(path for path in (work / name).rglob("[!.]*") if path.is_file())
        with zipfile.ZipFile(packed := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
            for path in paths:
                archive.write(path, path.relative_to(work / name).as_posix())
        files |= {f"{name}.zip": packed.getvalue()} if paths else {}
    content = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), "moesim": __version__, "machine": words, "steps": report,
        "too large": {name: len(data) for name, data in files.items() if len(data) > FILE_BYTES},
    }  # fmt: skip
    files["report.json"] = (json.dumps(content, indent=1) + "\n").encode()
    for name, data in files.items():
        if len(data) <= FILE_BYTES:
            write_bytes(out / name, data)


def _samples(work: Path, steps: Sequence[str]) -> bytes:
    """Write the readings of all steps so far as compressed CSV."""
    writer = csv.writer(table := io.StringIO(), lineterminator="\n")
    table.write(f"{COLUMNS}\n")
    for step in (step for step in steps if (work / step / PART).exists()):
        lines = Journal(OutputFolder(work, COMMAND, owned=False), f"{step}/{PART}").read()
        for line in (line for line in lines if line and "readings" in line):
            for *fields, us in line["readings"]:
                probe = Probe(*fields)
                size = {probe.unit: probe.size}
                if probe.kind == "expert":
                    size["bytes"] = bits_to_bytes(3 * math.prod(map(int, probe.subject.split("x"))), probe.bits or 16)
                words = FORMATS[int(probe.bits)] if probe.bits else None
                counts = [size.get(unit) for unit in ("rows", "bytes", "calls")]
                first = [step, probe.kind, probe.device, probe.subject, probe.variant, words, probe.threads]
                writer.writerow([*first, *counts, line["repeat"], round(1e3 * us)])
    return gzip.compress(table.getvalue().encode(), mtime=0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure this machine; 1 if a step failed."""
    parser = argparse.ArgumentParser(prog="measure_machine", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="an empty or new folder, which gets at most six files")
    parser.add_argument("--minutes", type=float, default=8.0, help="time after which the last step has ended (default: 8)")
    parser.add_argument("--small", action="store_true", help="measure tiny models and few sizes, to see that it works")
    given = parser.parse_args(arguments)
    if not 0 < given.minutes <= MOST_MINUTES:
        parser.error(f"--minutes: expected a number above 0 and up to {MOST_MINUTES}, got {given.minutes:g}")
    if given.out.exists() and (not given.out.is_dir() or any(given.out.iterdir())):
        parser.error(f"OUT: expected an empty or new folder, got {given.out}; choose another")
    began, words = time.monotonic(), describe()
    if "gpus" not in words:
        print(f"torch {words.get('torch')} finds no CUDA GPU: only the processor is measured", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        setting = Setting(SMALL if given.small else FULL, Path(folder), "cuda:0" if "gpus" in words else "cpu")
        report = run_steps(STEPS, setting, given.out, words, given.minutes - (time.monotonic() - began) / 60)
    return 1 if any(one["state"] == "failed" for one in report) else 0


if __name__ == "__main__":
    sys.exit(main())
