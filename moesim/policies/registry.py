"""Names to policies: the ones shipped here, a third party's entry points, and ``package.module:Class``.

A third party adds a policy without an edit here, by naming its class in the YAML, or by an entry point in its own
``pyproject.toml``::

    [project.entry-points."moesim.policies"]
    my-policy = "my_package.my_module:MyPolicy"
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from moesim.errors import ConfigError, MoesimError, describe_exception, unknown_name
from moesim.policies.declaration import wrong_declaration
from moesim.policies.declare import Declared, option_parameters
from moesim.policies.importing import check_target, import_class
from moesim.policies.options import construct
from moesim.policies.part_hints import class_as_policy, lacking_of_a_policy, option_of_a_part, part_as_policy
from moesim.policy import Policy

GROUP = "moesim.policies"

# One line a policy.
POLICIES: dict[str, str] = {
    "adapmoe": "moesim.policies.systems.adapmoe:AdapMoE",
    "all-cpu": "moesim.policies.systems.all_cpu:AllCpu",
    "all-gpu": "moesim.policies.systems.all_gpu:AllGpu",
    "background-cache": "moesim.policies.background_cache:BackgroundCache",
    "belady": "moesim.policies.systems.caches:Belady",
    "composed": "moesim.policies.composed:Composed",
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
    "windowed-belady": "moesim.policies.systems.lookahead:WindowedBelady",
    "turboquant-cache": "moesim.policies.systems.pooled_cache:TurboQuantCache",
    "two-uploads-lru": "moesim.policies.systems.two_uploads_lru:TwoUploadsLru",
    "zero-inference": "moesim.policies.systems.zero_inference:ZeroInference",
}


@dataclass(frozen=True)
class PolicyInfo:
    """What `moesim list policies --long` prints about one policy.

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
    options = {key: value for key, value in spec.items() if key != "name"}
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
    """Find the class of a policy.

    Parameters
    ----------
    name : str
        A registered name, the name of an entry point, or ``package.module:Class``.
    place : str
        File and key, for messages.

    Raises
    ------
    ConfigError
        If there is none, or it cannot be imported.
    """
    target = target_of(name, place)
    return import_class(target, place if target in (name, POLICIES.get(name)) else f"{place}: entry point {name}")


def target_of(name: str, place: str = "policies") -> str:
    """Say which class a policy's name stands for, as ``package.module:Class``, without importing it."""
    target = POLICIES.get(name) or (name if ":" in name else None)
    if target is None:
        found = _entry_points()
        if name not in found:
            part = part_as_policy(name)
            unknown = unknown_name("policy", name, [*POLICIES, *found], "moesim list policies")
            raise ConfigError(f"{place}: " + (f"expected a policy, {part}" if part else unknown))
        target = found[name].value
    return check_target(target, place)


def policy_names() -> list[str]:
    """Return all known names, sorted; entry points included."""
    return sorted({*POLICIES, *_entry_points()})


def policy_info(names: list[str] | None = None) -> list[PolicyInfo]:
    """Describe policies.

    Parameters
    ----------
    names : list of str or None
        Which; None: all that are known.

    Returns
    -------
    list of PolicyInfo
        Sorted by name.
    """
    return [describe_policy(name) for name in sorted(names if names is not None else policy_names())]


def describe_policy(name: str) -> PolicyInfo:
    """Describe one policy without building it."""
    cls = policy_class(name)
    parameters = option_parameters(cls)
    doc = inspect.getdoc(cls) or ""
    found = None if name in POLICIES else _entry_points().get(name)
    return PolicyInfo(
        name=name,
        summary=doc.split("\n\n")[0].replace("\n", " "),
        paper=getattr(cls, "paper", ""),
        missing=tuple(getattr(cls, "missing", ())),
        exact=_exact_by_default(cls),
        options={key: None if one.default is one.empty else one.default for key, one in parameters.items()},
        target=POLICIES.get(name) or (found.value if found is not None else name),
    )


def _exact_by_default(cls: type) -> bool:
    """Say whether a class is exact; where its options decide that, with their defaults, which a declared class has itself."""
    exact = getattr(cls, "exact", True)
    if isinstance(exact, property):
        return bool(exact.fget(cls)) if exact.fget is not None and issubclass(cls, Declared) else True
    return bool(exact)


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP)}
