"""Names of policies and parts: shipped ones, entry points, and ``package.module:Class``.

A third party adds a policy without an edit here, by naming its class in the YAML, or by an entry point in its own
``pyproject.toml``::

    [project.entry-points."moesim.policies"]
    my-policy = "my_package.my_module:MyPolicy"
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from moesim.core.own_code import check_target, import_class
from moesim.errors import ConfigError, MoesimError, describe_exception, mistyped, unknown_name
from moesim.policies.options import Declared, construct, misspelt, options_of, wrong_declaration, wrong_needs
from moesim.policies.parts import AssignmentPart, PlacementPart, PrefetchPart, ReplacementPart
from moesim.policy import Policy

GROUP = "moesim.policies"

POLICIES: dict[str, str] = {
    "adapmoe": "moesim.policies.systems.adapmoe:AdapMoE",
    "all-cpu": "moesim.policies.systems.all_cpu:AllCpu",
    "all-gpu": "moesim.policies.systems.all_gpu:AllGpu",
    "background-cache": "moesim.policies.cpu_cache:BackgroundCache",
    "belady": "moesim.policies.systems.caches:Belady",
    "composed": "moesim.policies.composed:Composed",
    "colibri": "moesim.policies.systems.colibri:Colibri",
    "dali": "moesim.policies.systems.dali:Dali",
    "dali-multi-gpu": "moesim.policies.systems.dali_multi_gpu:DaliMultiGpu",
    "daop-code": "moesim.policies.systems.daop:DaopCode",
    "daop-paper": "moesim.policies.systems.daop:DaopPaper",
    "deepspeed-mii-in-daop": "moesim.policies.systems.as_compared:DeepSpeedMIIInDaop",
    "dfa-cache": "moesim.policies.systems.dfa_cache:DfaCache",
    "edgemoe": "moesim.policies.systems.edgemoe:EdgeMoE",
    "fabric-lru": "moesim.policies.systems.fabric_lru:FabricLru",
    "exllamav3": "moesim.policies.systems.exllamav3:Exllamav3",
    "fate": "moesim.policies.systems.fate:Fate",
    "fate-in-prescope": "moesim.policies.systems.as_compared:FateInPreScope",
    "fiddler": "moesim.policies.systems.fiddler:Fiddler",
    "fiddler-in-dali": "moesim.policies.systems.as_compared:FiddlerInDali",
    "fifo": "moesim.policies.systems.caches:FIFO",
    "finemoe": "moesim.policies.systems.finemoe:FineMoE",
    "freetoken": "moesim.policies.systems.freetoken:FreeToken",
    "heat-cache": "moesim.policies.systems.heat_cache:HeatCache",
    "hobbit": "moesim.policies.systems.hobbit:Hobbit",
    "hybrimoe-code": "moesim.policies.systems.hybrimoe:HybriMoECode",
    "hybrimoe-in-dali": "moesim.policies.systems.as_compared:HybriMoEInDali",
    "hybrimoe-in-prescope": "moesim.policies.systems.as_compared:HybriMoEInPreScope",
    "hybrimoe-paper": "moesim.policies.systems.hybrimoe:HybriMoEPaper",
    "klotski": "moesim.policies.systems.klotski:Klotski",
    "kt-expert": "moesim.policies.systems.ktransformers:KtExpert",
    "kt-expert-deferral": "moesim.policies.systems.ktransformers:KtExpertDeferral",
    "kt-layer": "moesim.policies.systems.ktransformers:KtLayer",
    "ktransformers-in-dali": "moesim.policies.systems.as_compared:KTransformersInDali",
    "ktransformers-in-hybrimoe": "moesim.policies.systems.as_compared:KTransformersInHybriMoE",
    "least-stale-2gen": "moesim.policies.systems.least_stale:LeastStale2Gen",
    "lfu": "moesim.policies.systems.caches:LFU",
    "llama-cpp": "moesim.policies.systems.llama_cpp:LlamaCpp",
    "llama-cpp-fit": "moesim.policies.systems.llama_cpp:LlamaCppFit",
    "llama-cpp-ssd": "moesim.policies.systems.llama_cpp_ssd:LlamaCppSsd",
    "llama-cpp-cache": "moesim.policies.systems.llama_cpp_cache:LlamaCppCache",
    "llama-cpp-in-dali": "moesim.policies.systems.as_compared:LlamaCppInDali",
    "llama-cpp-in-od-moe": "moesim.policies.systems.as_compared:LlamaCppInOdMoe",
    "lru": "moesim.policies.systems.caches:LRU",
    "min-bypass": "moesim.policies.systems.lookahead:MinBypass",
    "mixtral-offloading": "moesim.policies.systems.mixtral_offloading:MixtralOffloading",
    "mixtral-offloading-spec": "moesim.policies.systems.mixtral_offloading_spec:MixtralOffloadingSpec",
    "moe-gen": "moesim.policies.systems.moe_gen:MoEGen",
    "moe-infinity-code": "moesim.policies.systems.moe_infinity:MoEInfinityCode",
    "moe-infinity-paper": "moesim.policies.systems.moe_infinity:MoEInfinityPaper",
    "moe-lightning": "moesim.policies.systems.moe_lightning:MoELightning",
    "od-moe": "moesim.policies.systems.od_moe:OdMoE",
    "on-demand": "moesim.policies.systems.on_demand:OnDemand",
    "pooled-cache": "moesim.policies.systems.pooled_cache:PooledCache",
    "pipeshard": "moesim.policies.systems.pipeshard:PipeShard",
    "pre-gated": "moesim.policies.systems.pre_gated:PreGated",
    "prescope": "moesim.policies.systems.prescope:PreScope",
    "random": "moesim.policies.systems.caches:RandomCache",
    "s3-fifo": "moesim.policies.systems.caches:S3FifoCache",
    "static": "moesim.policies.systems.caches:StaticCache",
    "strata": "moesim.policies.systems.strata:Strata",
    "windowed-belady": "moesim.policies.systems.lookahead:WindowedBelady",
    "turboquant-cache": "moesim.policies.systems.pooled_cache:TurboQuantCache",
    "two-uploads-lru": "moesim.policies.systems.two_uploads_lru:TwoUploadsLru",
    "vllm-expert-cache": "moesim.policies.systems.vllm_expert_cache:VllmExpertCache",
    "zero-inference": "moesim.policies.systems.zero_inference:ZeroInference",
}

_PARTS: dict[str, dict[str, str]] = {
    "placement": {
        "none": "parts.placement:Empty",
        "random": "parts.placement:Random",
        "lowest-ids": "parts.placement:LowestIds",
        "highest-ids": "parts.placement:HighestIds",
        "frequency-global": "parts.placement:FrequencyGlobal",
        "frequency-per-layer": "parts.placement:FrequencyPerLayer",
    },
    "assignment": {
        "all-gpu": "parts.assignment:AllGpu",
        "all-cpu": "parts.assignment:AllCpu",
        "greedy": "parts.assignment:Greedy",
        "threshold": "parts.assignment:Threshold",
        "fixed-threshold": "parts.assignment:FixedThreshold",
        "exact": "parts.assignment:Exact",
        "beam": "parts.assignment:Beam",
        "resident": "parts.assignment:Resident",
        "resident-in-decode": "parts.assignment:ResidentInDecode",
        "queues": "systems.hybrimoe:Queues",
        "hss": "systems.hybrimoe:TwoEnded",
    },
    "prefetch": {
        "none": "parts.prefetch:NoPrefetch",
        "predicted": "parts.prefetch:TopPredicted",
        "random": "parts.prefetch:RandomAhead",
        "impact-driven": "systems.hybrimoe:ImpactDriven",
        "mrs-score": "systems.hybrimoe:MRSScore",
        "cross-layer": "parts.prefetch:CrossLayer",
    },
    "replacement": {
        "lru": "parts.replacement:LRU",
        "fifo": "parts.replacement:FIFO",
        "lfu": "parts.replacement:LFU",
        "random": "parts.replacement:RandomVictim",
        "mrs": "systems.hybrimoe:MRS",
        "belady": "parts.replacement:Belady",
        "static": "parts.replacement:Static",
        "workload-aware": "parts.replacement:WorkloadAware",
        "arc": "parts.adaptive:ArcVictim",
        "s3-fifo": "parts.adaptive:S3FifoVictim",
        "activation-aware": "systems.moe_infinity:ActivationAware",
        "least-stale": "systems.edgemoe:LeastStale",
        "least-stale-2gen": "systems.least_stale:LeastStaleByGeneration",
    },
}

PARTS = {kind: {name: f"moesim.policies.{target}" for name, target in of.items()} for kind, of in _PARTS.items()}

PROTOCOLS: dict[str, type] = {
    "placement": PlacementPart,
    "assignment": AssignmentPart,
    "prefetch": PrefetchPart,
    "replacement": ReplacementPart,
}
PART_OPTIONS = frozenset({*PROTOCOLS, "scheduler"})
"""Options of policies whose values are parts."""


# ------------------------------------------------------------------------------------------------- policies
@dataclass(frozen=True)
class PolicyInfo:
    """A policy as `moesim list policies --long` prints it.

    Attributes
    ----------
    name : str
        As in the YAML.
    summary : str
        The first line of its docstring.
    paper : str
        The system and its publication; empty for a baseline.
    missing : tuple of str
        What the paper or its code does and this class does not.
    exact : bool
        True if every routed expert is executed on fresh inputs.
    options : mapping of str to object
        Default of each option.
    target : str
        ``package.module:Class``.
    """

    name: str
    summary: str
    paper: str
    missing: tuple[str, ...]
    exact: bool
    options: Mapping[str, Any]
    target: str


def make_policy(spec: str | Mapping[str, Any], place: str = "policies") -> Policy:
    """Build a policy from a name, or from a mapping with ``name`` and its options.

    Parameters
    ----------
    spec : str or mapping
        ``"lru"``, ``{"name": "dali", "w_size": 2}``, or a class as ``"package.module:Class"``.
    place : str
        File and key, for messages.

    Returns
    -------
    Policy
        A new instance.

    Raises
    ------
    ConfigError
        If the name or an option is unknown, an option has a wrong type, the class cannot be imported,
        or it declares ``exact``, ``listens`` or ``needs`` otherwise than the contract asks.

    Examples
    --------
    >>> make_policy({"name": "fiddler", "rule": "code"})
    Fiddler(rule='code')
    """
    if isinstance(spec, str):
        spec = {"name": spec}
    if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
        raise ConfigError(f"{place}: expected a policy name or a mapping with the key name, got {spec!r}")
    name = spec["name"]
    options = {key: value for key, value in spec.items() if key not in ("name", "label")}
    cls = policy_class(name, place)
    if lacking := lacking_of_a_policy(cls):
        got = class_as_policy(name, cls) or f"got none of {', '.join(lacking)} in {cls.__name__}"
        raise ConfigError(
            f"{place}: policy {name}: expected a class with place, decide and evict (see moesim.policy.Policy), {got}"
        )
    try:
        policy = construct(cls, options, f"policy {name}", place, partial(option_of_a_part, cls, options))
    except MoesimError:
        raise
    except Exception as error:
        raise ConfigError(f"{place}: policy {name} raised {describe_exception(error)}") from None
    try:
        wrong = wrong_declaration(policy)  # parts are built from their names here: a wrong one is an error now
    except ConfigError as error:
        raise ConfigError(f"{place}: policy {name}: {error}") from None
    except Exception as error:  # of a property
        raise ConfigError(f"{place}: policy {name} raised {describe_exception(error)}") from None
    if wrong:
        raise ConfigError(f"{place}: policy {name}: {wrong}")
    return cast(Policy, policy)


def policy_class(name: str, place: str = "policies") -> type:
    """Find a policy's class by a registered name, an entry point or ``package.module:Class``."""
    target = target_of(name, place)
    return import_class(target, place if target in (name, POLICIES.get(name)) else f"{place}: entry point {name}")


