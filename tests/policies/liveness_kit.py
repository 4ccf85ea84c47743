"""Random small runs of every policy: options, machines, workloads. Each must end, whatever is drawn.

A case depends on seed and number only. `tests/long/campaign_liveness.py` plays thousands, `test_liveness.py` a sample.
"""

from __future__ import annotations

import random
import traceback
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from moesim.engine import EngineOptions, simulate
from moesim.engine.entry import check_equal
from moesim.engine.native import AVAILABLE
from moesim.errors import ConfigError, InputError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.costs import CostModel
from moesim.hardware.types import Pair
from moesim.model import ModelSpec, load_model
from moesim.policies.registry import PARTS
from moesim.records import Records
from moesim.testing import tiny_model
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from moesim.trace.predictors import FutureUse, PredictorSet
from moesim.trace.workload import WorkloadSpec, compose
from tests.policies.options_kit import AROUND_IT, CLUSTER, PART_SUBJECTS, POLICY_SUBJECTS, SIGNALS, Options, Subject

SUBJECTS = (*POLICY_SUBJECTS, *PART_SUBJECTS)
_SHIPPED = {"shipped": "rtx3090-epyc7532", "shipped, two GPUs": "rtx3090x2-epyc7532", "shipped, nodes": "odmoe-10x3090"}
_GPUS = {"one GPU": ("gpu0",), "two GPUs": ("gpu0", "gpu1"), "chain": ("gpu0", "gpu1"), "nodes": CLUSTER, "disk": (),
         "disk and host": ("gpu0",)}  # fmt: skip
MACHINES = (*_GPUS, *_SHIPPED)
_DISKS = {"disk", "disk and host"}
# What a policy needs of a machine to run at all; two of three cases have it.
_NEEDS = {"od-moe": ("nodes", "shipped, nodes"), "dali-multi-gpu": ("two GPUs", "shipped, two GPUs"),
          "llama-cpp-ssd": ("disk", "disk and host"), "colibri": ("disk and host",)}  # fmt: skip


PLAIN: dict[str, Any] = {
    "layers": 3, "experts": 8, "top_k": 2, "shared": 0, "ratio": 0.25, "batch": 1, "batches": 1, "micro_batches": 1, "prompt": 5,
    "decode": 4, "prefill_chunk": None, "refill": False, "decision_ns": 700, "pieces": 1, "contention": False, "trace_seed": 0,
    "load_us": 20.0, "cpu_us": 2.0, "gpu_us": 0.5, "latency_us": 0.0, "share_link": False, "one_medium": False,
    "host_expert_us": None,
}  # fmt: skip
"""Numbers of a case that nothing is special about: of model, workload, engine and machine."""


class Case(NamedTuple):
    """One run: all that was drawn for it."""

    subject: Subject
    options: Options
    machine: str
    numbers: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.subject.spec(self.options)} on {self.machine} with {self.numbers}"


def draw(seed: int, number: int) -> Case:
    """Draw a case: policies and parts in turn, all else at random."""
    rng = random.Random(f"liveness {seed} {number}")
    subject = SUBJECTS[number % len(SUBJECTS)]
    fitting = _NEEDS.get(subject.name, ("one GPU", "two GPUs", "shipped"))
    machine = rng.choice(fitting if rng.random() < 2 / 3 else MACHINES)
    batch = rng.choice([1, 2, 3, 5])
    numbers = {
        "layers": rng.choice([1, 2, 3, 5, 7]), "experts": rng.choice([4, 8, 8, 16]), "top_k": rng.choice([1, 2, 2, 4]),
        "shared": rng.choice([0, 0, 1]), "ratio": rng.choice([0.0, 0.1, 0.25, 0.25, 0.5, 0.5, 0.75, 1.0]), "batch": batch,
        "batches": rng.choice([1, 2, 3]), "micro_batches": rng.randint(1, min(batch, 3)), "prompt": rng.choice([0, 1, 5, 12, 40]),
        "decode": rng.choice([1, 4, 7]), "prefill_chunk": rng.choice([None, None, 5, 16]), "refill": rng.random() < 0.3,
        "decision_ns": rng.choice([0, 1, 700, 7_500, 100_000]), "pieces": rng.choice([1, 1, 3, 100]),
        "contention": rng.random() < 0.6, "trace_seed": rng.randrange(100),
        "load_us": rng.choice([0.5, 3.0, 20.0]), "cpu_us": rng.choice([0.3, 2.0, 30.0]), "gpu_us": rng.choice([0.5, 10.0]),
        "latency_us": rng.choice([0.0, 0.0, 5.0]), "share_link": rng.random() < 0.2, "one_medium": rng.random() < 0.2,
        "host_expert_us": rng.choice([None, None, 1.0]),
    }  # fmt: skip
    return Case(subject, _options(subject, rng), machine, numbers)


