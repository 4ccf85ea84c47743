"""Shipped policies decide as their rules say, or as an exception says; and a policy that decides otherwise is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

from moesim.api.run import load_trace
from moesim.cli.main import main
from moesim.engine import simulate
from moesim.errors import ConfigError
from moesim.hardware import load_hardware
from moesim.hardware.costs import CostModel
from moesim.model import load_model
from moesim.policies.cpu_cache import Bank
from moesim.policies.parts import Unit
from moesim.policies.parts import assignment as assigning
from moesim.policies.parts.adaptive import Arc, ArcVictim, S3Fifo, S3FifoVictim
from moesim.policies.parts.assignment import FixedThreshold
from moesim.policies.parts.prefetch import TopPredicted
from moesim.policies.parts.replacement import FIFO, LFU, LRU, Belady, RandomVictim, Static, WorkloadAware
from moesim.policies.registry import make_policy
from moesim.policies.systems.adapmoe import AdapMoE
from moesim.policies.systems.colibri import Colibri
from moesim.policies.systems.daop import DaopCode, DaopPaper
from moesim.policies.systems.dfa_cache import DfaCache
from moesim.policies.systems.edgemoe import LeastStale
from moesim.policies.systems.fabric_lru import FabricLru
from moesim.policies.systems.fate import Fate
from moesim.policies.systems.fiddler import Fiddler
from moesim.policies.systems.finemoe import FineMoE
from moesim.policies.systems.freetoken import FreeToken
from moesim.policies.systems.heat_cache import HeatCache
from moesim.policies.systems.hobbit import Hobbit
from moesim.policies.systems.hybrimoe import MRS, HybriMoECode, HybriMoEPaper, Queues, TwoEnded
from moesim.policies.systems.klotski import Klotski
from moesim.policies.systems.least_stale import LeastStaleByGeneration
from moesim.policies.systems.llama_cpp_cache import LlamaCppCache
from moesim.policies.systems.llama_cpp_ssd import LlamaCppSsd
from moesim.policies.systems.lookahead import MinBypass, WindowedBelady
from moesim.policies.systems.mixtral_offloading import MixtralOffloading
from moesim.policies.systems.mixtral_offloading_spec import MixtralOffloadingSpec
from moesim.policies.systems.moe_infinity import MoEInfinityCode, MoEInfinityPaper
from moesim.policies.systems.od_moe import OdMoE
from moesim.policies.systems.on_demand import OnDemand
from moesim.policies.systems.pooled_cache import PooledCache, TurboQuantCache
from moesim.policies.systems.pre_gated import PreGated
from moesim.policies.systems.prescope import PreScope
from moesim.policies.systems.strata import Strata
from moesim.policies.systems.two_uploads_lru import TwoUploadsLru
from moesim.policies.systems.vllm_expert_cache import VllmExpertCache
from moesim.policy import Fetch, Placement, Predicted, Routed, Run, View
from moesim.testing.rules import RuleCheck, examine_rules
from moesim.testing.rules.facts import Facts
from moesim.testing.rules.judging import RULES, judge
from moesim.trace.predictors import PredictorSet
from moesim.trace.workload import WorkloadSpec, compose

Make = Callable[[], Any]


COMPOSED = list(
    product(
        ("lru", "fifo", "lfu", "random", "mrs", "belady", "arc", "s3-fifo", "least-stale-2gen", "static", "workload-aware"),
        ("per-layer", "global"),
        ("none", {"name": "predicted", "source": "signal:gate_next1", "size": 2}),
        ("all-gpu", "greedy", "queues", "threshold"),
        ("id", "rows"),
    )
)


@pytest.mark.long
@pytest.mark.parametrize("parts", COMPOSED, ids=str)
def test_compositions_decide_as_their_parts_say(parts: tuple[Any, ...]) -> None:
    spec = dict(zip(("replacement", "scope", "prefetch", "assignment", "load_order"), parts, strict=True))
    if parts[0] in ("static", "workload-aware") and spec["scope"] == "per-layer":
        del spec["scope"]
    try:
        make_policy({"name": "composed", **spec})
    except ConfigError:
        pytest.skip("these parts do not go together")
    assert [str(one) for one in examine_rules(lambda: make_policy({"name": "composed", **spec})) if one.verdict == "failed"] == []


def _found(checks: list[RuleCheck], kind: str) -> int:
    """Count the decisions of a kind that are not what the rule says."""
    return sum(n - ok for check in checks if check.kind == kind for ok, n in check.shares.values())


def _compare(kind: str, right: Make, wrong: Make, least: int = 3) -> None:
    if not isinstance(right, type):  # shipped policies are judged with the page of conformance
        assert not _found(examine_rules(right), kind)
    assert _found(examine_rules(wrong, like=right), kind) >= least


def _with(kind: str, part: type, **options: Any) -> Make:
    """Return a function that makes a composition with one part of a class."""
    return lambda: make_policy({"name": "composed", kind: part(), **options})


def _another(part: type) -> type:
    """Let another idle resident go than the one that the part would."""

    class Another(part):  # type: ignore[misc]
        def victim(self, fetch: Fetch, view: View) -> Unit | None:
            named: Unit | None = super().victim(fetch, view)
            others = view.residents(self._gpu, "cache", fetch.layer if self._per_layer else None)
            units = [(fetch.layer, other) if isinstance(other, int) else other for other in others]
            idle = [unit for unit in units if unit != named and not view.is_in_use(*unit, self._gpu)]
            return named if named is None or not idle else idle[-1]

    return Another


@pytest.mark.parametrize("part", [LRU, FIFO, LFU, MRS, Belady, LeastStale, LeastStaleByGeneration])
def test_a_part_that_lets_another_one_go_is_found(part: type) -> None:
    scope = {"scope": "global"} if part in (LeastStale, LeastStaleByGeneration) else {}
    _compare("eviction", _with("replacement", part, **scope), _with("replacement", _another(part), **scope), 10)


class ForgetsThePast(MRS):
    def start(self, *given: Any) -> None:
        super().start(*given)
        self._recent._alpha = 1.0


class IdleFirst(MRS):
    """Passes over what is in use, as the engine once asked of every part."""

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        units = sorted(self.members(fetch.layer), key=lambda unit: self._recent.of(unit[0])[unit[1]])
        idle = (unit for unit in units if view.is_resident(*unit, self._gpu) and not view.is_in_use(*unit, self._gpu))
        if (found := next(idle, None)) is not None:
            del self.members(fetch.layer)[found]
        return found


def test_who_became_idle_first_is_no_victim_by_score() -> None:
    """A prompt of HybriMoE's paper on recorded routing, a quarter of the experts cached."""
    trace = load_trace("mini-mixtral")
    model, machine = load_model({"base": "mixtral-8x7b", "expert_bits": 4}), load_hardware("rtx3090-epyc7532")
    workload = compose(trace, WorkloadSpec(batch_size=1, prompt_tokens=64, decode_tokens=1))
    counts = []
    for part in (MRS, IdleFirst):
        policy, placed = make_policy({"name": "hybrimoe-paper", "prefetch": "none", "replacement": part()}), list[Placement]()
        costs, sources = CostModel(model, machine), PredictorSet(trace, workload, {}, 0)
        records = simulate(
            model=model, costs=costs, workload=workload, policy=policy, cache_slots={"gpu0": 64}, placed=placed.append
        )
        facts = Facts(records, workload, placed[0], model, costs, {}, sources)
        judged = judge(make_policy({"name": "hybrimoe-paper", "prefetch": "none"}), facts)
        counts.append([one.ok for one in judged if one.kind == "eviction" and one.phase == "prefill"])
    assert len(counts[0]) > 100
    assert all(counts[0])
    assert sum(counts[1]) < 0.2 * len(counts[1])