def target_of(name: str, place: str = "policies") -> str:
    """Return a policy's class as ``package.module:Class``, without importing it."""
    target = POLICIES.get(name) or (name if ":" in name else None)
    if target is None:
        found = _entry_points()
        if name not in found:
            part = part_as_policy(name)
            unknown = unknown_name("policy", name, [*POLICIES, *found], "moesim list policies")
            if name.endswith(".py"):
                stem = name.rpartition("/")[2].removesuffix(".py")
                unknown = f"expected a policy's name, got the file '{name}'; name a class of it, such as {stem}:MyPolicy"
            raise ConfigError(f"{place}: " + (f"expected a policy, {part}" if part else unknown))
        target = found[name].value
    return check_target(target, place)


def policy_names() -> list[str]:
    """Return all known names, sorted; entry points included."""
    return sorted({*POLICIES, *_entry_points()})


def policy_info(names: list[str] | None = None) -> list[PolicyInfo]:
    """Describe policies, all that are known by default, sorted by name."""
    return [describe_policy(name) for name in sorted(names if names is not None else policy_names())]


def describe_policy(name: str) -> PolicyInfo:
    """Describe one policy without building it."""
    cls = policy_class(name)
    parameters = options_of(cls)
    doc = inspect.getdoc(cls) or ""
    found = None if name in POLICIES else _entry_points().get(name)
    return PolicyInfo(
        name=name,
        summary=doc.split("\n\n")[0].replace("\n", " "),
        paper=getattr(cls, "paper", ""),
        missing=tuple(getattr(cls, "missing", ())),
        exact=_exact_by_default(cls),
        options={key: None if one.required else one.default for key, one in parameters.items()},
        target=POLICIES.get(name) or (found.value if found is not None else name),
    )


