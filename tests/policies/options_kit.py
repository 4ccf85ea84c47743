"""Options of every policy and part: which values are tried, on which small machines and workloads."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from moesim.engine import EngineOptions, simulate
from moesim.errors import ConfigError, InputError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import ModelSpec
from moesim.policies.options import options_of
from moesim.policies.registry import PARTS, POLICIES, make_policy, part_class, policy_class
from moesim.records import Records
from moesim.testing import tiny_model
from moesim.testing.traces import synthetic_trace
from moesim.trace import Trace
from moesim.trace.predictors import FutureUse, PredictorSet
from moesim.trace.workload import Workload, WorkloadSpec, compose
from tests.policies.golden_kit import golden

Options = dict[str, Any]


# ------------------------------------------------------------------------------------------------------------ settings
@dataclass(frozen=True)
class Setting:
    """A model, a machine and a workload, small enough for thousands of runs."""

    layers: int = 4
    experts: int = 8
    top_k: int = 2
    shared: int = 0
    slots: int = 13
    batch: int = 4
    batches: int = 1
    micro_batches: int = 1
    prompt: int = 12
    decode: int = 6
    chunk: int | None = None
    decision_ns: int = 0
    load_us: float = 3.0  # of an expert over a link
    cpu_us: float = 1.0  # of a row of an expert on the CPU
    launch_us: float = 0.5  # of a kernel on the GPU
    gpu_mib: int = 1024
    skew: float = 0.5  # of the experts' popularity
    link_rate: float = 1.0  # that a link keeps while the CPU computes experts


SETTINGS = (
    Setting(),
    Setting(batch=1, layers=7, slots=24, decode=12, cpu_us=2.0),
    Setting(micro_batches=2, decision_ns=700, slots=9, layers=5),
    Setting(load_us=12.0, cpu_us=0.6, slots=21, layers=7, batch=2, decode=10, shared=1),
    Setting(load_us=1.0, cpu_us=4.0, batch=3, slots=6, decode=10),
    Setting(experts=16, top_k=4, layers=6, slots=43, batch=1, prompt=24, decode=20, cpu_us=2.0, load_us=15.0),
    Setting(batch=2, batches=2, slots=15, decode=5, chunk=5, layers=6, load_us=5.0),
    Setting(experts=16, slots=20, batch=2, micro_batches=2, prompt=8, decision_ns=700, load_us=12.0, cpu_us=8.0, launch_us=10.0),
    Setting(experts=16, batch=1, batches=3, prompt=3, slots=40, decode=4, cpu_us=2.0),
    Setting(batch=1, prompt=64, batches=2, slots=11, decode=3, layers=6, cpu_us=0.3),
    Setting(batch=1, slots=20, load_us=0.7, cpu_us=3.0, decode=12),
    Setting(batch=1, slots=12, load_us=4.0, cpu_us=3.0, launch_us=5.0, decode=12),
    Setting(experts=16, batch=1, slots=26, load_us=8.0, cpu_us=8.0, launch_us=2.0, decode=8),
    Setting(experts=16, top_k=4, slots=23, batch=1, batches=4, prompt=5, decode=8, cpu_us=3.0, skew=1.0),
    Setting(experts=16, top_k=4, layers=7, slots=57, batch=1, prompt=8, decode=20, load_us=10.0, cpu_us=30.0, link_rate=0.3),
    Setting(top_k=4, slots=9, batch=1, prompt=3, decode=20, load_us=20.0, cpu_us=6.0, launch_us=6.0, link_rate=0.3),
    Setting(layers=3, experts=16, top_k=4, slots=36, batch=6, micro_batches=2, prompt=3, decode=3, cpu_us=0.3),
    Setting(layers=6, slots=14, batch=4, micro_batches=2, prompt=3, decode=1, load_us=15.0, cpu_us=6.0, launch_us=3.0),
    Setting(shared=2, layers=7, slots=52, batch=2, batches=2, prompt=16, decode=12, load_us=0.7, cpu_us=2.0, launch_us=5.0),
    Setting(top_k=3, batch=1, prompt=1, decode=1, load_us=2.0, cpu_us=2.0),  # a tie of CPU and link decides
    Setting(layers=3, slots=8, batch=2, prompt=70, decode=1),  # 32 rows for each expert and place
    Setting(experts=16, top_k=1, slots=32, batch=1, batches=2, prompt=28, skew=2.0),  # eight times the mean are not rare
    Setting(layers=7, experts=16, top_k=1, slots=7, batch=1, batches=2, prompt=4, decode=4),
    Setting(slots=3, decode=2),  # fewer than layers
    Setting(gpu_mib=5, decode=1),  # half of the 32 experts are 6 MiB
)
SEVERAL = [setting for setting in SETTINGS if setting.micro_batches > 1][:2]
GOLDEN = Path(__file__).with_name("golden_options.json")
SIGNALS = {
    "residual": 0.8, "gate_next1": 0.8, "gate_next2": 0.7, "gate_next3": 0.6, "learned": 0.9,
    **{f"shadow-{precision}:T{token}:KV{kv}": recall for precision, recall in (("int8", 0.9), ("nf4", 0.8), ("fp16", 0.95))
       for token in range(3) for kv in range(3)},
    "gate_next4": 0.5, "embedding": 0.8,
}  # fmt: skip
ONE_GPU, TWO_GPUS = ("gpu0",), ("gpu0", "gpu1")
CLUSTER = ("main0", "shadow0", "shadow1", "worker0", "worker1", "worker2", "worker3")
DISKS = {"llama-cpp-ssd", "colibri"}
"""What needs a machine with a disk."""
GPUS = {"dali-multi-gpu": TWO_GPUS, "all-gpu": TWO_GPUS, "od-moe": CLUSTER}


@cache
def workload_of(setting: Setting) -> tuple[ModelSpec, Trace, Workload]:
    """Make the model, a trace with all that any policy needs, and the workload of a setting."""
    n_requests = max(4, setting.batch * setting.batches)
    trace = synthetic_trace(
        n_layers=setting.layers, n_experts=setting.experts, top_k=setting.top_k, n_requests=n_requests,
        prompt=setting.prompt, decode=setting.decode, skew=setting.skew, scores=True, calibration=True, signals=SIGNALS,
    )  # fmt: skip
    spec = WorkloadSpec(
        batch_size=setting.batch, n_batches=setting.batches, prompt_tokens=setting.prompt, decode_tokens=setting.decode,
        micro_batches=setting.micro_batches, prefill_chunk=setting.chunk,
    )  # fmt: skip
    model = tiny_model(
        n_layers=setting.layers, n_experts=setting.experts, top_k=setting.top_k, n_shared=setting.shared,
        shared_intermediate=256 if setting.shared else 0,
    )  # fmt: skip
    return model, trace, compose(trace, spec)


@cache
def machine_of(setting: Setting, gpus: Sequence[str], disk: bool = False) -> HardwareProfile:
    """Make a machine with all curves, side lanes, and links of which each is a little slower than the one before."""

    def assumed(value: float) -> dict[str, Any]:
        return {"value": value, "source": "assumed", "why": "a number for tests"}

    def device(kind: str, mib: int, launch_us: float, base_us: float, per_token_us: float) -> dict[str, Any]:
        shape = {"hidden": 256, "intermediate": 256, "bits": 16.0}
        curve = {"shape": shape, "form": "linear", "range": [1, 4096]}
        return {
            "kind": kind, "memory_bytes": assumed(mib * 2**20), "memory_bytes_per_s": assumed(1e12), "flops": assumed(1e14),
            "launch_us": assumed(launch_us),
            "experts": [{**curve, "base_us": assumed(base_us), "per_token_us": assumed(per_token_us)}],
        }  # fmt: skip

    def link(at: int) -> dict[str, Any]:
        rate = tiny_model().expert_bytes(0) * 1e6 / (setting.load_us * (1 + at / 8))
        speeds = {"any": (0.0, rate), "pageable": (1.0, rate / 2), "chunked": (0.1, rate), "activation": (0.1, rate)}
        return {name: {"latency_us": assumed(us), "bytes_per_s": assumed(speed)} for name, (us, speed) in speeds.items()}

    profile = {
        "name": "pairs", "description": "Numbers for tests; no machine.", "compute": gpus[0], "backing": ["cpu0"],
        "devices": {
            **{gpu: device("gpu", setting.gpu_mib, setting.launch_us, 2.0, 0.1) for gpu in gpus},
            "cpu0": device("cpu", 4096, 0.5, 0.0, setting.cpu_us),
            **({"disk0": {"kind": "disk", "memory_bytes": assumed(1e12)}} if disk else {}),
        },
        "links": {name: link(i) for i, gpu in enumerate(gpus) for name in (f"cpu0->{gpu}", f"{gpu}->cpu0")}
        | ({"disk0->cpu0": link(9)} if disk else {}),
        "contention": [
            {"a": f"{gpu}.side", "b": f"{gpu}.experts", "a_rate": assumed(0.5), "b_rate": assumed(0.9)} for gpu in gpus
        ]
        + [
            {"a": "cpu0.experts", "b": f"cpu0->{gpu}", "a_rate": assumed(1.0), "b_rate": assumed(setting.link_rate)}
            for gpu in gpus if setting.link_rate < 1
        ],
    }  # fmt: skip
    return load_hardware(profile)


# ---------------------------------------------------------------------------------------------------------------- values
PREDICTED = {"name": "predicted", "source": "oracle", "size": 2}
FEW_ROWS = {"name": "fixed-threshold", "cpu_ms": 1.0, "load_ms": 2.0}  # by its own constants it loads what has ten rows
INTO_CACHE = {**PREDICTED, "pool": "cache"}
CROSS_LAYER = {"name": "cross-layer", "source": "oracle"}
FEW_PARTS: dict[str, list[Any]] = {
    "placement": ["none", "lowest-ids", "random"],
    "assignment": ["all-cpu", "resident", "all-gpu", "greedy"],
    "prefetch": ["none", PREDICTED, INTO_CACHE],
    "replacement": ["lru", "static"],
}
ALL_PARTS: dict[str, list[Any]] = {
    "placement": ["none", "random", "lowest-ids", "highest-ids", "frequency-per-layer", "frequency-global"],
    "assignment": ["all-gpu", "all-cpu", "greedy", "threshold", FEW_ROWS, "exact", "beam", "resident", "queues", "hss"],
    "prefetch": ["none", PREDICTED, INTO_CACHE, "random", "impact-driven", "mrs-score", CROSS_LAYER],
    "replacement": ["lru", "fifo", "lfu", "random", "mrs", "belady", "static", "workload-aware", "arc", "s3-fifo",
                    "activation-aware", "least-stale", "least-stale-2gen"],
}  # fmt: skip
# Policy or part, option -> values, where its annotation does not say what could be tried.
VALUES: dict[tuple[str, str], list[Any]] = {
    ("prescope", "predictor"): [None, "signal:gate_next1"],
    ("prescope", "scheduler"): ["threshold", "all-gpu"],
    ("prescope", "next2_predictor"): ["oracle"],
    ("od-moe", "prediction_source"): ["none", "synthetic:0.3", "random"],
    ("od-moe", "token_period"): [None, 2],  # the trace has the shadow's signals for these
    ("od-moe", "kv_period"): [None, 2],
    ("od-moe", "main"): ["worker3"],
    ("od-moe", "shadow"): ["shadow1"],
    ("od-moe", "workers"): ["worker1"],
    ("llama-cpp", "n_cpu_moe"): [7, 3],
    ("exllamav3", "placement"): ["frequency"],
    ("exllamav3", "cpu_split"): [13],
    ("dali-multi-gpu", "n_gpus"): [1],
    ("dfa-cache", "fetch"): ["rates", "0,1", "0,0,1"],
    ("all-gpu", "gpus"): ["all"],
    ("impact-driven", "source"): ["synthetic:0.2", "coactivation"],  # by frequency, all experts have the same number of rows
    ("fixed-threshold", "cpu_ms"): [0.0, 1.0],
    ("fixed-threshold", "load_ms"): [0.0, 5.0],
}
# Policy or part, option -> what it needs next to it to matter at all.
BESIDE: dict[tuple[str, str], Options] = {
    ("prescope", "next2_predictor"): {"window": "next2"},
    ("composed", "staging_slots"): {"replacement": "static"},
    ("composed", "cache_only"): {"assignment": "greedy"},
    ("hybrimoe-code", "wait_prefetch"): {"prefetch": INTO_CACHE},
    ("od-moe", "workers"): {"group_size": 1},
    ("static", "scope"): {"placement": "random"},
    ("static", "slots_split"): {"placement": "random", "scope": "per-layer"},
    ("hss", "cpu_per_row"): {"costs": "code"},
    ("finemoe", "selected_only"): {"prefetch_distance": 0},  # the published one is more than the layers here
    **{("exllamav3", option): {"swap_interval": 1, "swap_floor": 0.0} for option in ("swap_budget", "swap_hysteresis")},
    ("exllamav3", "swap_floor"): {"swap_interval": 1, "swap_hysteresis": 0.0},
    ("finemoe", "float_score"): {"prefetch_distance": 0},
}


@dataclass(frozen=True, eq=False)
class Subject:
    """A policy, or a part in a policy, whose options are tried; those of the policy around a part begin with `AROUND_IT`."""

    name: str
    cls: type
    kind: str = ""  # of the part: the option of the policy that it is given as
    around: Options = field(default_factory=dict)  # of the part: the policy's other options
    fixed: Options = field(default_factory=dict)  # of the part: options without a default
    policy: str = "composed"  # that the part is in

    def spec(self, options: Options) -> Options:
        """Write the policy as in an experiment."""
        if not self.kind:
            return {"name": self.name, **options}
        own, around = self._split(options)
        return {"name": self.policy, **around, self.kind: {"name": self.name, **own}}

    def _split(self, options: Options) -> tuple[Options, Options]:
        """Tell the part's options from the policy's."""
        around = {name.removeprefix(AROUND_IT): value for name, value in options.items() if name.startswith(AROUND_IT)}
        own = {name: value for name, value in options.items() if not name.startswith(AROUND_IT)}
        return self.fixed | own, self.around | around

    def refusal(self, options: Options) -> str:
        """Return why the registry refuses the options, or nothing."""
        try:
            make_policy(self.spec(options))
        except ConfigError as error:
            return str(error)
        return ""

    def make(self, options: Options) -> Any:
        """Build the policy."""
        if not self.kind:
            return self.cls(**options)
        own, around = self._split(options)
        return policy_class(self.policy)(**around, **{self.kind: self.cls(**own)})

    def values_around(self) -> dict[str, list[Any]]:
        """Return values of the options of the policy around a part, under the names by which they are told from the part's."""
        cls = policy_class(self.policy)
        found = Subject(self.policy, cls).values(every=False) if self.kind else {}
        for name in self.around:
            found[name] = [*found[name], options_of(cls)[name].default]
        return {AROUND_IT + name: values for name, values in found.items() if name != self.kind}

    def values(self, *, every: bool) -> dict[str, list[Any]]:
        """Return for each option values other than its default."""
        found = {}
        for option, declared in options_of(self.cls).items():
            default = self.fixed.get(option, declared.default)
            if (self.name, option) in VALUES:
                tried = VALUES[self.name, option]
            elif option in ALL_PARTS:
                tried = (ALL_PARTS if every else FEW_PARTS)[option]
            elif option.endswith("source"):
                tried = ["synthetic:0.2", "frequency"] if every else ["synthetic:0.2"]
            else:
                tried = list(_values(declared.schema, every=every))
            found[option] = [value for value in tried if (value, type(value)) != (default, type(default))]
        return found