class DrawsTheRouted(RandomVictim):
    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        there = [unit for unit in self.members(fetch.layer) if view.is_resident(*unit, self._gpu)]
        found = max(there, key=lambda unit: unit in self._visit.units, default=None)
        self.members(fetch.layer).pop(found, None)  # type: ignore[arg-type]
        return found


class LowestId(LFU):
    def _rank(self, unit: Unit) -> Any:
        return unit[1], 0


class OtherGhosts(ArcVictim):
    def _directory(self, slots: int) -> Any:
        return S3Fifo(slots)


class NoQueues(S3FifoVictim):
    def _directory(self, slots: int) -> Any:
        return Arc(slots)


@pytest.mark.parametrize(
    ("part", "wrong"),
    [(MRS, ForgetsThePast), (LFU, LowestId), (ArcVictim, OtherGhosts), (S3FifoVictim, NoQueues), (RandomVictim, DrawsTheRouted)],
)
def test_a_part_that_ranks_otherwise_is_found(part: type, wrong: type) -> None:
    _compare("eviction", _with("replacement", part), _with("replacement", wrong))


class MostUsed(MoEInfinityCode):
    def lowest(self, may_go: Any) -> Unit | None:
        self._visits *= -1
        found = super().lowest(may_go)
        self._visits *= -1
        return found