def _exact_by_default(cls: type) -> bool:
    """Whether a class is exact, by its options' defaults where they decide that."""
    exact = getattr(cls, "exact", True)
    if isinstance(exact, property):
        return bool(exact.fget(cls)) if exact.fget is not None and issubclass(cls, Declared) else True
    return bool(exact)


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}


# ------------------------------------------------------------------------------------------------- parts
def part_class(kind: str, name: str) -> type:
    """Return the class of a part of moesim's own."""
    return import_class(PARTS[kind][name], kind)


def part_name(kind: str, cls: type) -> str | None:
    """Return the name of a part's class; None if it is not moesim's own."""
    return next((name for name, target in PARTS[kind].items() if target == f"{cls.__module__}:{cls.__qualname__}"), None)


def make_part(kind: str, spec: Any) -> Any:
    """Build a part from a name, ``package.module:Class`` or mapping; an object stays.

    Examples
    --------
    >>> make_part("assignment", {"name": "beam", "width": 3})
    Beam(width=3)
    """
    options: dict[str, Any] = {}
    if isinstance(spec, Mapping):
        options = {key: value for key, value in spec.items() if key != "name"}
        spec = spec.get("name")
        if not isinstance(spec, str):
            raise ConfigError(
                f"{kind}: expected a mapping with the key name, got the keys {sorted(options)}; write {{name: PART}}"
            )
    if not isinstance(spec, str):
        return spec
    if ":" in spec:
        part = _construct_part(_own_class(kind, spec), options, f"{kind} {spec}", kind)
        if wrong := wrong_needs(part):
            raise ConfigError(f"{kind} {spec}: {wrong}")
        return part
    if spec not in PARTS[kind]:
        others = [other for other, parts in PARTS.items() if spec in parts]
        is_another = f"'{spec}' is a part for {' and '.join(others)}; " if others else ""
        raise ConfigError(f"{kind}: {is_another}{unknown_name(kind, spec, PARTS[kind])}")
    return _construct_part(part_class(kind, spec), options, f"{kind} {spec}", kind)


