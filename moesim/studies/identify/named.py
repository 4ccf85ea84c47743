"""Which model a measured row is of, and with how many bits, by what programs print of a file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

from moesim.core.yaml_reader import read_yaml_value
from moesim.model import ModelSpec, load_model
from moesim.model.keys import packaged_table
from moesim.model.load import model_names
from moesim.studies.identify.observations import QUANTS, bits_in, named_bits

_SAME: Final = 0.03
"""Two counts of a model's parameters differ by no more than this share: of a catalogue and a file, or a type's round name."""

_KINDS: Final[Mapping[str, Sequence[str]]] = {
    "llama": ("mixtral",), "deepseek2": ("deepseekv2", "deepseekv3", "kimik2", "glm4moelite", "mistral4"),
    "deepseek32": ("deepseekv32",), "deepseek4": ("deepseekv4",), "bailingmoe2": ("bailingmoe", "bailingmoev2", "bailinghybrid"),
    "hunyuanmoe": ("hunyuanv1moe", "hunyuan", "hyv3"), "granitehybrid": ("granitemoehybrid",), "step35": ("step3p5",),
    "granitemoe": ("granitemoehybrid",), "glm4moe": ("glm4moe", "glm4vmoe"), "glmdsa": ("glmmoedsa",), "lladamoe": ("llada",),
    "nemotronhmoe": ("nemotronh",), "mimo2": ("mimov2flash",), "grok": ("grok1", "git"),
}  # fmt: skip
"""llama.cpp's names of architectures, as ``llama-arch.cpp`` lists them: ``model_type`` of configurations, where it differs."""


class NotUsableError(Exception):
    """Why a row cannot be used; it never stops a file."""


def letters(text: str) -> str:
    """Keep letters and digits, in lower case."""
    return re.sub(r"[^a-z0-9]", "", text.lower())


@cache
def _listed() -> Mapping[str, tuple[str, float, float, tuple[str, ...]]]:
    """Return type, parameters, active ones and names of each model of the catalogue."""
    table, found = packaged_table("models.yaml"), {}
    for name in model_names():
        entry = table[name]
        kind = letters(str(entry["keys"].get("model_type", "")).removesuffix("_text"))
        names = tuple(letters(one.rpartition("/")[2]) for one in (name, *entry["aliases"]))
        found[name] = kind, load_model(name).total_params, 1e9 * entry["published"]["active"], names
    return found


def find_model(fields: Mapping[str, Any], models: Sequence[str]) -> str:
    """Return the model of a row: one of `models` (``NAME`` or ``PART OF ITS TYPE=NAME``) if given, else of the catalogue."""
    printed = _printed(fields)
    plain = [one for one in models if "=" not in one or one.lstrip().startswith("{")]
    for one in models:
        kind, _, name = one.partition("=")
        if one not in plain and kind.lower() in printed.lower():
            return name
    fits = _fits(fields, printed)
    if not models:
        if len(fits) != 1:
            raise NotUsableError(_unknown(fields, printed, fits))
        return fits[0]
    for one in plain:
        if one in fits or (one not in _listed() and _may_be(one, fields)) or (not fits and len(plain) == 1 and not _says(fields)):
            return one
    known = f", which is {' or '.join(fits)}" if fits else ""
    raise NotUsableError(f"another model: '{printed}'{known}; --model is {', '.join(models)}")


def _printed(fields: Mapping[str, Any]) -> str:
    """Return type and file of a model, without folders."""
    file = re.split(r"[/\\]", str(fields.get("model_filename") or ""))[-1]
    return f"{fields.get('model_type') or ''} {file}".strip()


def _says(fields: Mapping[str, Any]) -> bool:
    """Return whether a row says of which architecture or size its model is."""
    kind, label = _words(fields)
    return bool(fields.get("model_n_params")) or _kinds(kind) is not None or re.match(r"\d", label) is not None


def _words(fields: Mapping[str, Any]) -> tuple[str, str]:
    words = str(fields.get("model_type") or f"{fields.get('arch', '')} {fields.get('label', '')}").split()
    return letters(words[0]) if words else "", words[1] if len(words) > 1 else ""


def _kinds(kind: str) -> Sequence[str] | None:
    """Return the types of the catalogue that an architecture of llama.cpp may have; None if it has none."""
    own = [one for one, *_ in _listed().values() if one == kind]
    return (*_KINDS.get(kind, ()), *own) or None