class ByUseAlone(MoEInfinityPaper):
    def lowest(self, may_go: Any) -> Unit | None:
        return MoEInfinityCode.lowest(self, may_go)


class ByVisits(FineMoE):
    def _scores(self) -> Any:
        return self._visits


class GuessesLast(AdapMoE):
    def _plan(self, layer: int, active: Any) -> Any:
        return MixtralOffloading._plan(self, layer, active[::-1])


class HighestFirst(Hobbit):
    def evict(self, fetch: Fetch, view: View) -> Any:
        self._weights = self._weights._replace(lru=-1.0, fld=-1.0)
        return super().evict(fetch, view)


class NotTheOldest(MixtralOffloading):
    def _plan(self, layer: int, active: Any) -> Any:
        self._order[layer] = (*self._order[layer][1:], *self._order[layer][:1])
        return super()._plan(layer, active)


def _last_of_the_bank(system: type) -> type:
    class Last(system):  # type: ignore[misc]
        def _victim(self, bank: Bank) -> Unit | None:
            return max(self._idle(bank), default=None)

    return Last


class AnyScore(DfaCache):
    def _admitted(self, unit: Unit, bank: Bank) -> bool:
        return True


class OneMissIsEnough(PooledCache):
    def _wanted_misses(self, bank: Bank) -> int:
        return 1


class OldestMisses(TwoUploadsLru):
    def on_step_begin(self, event: Any, view: View) -> Any:
        self._seen = [dict.fromkeys(reversed(seen)) for seen in self._seen]
        return super().on_step_begin(event, view)


class TakesAllMisses(FreeToken):
    def _n_now(self, *given: Any) -> int:
        return 8


class MostChosen(LlamaCppSsd):
    def _count(self, layer: int, experts: Any) -> None:
        self._layers[layer].counts = [n - (e in experts) for e, n in enumerate(self._layers[layer].counts)]


class NeverCounts(Colibri):
    def on_routed(self, event: Any, view: View) -> Any:
        self._clock = 0
        return super().on_routed(event, view)


class EmptiesTheNewest(TwoUploadsLru):
    def _empty(self, layer: int) -> Any:
        for slot, stamp in enumerate(self._slots[layer]._stamps):
            self._slots[layer]._stamps[slot] = -stamp
        return super()._empty(layer)


class Hotter(HeatCache):
    def place(self, view: View) -> Any:
        placement = super().place(view)
        for one in self._layers:
            setattr(one, "leaves", lambda hyst, dwell, one=one: max(one.there, default=None))  # noqa: B010
        return placement


class TakesAll(MinBypass):
    def _next_use(self, event: Any, expert: int) -> int:
        return expert


class ShortSight(WindowedBelady):
    def _next_use(self, event: Any, expert: int) -> int:
        return expert


class ByRankReversed(Fate):
    def on_routed(self, event: Any, view: View) -> Any:
        return super().on_routed(event._replace(experts=event.experts[::-1, ::-1]), view)


class HotStays(DaopPaper):
    def _decide_swaps(self, event: Any, view: View) -> list[tuple[int, int]]:
        given, self.swap_factor = self.swap_factor, 3.0
        try:
            return super()._decide_swaps(event, view)
        finally:
            self.swap_factor = given