def _construct_part(cls: type, options: Mapping[str, Any], what: str, kind: str) -> Any:
    """Build a part; of an option that is a list to sweep, say that the part is what is listed."""
    known = options_of(cls)
    for name, value in options.items():
        one = known.get(name)
        if one and isinstance(value, list) and value and not one.fits(value) and all(map(one.fits, value)):
            parts = ", ".join(f"{{..., {name}: {json.dumps(each, default=str)}}}" for each in value[:3])
            more = ", ..." if len(value) > 3 else ""
            raise ConfigError(
                f"{kind}: {what}: option {name}: {mistyped(one.expected, value)}; to sweep it, list the part: [{parts}{more}]"
            )
    return construct(cls, options, what, kind)


def _own_class(kind: str, target: str) -> type:
    """Import a part that is not moesim's own, and check that it has what its kind must have."""
    cls = import_class(check_target(target, kind), kind)
    wanted = methods_of(kind)
    lacking = [name for name in wanted if not callable(getattr(cls, name, None))]
    if lacking:
        remedy = f"it can be named as {' or '.join(fits)}" if (fits := _kinds_of(cls)) else misspelt(cls.__mro__) or "add them"
        raise ConfigError(
            f"{kind} {target}: expected a class with {', '.join(wanted)} (see moesim.policies.parts.{PROTOCOLS[kind].__name__}), "
            f"got no {', no '.join(lacking)} in {cls.__name__}; {remedy}"
        )
    return cls


