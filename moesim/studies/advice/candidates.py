"""Placements of engines, with a number to vary; systems that fill the GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from moesim.core.units import digits
from moesim.errors import InputError
from moesim.experiment.routing import lacking as lacks
from moesim.experiment.runner import initial_placement, slots_within
from moesim.fits import lacking, required_bytes, sum_of
from moesim.hardware.costs import CostModel
from moesim.hardware.engines import transfer_of, why_not
from moesim.policies.registry import make_policy
from moesim.studies.advice.question import PREFILL_CHUNK, Asked, Routing, Setting
from moesim.trace.workload import WorkloadSpec, compose

PREFILL: Final = "+prefill"
"""Family that does the same, but computes prompts on the GPU, layer by layer."""
UPDATE: Final = "+update"
"""Family that, besides, keeps on the GPU what the latest prompt used most."""
SHARED: Final = {16.0: "BF16", 8.0: "FP8"}
"""kt-kernel's methods for weights that CPU and GPU share, by bits: only with these are whole layers copied to the GPU."""
NOT_SHARED: Final = (
    "kt-kernel copies whole layers to the GPU only from weights that the CPU reads, too: of 16 bits (BF16) or 8 (FP8); of 4 "
    "bits (RAWINT4) its README names those of Kimi-K2-Thinking only"
)
EXLLAMAV3_PAGE: Final = 256
"""Tokens by which exllamav3's cache grows (PAGE_SIZE, constants.py of 1.6.5)."""


@dataclass(frozen=True)
class Family:
    """Placements that differ in one number."""

    name: str  # in results
    policy: Callable[[int], Mapping[str, Any]]  # number -> policy with its options, as in an experiment
    # low, high: range of the number
    low: int
    high: int
    more: int  # whether a larger number puts more on the GPU, or less
    never: str = ""  # why no engine can do it in this setting; empty if one can
    kv_page: int = 1  # tokens by which the engine's KV cache grows


def families_of(setting: Setting, *, counted: bool) -> list[Family]:
    """List families that a machine allows; some need activations ``counted`` before."""
    no_vllm = why_not("vllm", setting.hardware)
    whole = {"name": "all-gpu", "engine": "llama.cpp" if no_vllm else "vllm"}
    if not setting.host_computes:  # no processor next to the accelerator
        return [Family("all-gpu", lambda number: whole, 0, 0, 1)]
    families = [Family("all-gpu", lambda number: whole, 0, 0, 1, never=no_vllm or "")]
    if setting.one_memory:
        return families  # copies of experts would take the same memory
    model = setting.model
    families += [
        Family(
            "exllamav3-layers",
            lambda n: {"name": "exllamav3", "cpu_layers": n},
            1,
            model.n_layers,
            -1,
            kv_page=EXLLAMAV3_PAGE,
        ),
        Family(
            "exllamav3-split",
            lambda n: {"name": "exllamav3", "cpu_split": n},
            1,
            model.n_experts - 1,
            -1,
            kv_page=EXLLAMAV3_PAGE,
        ),
    ]
    strategies = {"expert-set": "uniform", "front-expert-set": "front-loading"}
    strategies |= {"frequent-expert-set": "frequency"} if counted else {}
    for name, strategy in strategies.items():
        families += _kt_kernel(name, strategy, setting)
    return families


def _kt_kernel(name: str, strategy: str, setting: Setting) -> list[Family]:
    """One of kt-kernel's strategies, also with its ways of computing prompts."""
    front, some = strategy == "front-loading", setting.model.n_experts - 1

    def family(adds: str, low: int, high: int, **options: Any) -> Family:
        written = {"name": "kt-expert", "strategy": strategy, **options}
        never = NOT_SHARED if adds and not shared_method(setting) else ""
        return Family(name + adds, lambda n: {**written, "gpu_experts": n}, low, high, 1, never)

    found = [family("", 1, some) if front else family("", 0, some + 1)]
    if (rows := threshold(setting.asked)) is not None:
        found.append(family(PREFILL, 1 if front else 0, some, prefill_threshold=rows))
        if not front:
            found.append(family(UPDATE, 1, some, prefill_threshold=rows, dynamic_update=True))
    return found


def threshold(asked: Asked) -> int | None:
    """Rows of a full prompt chunk, computed on the GPU; None if decoding has as many."""
    rows = min(asked.batch * asked.prompt, PREFILL_CHUNK)
    return rows if rows > asked.batch else None


def shared_method(setting: Setting) -> str | None:
    """Name kt-kernel's method for these bits on CPU and GPU; None if it has none."""
    model = setting.model
    whole = setting.asked.gguf is None and model.expert_bytes_by_layer is None
    return SHARED.get(float(model.expert_bits)) if whole else None