class OwnGates(DaopPaper):
    def _ask(self, event: Any, view: View) -> list[Any]:
        super()._ask(event, view)
        return []


class HotStaysToo(DaopCode, HotStays):  # type: ignore[valid-type,misc]
    pass


class SecondWindow(WorkloadAware):
    def used(self, event: Any) -> None:
        super().used(event)
        self._scores[event.layer].reverse()


BANKS = (DfaCache, PooledCache, TurboQuantCache, LlamaCppCache, FabricLru)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("eviction", MoEInfinityCode, MostUsed),
        ("eviction", MoEInfinityPaper, ByUseAlone),
        ("eviction", FineMoE, ByVisits),
        ("eviction", MixtralOffloading, NotTheOldest),
        ("eviction", Hobbit, HighestFirst),
        ("eviction", HybriMoECode, partial(HybriMoECode, credit="own")),
        ("eviction", AdapMoE, GuessesLast),
        *[("eviction", one, _last_of_the_bank(one)) for one in BANKS],
        ("admission", DfaCache, AnyScore),
        ("admission", PooledCache, OneMissIsEnough),
        ("admission", partial(TwoUploadsLru, inserts=1), partial(OldestMisses, inserts=1)),
        ("eviction", partial(TwoUploadsLru, early=True), partial(EmptiesTheNewest, early=True)),
        ("eviction", LlamaCppSsd, MostChosen),
        ("eviction", partial(Colibri, cap=3), partial(NeverCounts, cap=3)),
        ("admission", Strata, partial(Strata, adapt_every=2)),
        ("eviction", Strata, partial(Strata, adapt_decay=1.0, adapt_margin=0.0)),
        ("assignment", Strata, partial(Strata, pcie_frac=1.0)),
        ("eviction", VllmExpertCache, partial(VllmExpertCache, eviction="ewma")),
        ("admission", VllmExpertCache, partial(VllmExpertCache, split="expert")),
        ("admission", FreeToken, TakesAllMisses),
        ("assignment", FreeToken, TakesAllMisses),
        ("eviction", HeatCache, Hotter),
        ("eviction", MinBypass, TakesAll),
        ("eviction", WindowedBelady, ShortSight),
        ("eviction", partial(Fate, shallow_layers=0), partial(ByRankReversed, shallow_layers=0)),
        ("eviction", DaopPaper, HotStays),
        ("eviction", DaopCode, HotStaysToo),
        ("assignment", DaopPaper, OwnGates),
        ("assignment", DaopPaper, partial(DaopPaper, degrade=False)),
        ("assignment", DaopCode, partial(DaopCode, degrade=False)),
        ("eviction", _with("replacement", WorkloadAware), _with("replacement", SecondWindow)),
    ],
)
def test_a_system_that_decides_otherwise_is_found(kind: str, right: Make, wrong: Make) -> None:
    _compare(kind, right, wrong)


def _elsewhere(part: type) -> type:
    """Give one expert of a layer to the other device."""

    class Elsewhere(part):  # type: ignore[misc]
        uses_cpu = True

        def assign(self, layer: int, loads: Any, waiting: Any) -> Any:
            plan = super().assign(layer, loads, waiting)
            if layer == 1 and plan.gpu:
                return plan._replace(gpu=plan.gpu[1:], cpu=(*plan.cpu, plan.gpu[0]), loads=())
            return plan._replace(gpu=(*plan.gpu, plan.cpu[0]), cpu=plan.cpu[1:], loads=()) if layer == 2 and plan.cpu else plan

    return Elsewhere


ASSIGNING = (
    assigning.AllGpu, assigning.AllCpu, assigning.Resident, assigning.ResidentInDecode, assigning.Threshold, assigning.Greedy,
    FixedThreshold, Queues, TwoEnded,
)  # fmt: skip


@pytest.mark.parametrize("part", ASSIGNING)
def test_an_assignment_to_the_other_device_is_found(part: type) -> None:
    _compare("assignment", _with("assignment", part), _with("assignment", _elsewhere(part)), 20)


class LoadsMatterNot(assigning.Greedy):
    def assign(self, layer: int, loads: Any, waiting: Any) -> Any:
        return super().assign(layer, loads, [0] * len(loads))