def _kinds_of(cls: type) -> list[str]:
    """Name the kinds of parts whose methods a class has."""
    return [kind for kind in PROTOCOLS if all(callable(getattr(cls, name, None)) for name in methods_of(kind))]


def methods_of(kind: str) -> list[str]:
    """Name the methods that a part of a kind must have."""
    return [name for name, one in vars(PROTOCOLS[kind]).items() if not name.startswith("_") and callable(one)]


def part_targets(policy: Mapping[str, Any]) -> list[str]:
    """Return the part classes that a policy's options name, without importing any."""
    named = {key: value.get("name") if isinstance(value, Mapping) else value for key, value in policy.items() if key != "name"}
    return [
        name for key, name in named.items()
        if isinstance(name, str) and ":" in name and (key in PART_OPTIONS or isinstance(policy[key], Mapping))
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------- a part in a wrong place
def part_as_policy(name: str) -> str:
    """Explain where a part goes whose name is used for a policy; nothing if it is none.

    >>> part_as_policy("greedy")
    "got 'greedy', an assignment: this is a part; write {name: composed, assignment: greedy}"
    """
    kinds = [kind for kind, known in PARTS.items() if name in known]
    return f"got '{name}', {_a(' or '.join(kinds))}: {_is_a_part(kinds[0], name)}" if kinds else ""


def lacking_of_a_policy(cls: type) -> list[str]:
    """Name the methods of a policy that a class lacks."""
    return [method for method in ("place", "decide", "evict") if not callable(getattr(cls, method, None))]


def class_as_policy(name: str, cls: type) -> str:
    """Explain where a class goes that is a part by its methods; nothing if it is none."""
    kind = max(_kinds_of(cls), key=lambda fit: len(methods_of(fit)), default="")  # a prefetch has a placement's method, too
    return f"got {cls.__name__}, {_a(kind)}: {_is_a_part(kind, name)}" if kind else ""


def option_of_a_part(cls: type, options: Mapping[str, Any], strange: str) -> str:
    """Explain to which part an option belongs that a policy lacks; its named parts first."""
    known = options_of(cls)
    kinds = [kind for kind in PROTOCOLS if kind in known]
    if not kinds:
        return ""
    given = {kind: options.get(kind) for kind in kinds}
    names = {kind: one.get("name") if isinstance(one, Mapping) else one for kind, one in given.items()}
    named = [(kind, name) for kind, name in names.items() if name and isinstance(name, str)]
    owners = [(kind, name) for kind, name in named if strange in _options_of_part(kind, name)]
    owners = owners or [(kind, name) for kind in kinds for name in PARTS[kind] if strange in _options_of_part(kind, name)]
    value = json.dumps(options[strange], default=str)
    if not owners and get_close_matches(strange, known):
        return ""
    if not owners:
        return f"options of a part are written with its name, as in {kinds[-1]}: {{name: PART, {strange}: {value}}}"
    kind, name = owners[0]
    which = " and ".join(f"{of} {', '.join(one for other, one in owners if other == of)}" for of in dict(owners))
    return f"it is an option of {which}: write {kind}: {{name: {_written(name)}, {strange}: {value}}}"


def _options_of_part(kind: str, name: str) -> Mapping[str, Any]:
    """Return the options of a part by name; none of a missing one, which has its own error."""
    try:
        cls = import_class(name if ":" in name else PARTS[kind].get(name, ""), kind)
    except ConfigError:
        return {}
    return options_of(cls)


def _is_a_part(kind: str, name: str) -> str:
    return f"this is a part; write {{name: composed, {kind}: {_written(name)}}}"


def _written(name: str) -> str:
    return f'"{name}"' if ":" in name else name


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def code_names(policy: str | Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a policy's code: its own, and ``package.module:Class`` of its parts."""
    return (policy,) if isinstance(policy, str) else (policy["name"], *sorted(part_targets(policy)))