def _may_be(model: str, fields: Mapping[str, Any]) -> bool:
    """Return whether a model that is not of the catalogue has a row's size, if it prints one."""
    params = _float(fields.get("model_n_params"))
    return not params or abs(spec_of(model).total_params / params - 1) <= 2 * _SAME  # layers that predict count there


def _fits(fields: Mapping[str, Any], printed: str) -> list[str]:
    """List the models of the catalogue that a row may be of: by architecture, parameters and names."""
    kind, label = _words(fields)
    params, kinds, words = _float(fields.get("model_n_params")), _kinds(kind), letters(printed)
    total, active = re.match(r"(\d+(?:\.\d+)?)B", label), re.search(r"A(\d+(?:\.\d+)?)B", label)
    family = {name for name, (*_, names) in _listed().items() if any(one in words for one in names)}
    found: list[tuple[Any, ...]] = []
    sizes = [one for one in (params, 1e9 * float(total[1]) if total else 0.0) if one]  # a type's name may be of another size
    for size in sizes or [0.0]:
        for name, (of, theirs, used, names) in _listed().items() if not found else ():
            near, named = abs(theirs / size - 1) if size else 0.0, name in family
            if kinds is not None:
                right = of in kinds and (size > 0 or named or not family)
            else:  # an architecture that is not known here
                right = named or (active is not None and size > 0 and abs(used / 1e9 - float(active[1])) <= 0.6)
            if right and near <= _SAME:
                longest = max((len(one) for one in names if one in words), default=0)
                found.append((-longest, of != kind, letters(name) not in words, near, name))
    found.sort()
    sure = found and (params or total or found[0][0])
    return [name for *_, name in found[: 1 if sure else None]]


def _unknown(fields: Mapping[str, Any], printed: str, fits: Sequence[str]) -> str:
    kind, label = _words(fields)
    if not printed:
        return "it says nowhere which model it is: give --model NAME, or the line that started the program"
    if not fits and _kinds(kind) in (None, ("mixtral",)) and re.fullmatch(r"\d+(\.\d+)?B", label) and "moe" not in kind:
        return f"a dense model, '{printed}': only Mixture-of-Experts models are simulated"
    which = f", which may be {' or '.join(fits[:4])}" if fits else ""
    return f"no model that is known: '{printed}'{which}; say which with --model 'PART OF ITS NAME=MODEL'"


def spec_of(model: str, **bits: float) -> ModelSpec:
    """Load a model by name or written mapping, with other bits."""
    named: Any = read_yaml_value(model, "model") if model.startswith("{") else model
    return load_model({**(named if isinstance(named, dict) else {"base": named}), **bits} if bits else named)


def find_bits(fields: Mapping[str, Any], model: str) -> str:
    """Return the bits of a row: those of its type's name, scaled to the size of its file where it prints one."""
    name = bits_in(f"{fields.get('file_type') or ''} {_printed(fields)}")
    plain = spec_of(model)
    n_bytes, params = _float(fields.get("model_size")), _float(fields.get("model_n_params"))
    if plain.expert_bytes_by_layer is not None:
        return ""  # a GGUF file has its own
    if not name and "ollama" in str(fields.get("program")) and plain.expert_bits >= 8:
        name = "Q4_K_M"  # of names without one
    if not n_bytes or not params:
        if not name and plain.expert_bits >= 8 and "vllm" not in str(fields.get("program")):  # which names a quantised one
            raise NotUsableError("neither its name nor its size says how many bits a weight has")
        return name
    each = 8 * n_bytes / params
    if plain.expert_bits < 8 and "K" not in name:  # experts stay as their maker quantised them; the rest is the file's
        share = plain.experts_params_total / plain.total_params
        rest = (each - share * plain.expert_bits) / (1 - share)
        if 2 <= rest <= 33:
            return f"{plain.expert_bits:g}/{rest:.3g}"
    bits = named_bits(name if name in QUANTS else min(QUANTS, key=lambda one: abs(QUANTS[one][0] - each)), plain)
    experts, rest = bits["expert_bits"], bits["other_bits"]
    named = spec_of(model, expert_bits=experts, other_bits=rest)
    scale = each / (8 * named.n_bytes / named.total_params)
    return name if name and abs(scale - 1) <= 0.01 else f"{experts * scale:.4g}/{rest * scale:.4g}"


def _float(value: Any) -> float:
    try:
        return max(0.0, float(value))
    except (TypeError, ValueError):
        return 0.0