@dataclass(frozen=True)
class Shipped:
    """One of them."""

    family: str  # in results
    policy: Mapping[str, Any]  # as in an experiment
    what: str  # where experts are, in words


SHIPPED: Final = (
    Shipped(
        "llama-cpp-cache",
        {"name": "llama-cpp-cache"},
        "experts of all layers in host memory, those used last in a cache on the GPU, which computes them",
    ),
    Shipped(
        "llama-cpp-class-lru",
        {"name": "llama-cpp-cache", "eviction": "class-lru"},
        "experts of all layers in host memory, those used last or often in a cache on the GPU, which computes them",
    ),
    Shipped(
        "freetoken-offload",
        {"name": "freetoken", "backend": "offload"},
        "experts of all layers in host memory, those used last in a cache on the GPU, which computes all",
    ),
    Shipped(
        "freetoken-hybrid",
        {"name": "freetoken", "backend": "hybrid"},
        "experts of all layers in host memory, those used last in a cache on the GPU; link and CPU share what is missing",
    ),
)


@dataclass(frozen=True)
class Misfit:
    """A placement that does not fit: on which side, and why."""

    gpu: bool
    why: str


@dataclass(frozen=True, eq=False)  # a space makes each once, so identity distinguishes them
class Candidate:
    """One placement or policy that fits."""

    family: str  # an engine's way of placing
    number: int | None  # the family's number
    policy: Mapping[str, Any]  # as in an experiment
    gpu_experts: int  # experts of all layers that are on the GPU at the start
    # gpu_bytes, host_bytes: what it needs, with a KV cache for the whole context
    gpu_bytes: int
    host_bytes: int
    slots: int = 0  # experts that its cache has room for; 0: it has none
    budget: int | None = None  # bytes of the GPU that its cache fills next to all else; None: the placement says what is there

    @property
    def title(self) -> str:
        return self.family if self.number is None else f"{self.family} {self.number}"