def _values(schema: dict[str, Any], *, every: bool) -> Iterator[Any]:
    """Give values that an option allows: each that is listed, the least, and some above it."""
    for one in schema.get("anyOf", [schema]):
        low, high = one.get("minimum"), one.get("maximum")
        if "enum" in one:
            yield from one["enum"]
        elif one.get("type") == "integer" and low is None:
            yield 7
        elif one.get("type") == "integer":
            top = low + 2 if high is None else min(low + 2, high)
            yield from range(low, top + 1) if every else (low, top)
        elif one.get("type") == "number" and low is not None:
            yield from [float(low), 0.5, 3.0 if high is None else high]
        elif one.get("type") in ("boolean", "null"):
            yield from {"boolean": (True, False), "null": (None,)}[one["type"]]


AROUND_IT = "policy."
# Part -> the rest of a composition in which its options can matter, and its options that have no default.
_GREEDY: Options = {"assignment": "greedy"}
AROUND: dict[tuple[str, str], tuple[Options, Options]] = {
    ("placement", "frequency-global"): ({"scope": "global"}, {}),
    ("assignment", "queues"): ({"prefetch": INTO_CACHE, "load_order": "plan"}, {}),
    ("assignment", "hss"): ({"prefetch": INTO_CACHE, "load_order": "plan"}, {}),
    ("prefetch", "predicted"): (_GREEDY, {"source": "oracle"}),
    ("prefetch", "random"): (_GREEDY, {}),
    ("prefetch", "impact-driven"): ({"assignment": "queues"}, {}),
    ("prefetch", "mrs-score"): ({"assignment": "queues"}, {}),
    ("prefetch", "cross-layer"): (_GREEDY, {}),
    ("replacement", "workload-aware"): ({"assignment": "greedy", "prefetch": PREDICTED, "placement": "random"}, {}),
    ("replacement", "mrs"): ({"scope": "global", "prefetch": INTO_CACHE}, {}),
    ("replacement", "least-stale"): ({"scope": "global"}, {}),
    ("replacement", "least-stale-2gen"): ({"prefetch": INTO_CACHE}, {}),
}
POLICY_SUBJECTS = [Subject(name, policy_class(name)) for name in sorted(POLICIES)]
PART_SUBJECTS = [
    Subject(name, part_class(kind, name), kind, *AROUND.get((kind, name), ({}, {})))
    for kind, parts in PARTS.items() for name in parts if options_of(part_class(kind, name))
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------------ runs
def run(subject: Subject, options: Options, setting: Setting) -> Records:
    model, trace, workload = workload_of(setting)
    model = replace(model, low_bits=getattr(policy_class(subject.policy if subject.kind else subject.name), "low_bits", ()))
    hardware = machine_of(setting, GPUS.get(subject.name, ONE_GPU), subject.name in DISKS)  # parts are in policies of one GPU
    policy = subject.make(options)
    own = policy.transfer(model)
    if "oracle:routing" in policy.needs:
        policy.bind_oracle(FutureUse(workload))
    gpus = [device for device in hardware.devices if device not in ("cpu0", "disk0")]
    return simulate(
        model=model,
        costs=CostModel(model, hardware, transfer=own[0], chunk_bytes=own[1]) if own else CostModel(model, hardware),
        workload=workload,
        policy=policy,
        cache_slots=dict.fromkeys(gpus, setting.slots // len(gpus)),
        predictors=PredictorSet(trace, workload, {}, 0),
        tables=trace.tables,
        options=EngineOptions(decision_ns=setting.decision_ns),
        policy_name=subject.name,
    )


def results(subject: Subject, tried: Iterable[Options]) -> dict[str, list[str]]:
    """Run a policy with variants of its options; return digests of all records by the options."""
    found = {}
    for options in tried:
        digests = found[json.dumps(options, sort_keys=True)] = []
        for setting in SEVERAL:
            try:
                records = json.dumps(golden(run(subject, options, setting)))
            except InputError as error:  # an option may ask for more than there is
                digests.append(type(error).__name__)
            else:
                digests.append(sha256(records.encode()).hexdigest()[:12])
    return found
