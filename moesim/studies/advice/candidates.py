"""What there is to choose from: placements of engines that exist, with one number to vary, and policies of papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from moesim.capacity import required_bytes
from moesim.errors import InputError
from moesim.experiment.runner import initial_placement, slots_within
from moesim.hardware.costs import CostModel
from moesim.policies.registry import make_policy
from moesim.studies.advice.families import Family, families_of
from moesim.studies.advice.routing import Routing
from moesim.studies.advice.setting import PREFILL_CHUNK, Setting
from moesim.studies.advice.shipped import SHIPPED, Shipped
from moesim.trace.workload import WorkloadSpec, compose

if TYPE_CHECKING:
    from moesim.policy import Placement

PAPERS: Final = ("fiddler", "lru", "dali", "hybrimoe-paper", "prescope")
LOSSY: Final = ("daop-paper", "daop-code")
"""Policies that change what the model computes."""

STAND_INS: Final = {"learned": "residual"}
"""Who answers for a predictor where the routing has no recording of it."""


@dataclass(frozen=True)
class Misfit:
    """A placement that does not fit: on which side, and why."""

    gpu: bool
    why: str


@dataclass(frozen=True, eq=False)  # a space makes each once, so identity tells them apart
class Candidate:
    """One placement or policy that fits."""

    family: str  # an engine's way of placing, or the name of a paper's policy
    number: int | None  # the family's number
    policy: Mapping[str, Any]  # as in an experiment
    runnable: bool  # an engine of the table can do this
    gpu_experts: int  # experts of all layers that are on the GPU at the start
    # gpu_bytes, host_bytes: what it needs, with a KV cache for the whole context
    gpu_bytes: int
    host_bytes: int
    note: str = ""  # what a reader must know; may be empty
    slots: int = 0  # experts that its cache has room for; 0: it has none
    budget: int | None = None  # bytes of the GPU that its cache fills beside all else; None: the placement says what is there

    @property
    def title(self) -> str:
        """Its name in a word and its number."""
        return self.family if self.number is None else f"{self.family} {self.number}"

    @property
    def kind(self) -> str:
        """Its family, without what that adds to another one."""
        return self.family.partition("+")[0]


class Space:
    """All candidates of a setting, and whether they fit."""

    def __init__(self, setting: Setting, routing: Routing) -> None:
        self.setting = setting
        self.routing = routing
        self._workload = compose(routing.groups[0], self.workload_spec(setting.asked.decode))
        self._known: dict[tuple[str, int], Candidate | Misfit] = {}

    def workload_spec(self, decode: int) -> WorkloadSpec:
        """Describe the requests of a group."""
        asked = self.setting.asked
        return WorkloadSpec(batch_size=asked.batch, prompt_tokens=asked.prompt, decode_tokens=decode, prefill_chunk=PREFILL_CHUNK)

    @property
    def families(self) -> list[Family]:
        """Ways of placing that engines have; whether they fit is another question."""
        return families_of(self.setting, counted=self.routing.has(frozenset({"table:activation_frequency"})) is None)

    def candidate(self, family: Family, number: int) -> Candidate | Misfit:
        """Give one placement, or say why it does not fit."""
        key = (family.name, number)
        if key not in self._known:
            self._known[key] = self._placed(family, number)
        return self._known[key]

    def feasible(self, family: Family) -> range:
        """Give the numbers of a family with which it fits: what it needs on either side grows or shrinks with the number."""
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
        """Say why no placement of a family fits: what the one nearest to fitting lacks."""
        least, most = (family.low, family.high)[:: family.more]
        for number in (least, most):
            one = self.candidate(family, number)
            if isinstance(one, Misfit):
                return one.why
        return ""

    def papers(self) -> tuple[list[Candidate], dict[str, str]]:
        """Give the policies of papers that fit, each with as large a cache as does, and why others are left out."""
        found, left_out = [], {}
        for name in (*PAPERS, *(LOSSY if self.setting.asked.lossy else ())):
            made: Any = make_policy(name)
            lacking, note = self.routing.has(made.needs), ""
            if lacking == "signal:learned" and self.routing.has(frozenset({"signal:residual"})) is None:
                lacking, note = None, "its learned predictor is answered by the signal 'residual'"
            if lacking is not None:
                left_out[name] = f"needs {lacking}, which the routing has not for every request; give another with --trace"
                continue
            one = self._filled(name, {"name": name}, note=note)
            if isinstance(one, Misfit):
                left_out[name] = one.why
            else:
                found.append(one)
        return found, left_out

    def shipped(self) -> tuple[list[Candidate], dict[str, str]]:
        """Give the systems of released engines that fill the GPU's memory, and why others are left out."""
        if not self.setting.host_computes:
            return [], {}
        all_of_them = {one.family: self._filled(one.family, one.policy, one) for one in SHIPPED}
        found = [one for one in all_of_them.values() if isinstance(one, Candidate)]
        return found, {name: one.why for name, one in all_of_them.items() if isinstance(one, Misfit)}

    def _filled(
        self, name: str, written: Mapping[str, Any], shipped: Shipped | None = None, note: str = ""
    ) -> Candidate | Misfit:
        setting = self.setting
        policy: Any = make_policy(written)
        budget = setting.vram_bytes - setting.spare_kv_bytes - (shipped.margin_bytes if shipped else 0)
        if lacking := _lacking_transfer(policy, setting):
            return Misfit(True, lacking)
        try:
            slots = slots_within(
                budget, setting.model, self._costs(policy), self._workload, policy, self._tables(policy), str(written["name"])
            )
        except InputError as error:  # too large, or the machine lacks what the policy needs
            return Misfit(True, _short(error))
        one = self._check(name, None, written, shipped is not None, slots, shipped is not None and shipped.frees, note)
        return replace(one, slots=slots, budget=budget) if isinstance(one, Candidate) else one

    def _placed(self, family: Family, number: int) -> Candidate | Misfit:
        if family.never:
            return Misfit(True, family.never)
        units = self.setting.model.n_layers * self.setting.model.n_experts
        return self._check(family.name, number, family.policy(number), True, units, family.frees, kv_page=family.kv_page)

    def _check(
        self, name: str, number: int | None, written: Mapping[str, Any], runnable: bool, slots: int, frees: bool, note: str = "",
        kv_page: int = 1,
    ) -> Candidate | Misfit:  # fmt: skip
        setting = self.setting
        policy: Any = make_policy(written)
        try:
            placement = initial_placement(
                setting.model, self._costs(policy), self._workload, policy, {setting.gpu: slots}, self._tables(policy)
            )
        except InputError as error:
            return Misfit(True, _short(error))
        gpu, host = self._needs(placement, frees)
        gpu += -setting.kv_tokens % kv_page * setting.model.kv_bytes_per_token
        for what, need, have in ((setting.host, host, setting.ram_bytes), (setting.gpu, gpu, setting.vram_bytes)):
            if need > have:
                return Misfit(what == setting.gpu, f"needs {gib(need)} on {what}, which has {gib(have)}")
        on_gpu = sum(len(copy.experts) for copy in placement.copies if copy.device == setting.gpu)
        return Candidate(name, number, written, runnable, on_gpu, gpu, host, note)

    def _needs(self, placement: Placement, frees: bool) -> tuple[int, int]:
        """Bytes on the GPU and on the host, with a KV cache for the whole context."""
        setting, model = self.setting, self.setting.model
        need = required_bytes(model, setting.hardware, setting.kv_tokens, placement)
        gpu, host = sum(need[setting.gpu].values()), sum(need[setting.host].values())
        if frees:
            host -= sum(len(copy.experts) * model.expert_bytes(copy.layer) for copy in placement.copies)
        return gpu, host

    def _costs(self, policy: Any) -> CostModel:
        own = policy.transfer(self.setting.model) if hasattr(policy, "transfer") else None
        curve, chunk = own or ("pinned", None)
        return CostModel(self.setting.model, self.setting.hardware, transfer=curve, chunk_bytes=chunk)

    def _tables(self, policy: Any) -> dict[str, Any]:
        tables = self.routing.groups[0].tables
        return {name: table for name, table in tables.items() if f"table:{name}" in policy.needs}


def gib(n_bytes: float) -> str:
    """Write a size the way --vram and --ram are given.

    >>> gib(12 * 2**30)
    '12 GiB'
    """
    return f"{n_bytes / 2**30:.3g} GiB"


def _lacking_transfer(policy: Any, setting: Setting) -> str:
    """Say which curve of the link the policy's own transfers need and the profile has not; empty if it lacks none."""
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


def experiment_of(setting: Setting, trace: Any, candidates: Sequence[Candidate], decode: int) -> dict[str, Any]:
    """Write candidates with one budget as an experiment."""
    asked = setting.asked
    # A placement that says itself what is on the GPU is granted all slots: the machine's memory, which is --vram, bounds it.
    cache: dict[str, Any] = {"ratio": 1.0} if candidates[0].budget is None else {"budget": candidates[0].budget}
    return {
        "model": setting.model_ref,
        "hardware": setting.hardware_ref,
        "trace": trace,
        "workload": {
            "batch_size": asked.batch, "prompt_tokens": asked.prompt, "decode_tokens": decode, "prefill_chunk": PREFILL_CHUNK
        },
        "cache": cache,
        "policies": [dict(one.policy) for one in candidates],
        "timeline": None,
    }  # fmt: skip