def _options(subject: Subject, rng: random.Random) -> Options:
    """Draw options that the registry accepts next to each other: each is tried in turn, and left out where it is refused."""
    values = subject.values(every=True)
    if subject.kind:
        values |= {name: tried for name, tried in subject.values_around().items() if name.removeprefix(AROUND_IT) in PARTS}
    names = [name for name, tried in values.items() if tried]
    rng.shuffle(names)
    found: Options = {}
    for name in names:
        if rng.random() < 0.5:
            more = {**found, name: rng.choice(values[name])}
            if not subject.refusal(more):
                found = more
    return found


def play(case: Case, engine: str) -> tuple[Records | None, str]:
    """Run a case on an engine: its records, or None with why the policy does not run there. Any other end is raised."""
    numbers = case.numbers
    try:
        model, trace = _model_and_trace(case)
        hardware = _machine(case.machine, *_of_machine(numbers))
        policy: Any = case.subject.make(case.options)
        spec = WorkloadSpec(
            batch_size=numbers["batch"], n_batches=numbers["batches"], prompt_tokens=numbers["prompt"],
            decode_tokens=numbers["decode"], micro_batches=numbers["micro_batches"], refill=numbers["refill"],
            prefill_chunk=numbers["prefill_chunk"] or policy.prompt_rows,
        )  # fmt: skip
        workload = compose(trace, spec)
        if "oracle:routing" in policy.needs:
            policy.bind_oracle(FutureUse(workload))
        chunk = None if numbers["pieces"] == 1 else -(-model.expert_bytes(0) // numbers["pieces"])
        own = policy.transfer(model)
        costs = CostModel(model, hardware, **({"transfer": own[0], "chunk_bytes": own[1]} if own else {"chunk_bytes": chunk}))
        accelerators = [name for name, device in hardware.devices.items() if device.role == "accelerator"]
        slots = round(numbers["ratio"] * model.n_layers * model.n_experts)
        return simulate(
            model=model, costs=costs, workload=workload, policy=policy,
            cache_slots=dict.fromkeys(accelerators, slots), predictors=PredictorSet(trace, workload, {}, 0),
            tables=trace.tables, options=EngineOptions(decision_ns=numbers["decision_ns"]), policy_name=case.subject.name,
            engine=engine,
        ), ""  # fmt: skip
    except (ConfigError, InputError) as error:
        return None, f"{type(error).__name__}: {error}"


def verdict(case: Case, *, both: bool) -> tuple[str, str]:
    """Run a case, on both engines if asked; give what became of it, and what is wrong with that."""
    try:
        records, reason = play(case, "native" if AVAILABLE else "simpy")
        if both and AVAILABLE:
            reference, other = play(case, "simpy")
            if records is not None and reference is not None:
                check_equal(reference, records)
            elif reason != other:
                return "differs", f"simpy: {other or 'runs'}; native: {reason or 'runs'}"
    except Exception as error:
        if type(error).__module__.startswith("moesim"):
            return "failed", f"{type(error).__name__}: {error}"
        return "failed", "".join(traceback.format_exc()[-1500:])
    if records is None:
        return f"refused: {reason.split(':')[0]}", "" if reason else "no reason"
    return "ended" + (", on both engines" if both and AVAILABLE else ""), ""


# ------------------------------------------------------------------------------------------------------------- inputs
def _model_and_trace(case: Case) -> tuple[ModelSpec, Trace]:
    numbers = case.numbers
    layers, shipped = numbers["layers"], case.machine in _SHIPPED
    experts, top_k = (8, 2) if shipped else (numbers["experts"], min(numbers["top_k"], numbers["experts"]))
    n_requests = numbers["batch"] * numbers["batches"]
    trace = _trace(layers, experts, top_k, n_requests, max(1, numbers["prompt"]), numbers["decode"], numbers["trace_seed"])
    if shipped:
        bits = dict.fromkeys(("expert_bits", "other_bits", "kv_bits", "act_bits"), 32) if "nodes" in case.machine else {}
        model = load_model({"base": "mixtral-8x7b", "expert_bits": 4, "n_layers": layers} | bits)
    else:
        shared = {"n_shared": numbers["shared"], "shared_intermediate": 256 if numbers["shared"] else 0}
        model = tiny_model(n_layers=layers, n_experts=experts, top_k=top_k, **shared)
    low = getattr(case.subject.make(case.options), "low_bits", ())
    return replace(model, low_bits=tuple(bits * model.expert_bits / 16 for bits in low)), trace


@lru_cache(64)
def _trace(layers: int, experts: int, top_k: int, n_requests: int, prompt: int, decode: int, seed: int) -> Trace:
    return synthetic_trace(
        n_layers=layers, n_experts=experts, top_k=top_k, n_requests=n_requests, prompt=prompt, decode=decode, seed=seed,
        scores=True, calibration=True, signals={name: recall for name, recall in SIGNALS.items() if _ahead(name) < layers},
    )  # fmt: skip


def _ahead(signal: str) -> int:
    """Layers that a signal looks ahead."""
    return int(signal[-1]) if signal.startswith("gate_next") else int(signal in ("residual", "learned"))


def _of_machine(numbers: dict[str, Any]) -> tuple[Any, ...]:
    names = ("contention", "load_us", "cpu_us", "gpu_us", "latency_us", "share_link", "one_medium", "host_expert_us")
    return tuple(numbers[name] for name in names)


@lru_cache(256)
def _machine(
    kind: str, contention: bool, load_us: float, cpu_us: float, gpu_us: float, latency_us: float, share_link: bool,
    one_medium: bool, host_expert_us: float | None,
) -> HardwareProfile:  # fmt: skip
    """Make a machine, or take a shipped one."""
    if kind in _SHIPPED:
        hardware = load_hardware(_SHIPPED[kind])
        pairs: tuple[Pair, ...] = hardware.contention if contention else ()
        lacking = [gpu for gpu, one in hardware.devices.items() if one.role == "accelerator"
                   and not any(f"{gpu}.side" in (pair.a, pair.b) for pair in pairs)]  # fmt: skip
        sides = tuple(Pair(f"{gpu}.side", f"{gpu}.experts", 500_000, 900_000, "assumed") for gpu in lacking)
        return replace(hardware, contention=(*pairs, *sides))
    gpus = _GPUS[kind]

    def assumed(value: float) -> dict[str, Any]:
        return {"value": value, "source": "assumed", "why": "a number for tests"}

    def device(kind: str, mib: int, base_us: float, per_token_us: float, **more: Any) -> dict[str, Any]:
        curve = {"shape": {"hidden": 256, "intermediate": 256, "bits": 16.0}, "form": "linear", "range": [1, 4096]}
        return {
            "kind": kind, "memory_bytes": assumed(mib * 2**20), "memory_bytes_per_s": assumed(1e12), "flops": assumed(1e14),
            "launch_us": assumed(0.5), **more,
            "experts": [{**curve, "base_us": assumed(base_us), "per_token_us": assumed(per_token_us)}],
        }  # fmt: skip

    def link(at: int) -> dict[str, Any]:
        rate = tiny_model().expert_bytes(0) * 1e6 / (load_us * (1 + at / 8))
        speeds = {"any": (latency_us, rate), "pageable": (latency_us + 1, rate / 2), "chunked": (latency_us, rate),
                  "activation": (0.1, rate)}  # fmt: skip
        curves: dict[str, Any] = {
            n: {"latency_us": assumed(us), "bytes_per_s": assumed(speed)} for n, (us, speed) in speeds.items()
        }
        curves["activation"]["share_link"] = share_link
        return curves | ({"medium": "bus"} if one_medium else {})

    on_the_way = {"gpu1": "gpu0"} if kind == "chain" else {}
    ends = [(on_the_way.get(gpu, "cpu0"), gpu) for gpu in gpus] + ([("disk0", "cpu0")] if kind in _DISKS else [])
    links = {f"{a}->{b}": link(i) for i, (x, y) in enumerate(ends) for a, b in ((x, y), (y, x))}
    role = {"role": "accelerator"} if kind == "disk" else {}
    pairs = [(f"{gpu}.side", f"{gpu}.experts", 0.5, 0.9) for gpu in gpus or ("cpu0",)]
    if contention:
        pairs += [("cpu0.experts", f"{a}->{b}", 0.8, 0.4) for a, b in ends]
        pairs += [(f"{gpu}.dense", f"{a}->{gpu}", 0.7, 0.9) for a, gpu in ends if gpu in gpus]
    profile = {
        "name": "liveness", "description": "Numbers for tests; no machine.", "compute": gpus[0] if gpus else "cpu0",
        "backing": ["disk0"] if kind in _DISKS else ["cpu0"],
        "devices": {
            **{gpu: device("gpu", 64, gpu_us, 0.1) for gpu in gpus}, "cpu0": device("cpu", 4096, 0.0, cpu_us, **role),
            **({"disk0": {"kind": "disk", "memory_bytes": assumed(2**40)}} if kind in _DISKS else {}),
        },
        "links": links,
        "contention": [{"a": a, "b": b, "a_rate": assumed(x), "b_rate": assumed(y)} for a, b, x, y in pairs],
        **({"host_expert_us": assumed(host_expert_us)} if host_expert_us else {}),
    }  # fmt: skip
    return load_hardware(profile)