class LongestFirst(Queues):
    @property
    def reading(self) -> Any:
        return super().reading._replace(timeline="free")


@pytest.mark.parametrize(("part", "wrong"), [(assigning.Greedy, LoadsMatterNot), (Queues, LongestFirst)])
def test_a_plan_by_other_costs_is_found(part: type, wrong: type) -> None:
    _compare("assignment", _with("assignment", part), _with("assignment", wrong))


class OnTheCpu(OnDemand):
    def decide(self, event: Any, view: View) -> Any:
        return [Run(1, event.active, "cpu0")] if type(event) is Routed and event.layer == 1 else super().decide(event, view)


class Upside(Fiddler):
    def place(self, view: View) -> Any:
        placement = super().place(view)
        self._waiting = [[1 << 40] * len(of_layer) for of_layer in self._waiting]
        return placement


class NextGroup(OdMoE):
    def _team(self, layer: int) -> Any:
        return super()._team(layer + 1)


class Coldest1st(PreScope):
    def on_routed(self, event: Any, view: View) -> Any:
        return super().on_routed(event._replace(rows=[max(event.rows) + 1 - n if n else 0 for n in event.rows]), view)


@pytest.mark.parametrize(
    ("right", "wrong"), [(OnDemand, OnTheCpu), (Fiddler, Upside), (OdMoE, NextGroup), (PreScope, Coldest1st)]
)
def test_a_system_that_computes_elsewhere_is_found(right: Make, wrong: Make) -> None:
    _compare("assignment", right, wrong)


class Coldest(TopPredicted):
    def choose(self, event: Predicted, view: View) -> Any:
        return super().choose(event._replace(ids=(event.ids + 1) % view.model.n_experts), view)


def _shifted(system: type) -> type:
    """Take the next expert for each that is predicted."""

    class Shifted(system):  # type: ignore[misc]
        def decide(self, event: Any, view: View) -> Any:
            if type(event) is Predicted:
                event = event._replace(ids=(event.ids + 1) % view.model.n_experts)
            return super().decide(event, view)

    return Shifted


@pytest.mark.parametrize("system", [AdapMoE, MixtralOffloadingSpec, PreGated, Fate, HybriMoEPaper, PreScope, OdMoE])
def test_a_system_that_fetches_another_expert_ahead_is_found(system: type) -> None:
    _compare("prefetch", system, _shifted(system))


class LearnsOthers(Klotski):
    def _learn(self, layer: int, experts: Any) -> None:
        super()._learn(layer, (experts + 1) % len(self._first))


def test_other_hot_experts_are_found() -> None:
    _compare("prefetch", Klotski, LearnsOthers)


def test_a_part_that_fetches_another_expert_ahead_is_found() -> None:
    def make(cls: type) -> Make:
        return lambda: make_policy({"name": "composed", "prefetch": cls(source="signal:gate_next1", size=2)})

    _compare("prefetch", make(TopPredicted), make(Coldest))


class Caches(Static):
    admits = True

    def victim(self, fetch: Fetch, view: View) -> Unit | None:
        idle = (e for e in range(view.model.n_experts) if not view.is_in_use(fetch.layer, e, "gpu0"))
        return next(((fetch.layer, e) for e in idle if view.is_resident(fetch.layer, e, "gpu0")), None)


def test_what_enters_a_static_cache_is_found() -> None:
    _compare("admission", _with("replacement", Static), _with("replacement", Caches))


def test_check_prints_what_was_judged(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "lru,background-cache"]) == 0
    lines = capsys.readouterr().out.splitlines()
    [evictions] = [line for line in lines if line.startswith("passed   evictions as its rule says: prefill ")]
    assert ", decode " in evictions
    assert any(line.startswith("no rule  it is nobody's system") for line in lines)


def test_check_fails_where_a_rule_is_not_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(RULES, "LRU", RULES["FIFO"])
    assert main(["check", "lru"]) == 1
    out, err = capsys.readouterr()
    assert "failed   evictions as its rule says: " in out
    assert "first: at " in out
    assert err == "moesim: LRU() evictions: not what its rule says\n"