class Space:
    """All candidates of a setting, and whether they fit."""

    def __init__(self, setting: Setting, routing: Routing) -> None:
        self.setting = setting
        self.routing = routing
        self._workload = compose(routing.trace, self.workload_spec(setting.asked.decode))
        self._known: dict[tuple[str, int], Candidate | Misfit] = {}

    def workload_spec(self, decode: int) -> WorkloadSpec:
        asked = self.setting.asked
        return WorkloadSpec(batch_size=asked.batch, prompt_tokens=asked.prompt, decode_tokens=decode, prefill_chunk=PREFILL_CHUNK)

    @property
    def families(self) -> list[Family]:
        return families_of(self.setting, counted=not lacks(self.routing.trace, ["table:activation_frequency"]))

    def candidate(self, family: Family, number: int) -> Candidate | Misfit:
        key = (family.name, number)
        if key not in self._known:
            self._known[key] = self._placed(family, number)
        return self._known[key]

    def feasible(self, family: Family) -> range:
        """Return the numbers that fit; needs are monotonic in the number on either side."""
        numbers = range(family.low, family.high + 1)[:: family.more]  # from the least on the GPU to the most

        def first(answer: Callable[[Candidate | Misfit], bool]) -> int:
            """First place from which on the answer is yes."""
            low, high = 0, len(numbers)
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if answer(self.candidate(family, numbers[middle])) else (middle + 1, high)
            return low

        end = first(lambda one: isinstance(one, Misfit) and one.gpu)
        begin = first(lambda one: not (isinstance(one, Misfit) and not one.gpu))
        return numbers[begin:end]

    def misfit(self, family: Family) -> str:
        least, most = (family.low, family.high)[:: family.more]
        for number in (least, most):
            one = self.candidate(family, number)
            if isinstance(one, Misfit):
                return one.why
        return ""

    @property
    def _twice(self) -> str:
        return f"{self.setting.gpu} and {self.setting.host} share one memory, which would hold copies of experts twice"

    def shipped(self) -> tuple[list[Candidate], dict[str, str]]:
        if not self.setting.host_computes:
            return [], {}
        if self.setting.one_memory:
            return [], dict.fromkeys((one.family for one in SHIPPED), self._twice)
        all_of_them = {one.family: self._filled(one) for one in SHIPPED}
        found = [one for one in all_of_them.values() if isinstance(one, Candidate)]
        return found, {name: one.why for name, one in all_of_them.items() if isinstance(one, Misfit)}

    def _filled(self, shipped: Shipped) -> Candidate | Misfit:
        setting, written = self.setting, shipped.policy
        policy: Any = make_policy(written)
        if why := why_not(policy.engine, setting.hardware):
            return Misfit(True, why)
        budget = setting.vram_bytes - setting.spare_kv_bytes
        if lacking := _lacking_transfer(policy, setting):
            return Misfit(True, lacking)
        try:
            slots = slots_within(
                budget, setting.model, self._costs(policy), self._workload, policy, self._tables(policy), str(written["name"])
            )
        except InputError as error:  # too large, or the machine lacks what the policy needs
            return Misfit(True, _short(error))
        one = self._check(shipped.family, None, written, slots)
        return replace(one, slots=slots, budget=budget) if isinstance(one, Candidate) else one

    def _placed(self, family: Family, number: int) -> Candidate | Misfit:
        made: Any = make_policy(family.policy(number))
        if why := family.never or why_not(made.engine, self.setting.hardware):
            return Misfit(True, why)
        units = self.setting.model.n_layers * self.setting.model.n_experts
        return self._check(family.name, number, family.policy(number), units, kv_page=family.kv_page)

    def _check(
        self, name: str, number: int | None, written: Mapping[str, Any], slots: int, kv_page: int = 1
    ) -> Candidate | Misfit:
        setting = self.setting
        policy: Any = make_policy(written)
        try:
            placement = initial_placement(
                setting.model, self._costs(policy), self._workload, policy, {setting.gpu: slots}, self._tables(policy)
            )
        except InputError as error:
            return Misfit(True, _short(error))
        needed = required_bytes(setting.model, setting.hardware, setting.kv_tokens, placement, setting.asked.batch)
        needed[setting.gpu]["kv"] = (
            needed[setting.gpu].get("kv", 0) + -setting.kv_tokens % kv_page * setting.model.kv_bytes_per_token
        )
        gpu, host = (sum(needed[name].values()) for name in (setting.gpu, setting.host))
        for what, need, have in ((setting.host, host, setting.ram_bytes), (setting.gpu, gpu, setting.vram_bytes)):
            if need > have and not lacking(needed[what], have, placement):
                return Misfit(what == setting.gpu, f"needs {gib(need)} on {what}, which has {gib(have)}: {sum_of(needed[what])}")
        if setting.one_memory and gpu + host > setting.ram_bytes:
            return Misfit(
                True, f"needs {gib(gpu + host)} of the one memory of {setting.gpu} and {setting.host}, {gib(setting.ram_bytes)}"
            )
        on_gpu = sum(len(copy.experts) for copy in placement.copies if copy.device == setting.gpu)
        return Candidate(name, number, written, on_gpu, gpu, host)

    def _costs(self, policy: Any) -> CostModel:
        model, hardware = self.setting.model, self.setting.hardware
        return CostModel.of(policy, model, hardware, transfer_of(policy, model, hardware))

    def _tables(self, policy: Any) -> dict[str, Any]:
        tables = self.routing.trace.tables
        return {name: table for name, table in tables.items() if f"table:{name}" in policy.needs}


def gib(n_bytes: float) -> str:
    """Write a size the way --vram and --ram are given.

    >>> gib(12 * 2**30)
    '12 GiB'
    """
    return f"{digits(n_bytes / 2**30)} GiB"


def _lacking_transfer(policy: Any, setting: Setting) -> str:
    """Name the link's curve that a policy's transfers need and the profile lacks."""
    own = policy.transfer(setting.model) if hasattr(policy, "transfer") else None
    link = next((one for one in setting.hardware.links if (one.src, one.dst) == (setting.host, setting.gpu)), None)
    if own is None or link is None or own[0] in link.curves:
        return ""
    return (
        f"it copies experts as '{own[0]}', and the profile has no such curve for {link.name} (it has "
        f"{', '.join(link.curves)}); 'moesim profile measure' measures one"
    )


def _short(error: InputError) -> str:
    return " ".join(str(error).split()).partition(" [policy=")[0]


def experiment_of(setting: Setting, trace: Any, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """Write candidates with one budget as an experiment."""
    asked = setting.asked
    # A placement that says itself what is on the GPU is granted all slots: the machine's memory, which is --vram, bounds it.
    cache: dict[str, Any] = {"ratio": 1.0} if candidates[0].budget is None else {"budget": candidates[0].budget}
    return {
        "model": setting.model_ref,
        "hardware": setting.hardware_ref,
        "trace": trace,
        "workload": {
            "batch_size": asked.batch, "prompt_tokens": asked.prompt, "decode_tokens": asked.decode,
            "prefill_chunk": PREFILL_CHUNK,
        },
        "cache": cache,
        "policies": [dict(one.policy) for one in candidates],
        "timeline": None,
    }  # fmt: skip
