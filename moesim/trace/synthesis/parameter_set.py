"""The parameters of the generative model, their bounds, and the files that hold them.

A parameter file is YAML::

    model: mixtral-8x7b
    shape: {n_layers: 32, n_experts: 8, top_k: 2, renormalise: true}
    fitted_to: what the fitted values were fitted to
    fitted: {popularity: 0.07, ...}
    assumed: {width: 32, ...}      # those of `OPTIONAL` may be left out: then they are 0
    why: {width: wide enough for the spectrum, ...}   # optional, one line each
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from moesim.core import files
from moesim.core.data import known_text, note
from moesim.core.gate import YAML, read_text
from moesim.core.limits import EXPERTS, LAYERS, SYNTHETIC
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name


def data_file(kind: str, name_or_path: str) -> tuple[str, str]:
    """Read a file of the package by name, or any by path."""
    by_path = name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path or "\\" in name_or_path
    if (text := known_text(kind, name_or_path)) is None:
        text = note(kind, name_or_path, _read_text(kind, name_or_path, by_path))
    return text, name_or_path if by_path else f"{kind}/{name_or_path}.yaml"


def _read_text(kind: str, name_or_path: str, by_path: bool) -> str:
    if by_path:
        return read_text(Path(name_or_path), YAML, "a readable YAML file")
    known = data_names(kind)
    if name_or_path not in known:
        raise ConfigError(unknown_name(f"{kind} file", name_or_path, known))
    file = resources.files("moesim.trace.synthesis") / kind / f"{name_or_path}.yaml"
    return file.read_text(encoding="utf-8")


def data_names(kind: str) -> list[str]:
    """Names that `data_file` knows, sorted."""
    folder = resources.files("moesim.trace.synthesis") / kind
    return sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def mapping(value: Any, place: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """Check that a YAML value is a mapping with the right keys."""
    if not isinstance(value, dict):
        raise ConfigError(f"{place}: expected a mapping, got {value!r}; see docs/guide/synthesis.md")
    for key in needed:
        if key not in value:
            raise ConfigError(f"{place}: expected the key '{key}', got {sorted(map(str, value))}; add it")
    for key in value:
        if key not in (*needed, *optional):
            raise ConfigError(f"{place}: {unknown_name('key', str(key), (*needed, *optional))}")
    return value


_SHAPE = ("n_layers", "n_experts", "top_k")
_KEYS = ("model", "shape", "fitted_to", "fitted", "assumed")
_OPTIONAL = ("why",)
_MOST_SHARED = 1 - 1e-6  # beyond, gate inputs are so large that products of them are no longer exact


def _number(low: float, high: float, scale: str, meaning: str, *, default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "scale": scale, "meaning": meaning})


@dataclass(frozen=True)
class ParameterSet:
    """Parameters of the routing of one model; ``moesim schema parameters`` explains them.

    Attributes
    ----------
    model : str
        Whose routing it is.
    n_layers, n_experts, top_k : int
        Its routing shape.
    renormalise : bool
        Whether gate weights are a softmax over the top k (which is the same as a softmax over all,
        renormalised) rather than over all experts.
    fitted_to : str
        One line.
    origin : mapping of str to str
        ``fitted`` or ``assumed``, by parameter.
    why : mapping of str to str
        Remarks, by parameter.
    """

    model: str
    n_layers: int
    n_experts: int
    top_k: int
    renormalise: bool
    # fmt: off
    popularity: float = _number(1e-3, 3.0, "log", meaning=
        "Spread of the logarithm of the experts' loads, which training balanced no further than this.")
    popularity_tail: float = _number(-4.0, 4.0, "linear", meaning=
        "Shape of those loads: 0 log-normal, above 0 a few very popular experts, below 0 a few hardly used ones.")
    n_topics: int = _number(1, 4096, "linear", "Topics that texts can be about.")
    topic_share: float = _number(0.0, 0.99, "logit", "Share of a token's state, in energy, that its topic determines.")
    topic_persistence: float = _number(0.0, 0.9999, "logit", meaning=
        "Probability that a token has the topic of the one before; else it is drawn from the request's mixture.")
    topic_concentration: float = _number(1e-3, 100.0, "log", meaning=
        "Of the Dirichlet distribution of requests' mixtures, per topic: the smaller, the fewer topics a request has.")
    context_share: float = _number(0.0, 1.0, "logit", meaning=
        "Share, of what the topic leaves, that fades from token to token; the rest is new with every token.")
    context_persistence: float = _number(0.0, 0.999, "logit", "Correlation of that part between neighbouring tokens.")
    width: int = _number(2, 512, "linear", "Dimensions of the state that routers read; as many hold what they do not read.")
    spectrum: float = _number(0.0, 6.0, "linear", meaning=
        "Variance falls along these dimensions as 1 / i ** spectrum. Steeper: experts tell more about those of the next layer.")
    innovation: float = _number(0.0, 1.0, "logit", meaning=
        "Share of a token's state, in energy, that is new in the next layer, deep in the model.")
    first_innovation: float = _number(0.0, 1.0, "logit", meaning=
        "Share of a token's state, in energy, that is new in the second layer.")
    settling: float = _number(0.01, 100.0, "log", meaning=
        "Layers over which first_innovation and first_turn become innovation and mean_turn (by a factor e).")
    mean_share: float = _number(0.0, 0.95, "logit", "Share of a gate input's energy that all tokens have in common.")
    mean_read: float = _number(0.0, 1.0, "logit", "Share of that common part, in energy, in the dimensions that routers read.")
    mean_turn: float = _number(0.0, 1.0, "logit", meaning=
        "Share of the common part, in energy, that is new in the next layer, deep in the model: the residual removes it.")
    first_turn: float = _number(0.0, 1.0, "logit", "Share of the common part, in energy, that is new in the second layer.")
    unread_share: float = _number(0.0, 0.95, "logit", meaning=
        "Share of a gate input's energy that is a token's own, new in every layer and read by no router.")
    temperature: float = _number(1e-3, 100.0, "log", meaning=
        "Standard deviation of a router's logits for one expert: gate weights depend on it, the choice does not.")
    locality_spread: float = _number(0.0, 3.0, "linear", default=0.0, meaning=
        "Standard deviation, over layers, of the logit of topic_share and of context_share. 0: layers are alike.")
    popularity_spread: float = _number(0.0, 1.0, "linear", default=0.0, meaning=
        "Standard deviation, over layers, of the logarithm of popularity.")
    opening: float = _number(0.0, 64.0, "log1p", default=0.0, meaning=
        "Decoded tokens over which (by a factor e) requests stop having their states in common. 0: they have nothing in common.")
    workload_spread: float = _number(0.0, 3.0, "log1p", default=0.0, meaning=
        "Standard deviation of what a workload adds to each expert's logit, relative to what tokens do. 0: workloads are alike.")
    workload_requests: int = _number(0, 65536, "linear", default=0, meaning=
        "Neighbouring requests that form a workload. 0: all requests of a trace are of one.")
    shallow: float = _number(0.0, 8.0, "log1p", default=0.0, meaning=
        "How much lower the logits of topic_share and context_share are in the first layer than deep in the model.")
    shallow_layers: float = _number(0.0, 64.0, "log1p", default=0.0, meaning=
        "Layers over which (by a factor e) that fades. 0: the first layer only.")
    prompt_loss: float = _number(0.0, 8.0, "log1p", default=0.0, meaning=
        "How much lower the logits of topic_share and context_share are at prompt tokens. 0: prompts are routed like answers.")
    # fmt: on
    fitted_to: str = ""
    origin: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    why: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def values(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in NUMBERS}

    def stated(self) -> dict[str, float]:
        """Return the parameters as a file states them: without optional ones that are assumed to be 0."""
        return {name: v for name, v in self.values().items() if v or name not in OPTIONAL or self.origin.get(name) == "fitted"}

    def replace(self, **changed: Any) -> ParameterSet:
        """Copy, with some attributes changed; bounds are checked again."""
        new = dataclasses.replace(self, **changed)
        _check(new.values(), new, f"parameters of {new.model}")
        return new

    def to_yaml(self) -> str:
        """Write as a parameter file; the same parameters give the same text."""
        kinds: dict[str, dict[str, float]] = {"fitted": {}, "assumed": {}}
        for name, value in self.stated().items():
            kinds[self.origin[name]][name] = value if isinstance(value, int) else float(f"{value:.4g}")
        shape = {name: getattr(self, name) for name in (*_SHAPE, "renormalise")}
        whole: dict[str, Any] = {"model": self.model, "shape": shape, "fitted_to": self.fitted_to, **kinds}
        if self.why:
            whole["why"] = dict(self.why)
        return yaml.safe_dump(whole, sort_keys=False, width=120, allow_unicode=True)

    def write(self, path: str | Path) -> Path:
        """Write a parameter file, completely or not at all."""
        return files.write_bytes(path, self.to_yaml().encode())


#: Bounds and scale of every parameter, by name.
NUMBERS: dict[str, Mapping[str, Any]] = {f.name: f.metadata for f in dataclasses.fields(ParameterSet) if f.metadata}
_INTEGERS = tuple(f.name for f in dataclasses.fields(ParameterSet) if f.name in NUMBERS and f.type == "int")
#: Parameters that a file may leave out; then they are 0, which changes nothing.
OPTIONAL = tuple(f.name for f in dataclasses.fields(ParameterSet) if f.name in NUMBERS and f.default == 0)


def parameter_names() -> list[str]:
    """Names of the shipped parameter files, sorted."""
    return data_names("parameters")


def read_parameters(name_or_path: str) -> ParameterSet:
    """Read a parameter file.

    Parameters
    ----------
    name_or_path : str
        A shipped one by name, or a path.

    Returns
    -------
    ParameterSet

    Raises
    ------
    ConfigError
        If it is missing, or something in it is missing, unknown or out of bounds.
    """
    text, place = data_file("parameters", name_or_path)
    raw = mapping(read_yaml_value(text, place), place, _KEYS, _OPTIONAL)
    shape = read_shape(raw["shape"], f"{place}: shape")
    groups = {kind: mapping(raw[kind], f"{place}: {kind}", (), tuple(NUMBERS)) for kind in ("fitted", "assumed")}
    both = sorted(set(groups["fitted"]) & set(groups["assumed"]))
    missing = sorted(set(NUMBERS) - set(OPTIONAL) - set(groups["fitted"]) - set(groups["assumed"]))
    if both:
        raise ConfigError(f"{place}: expected each parameter once, got '{both[0]}' as fitted and as assumed; remove one")
    if missing:
        raise ConfigError(f"{place}: expected all of {', '.join(NUMBERS)}, got no '{missing[0]}'; add it as fitted or assumed")
    values = groups["fitted"] | groups["assumed"]
    origin = dict.fromkeys(OPTIONAL, "assumed") | {name: kind for kind, group in groups.items() for name in group}
    why = mapping(raw.get("why", {}), f"{place}: why", (), tuple(NUMBERS))
    for key in ("model", "fitted_to"):
        if not isinstance(raw[key], str) or not raw[key]:
            raise ConfigError(f"{place}: {key}: expected a text, got {raw[key]!r}; write one")
    found = ParameterSet(model=raw["model"], fitted_to=raw["fitted_to"], origin=origin, why=why, **shape, **values)
    _check(found.values(), found, place)
    return found


def read_shape(value: Any, place: str) -> dict[str, Any]:
    """Check a routing shape: positive integers, top_k at most n_experts."""
    shape = mapping(value, place, (*_SHAPE, "renormalise"))
    for name in _SHAPE:
        if not isinstance(shape[name], int) or isinstance(shape[name], bool) or shape[name] < 1:
            raise ConfigError(f"{place}.{name}: expected a positive integer, got {shape[name]!r}; correct it")
        if shape[name] > (most := LAYERS.most if name == "n_layers" else EXPERTS.most):
            raise ConfigError(f"{place}.{name}: expected at most {most}, got {shape[name]}; correct it")
    if shape["top_k"] >= shape["n_experts"]:
        raise ConfigError(f"{place}.top_k: expected less than n_experts = {shape['n_experts']}, got {shape['top_k']}; correct it")
    if not isinstance(shape["renormalise"], bool):
        raise ConfigError(f"{place}.renormalise: expected true or false, got {shape['renormalise']!r}; correct it")
    return shape


def _check(values: Mapping[str, Any], found: ParameterSet, place: str) -> None:
    for name, bounds in NUMBERS.items():
        value, low, high = values[name], bounds["low"], bounds["high"]
        kind = int if name in _INTEGERS else (int, float)
        what = "an integer" if name in _INTEGERS else "a number"
        if not isinstance(value, kind) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{place}: {name}: expected {what} from {low:g} to {high:g}, got {value!r}; correct it")
    numbers = found.n_layers * (found.n_experts + found.n_topics) * found.width
    if numbers > SYNTHETIC.most:
        what = "n_layers x (n_experts + n_topics) x width"
        raise ConfigError(f"{place}: {what}: expected at most {SYNTHETIC.most}, got {numbers}; lower one")
    shared = found.mean_share + found.unread_share
    if shared > _MOST_SHARED:
        raise ConfigError(
            f"{place}: mean_share + unread_share: expected at most {_MOST_SHARED}, since the rest is what routers tell tokens "
            f"apart by, got {shared:g}; lower one"
        )


def parameter_schema() -> dict[str, Any]:
    """Describe parameter files for editors, as JSON Schema."""
    numbers = {}
    for name, of in NUMBERS.items():
        kind = {"type": "integer" if name in _INTEGERS else "number", "minimum": of["low"], "maximum": of["high"]}
        numbers[name] = kind | {"description": of["meaning"]} | ({"default": 0} if name in OPTIONAL else {})
    text = {"type": "string", "minLength": 1}
    sizes = {
        name: {"type": "integer", "minimum": 1, "maximum": LAYERS.most if name == "n_layers" else EXPERTS.most} for name in _SHAPE
    }
    weights = "Gate weights are a softmax over the top k, which is a softmax over all, renormalised; else over all experts"
    whole = {
        "model": text | {"description": "Whose routing it is"},
        "shape": _closed(sizes | {"renormalise": {"type": "boolean", "description": weights}}, (*_SHAPE, "renormalise")),
        "fitted_to": text | {"description": "What the fitted values were fitted to, in one line"},
        "fitted": _closed(numbers)
        | {"description": "Each parameter is in fitted or in assumed; one with a default may be in neither"},
        "assumed": _closed(numbers) | {"description": "As fitted"},
        "why": _closed({name: {"type": "string"} for name in numbers}) | {"description": "Remarks, by parameter"},
    }
    return {"title": "moesim parameters of synthetic routing", **_closed(whole, _KEYS)}


def _closed(properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
