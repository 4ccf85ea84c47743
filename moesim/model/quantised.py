"""Bits of a checkpoint's weights, module by module, from its config's quantisation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from moesim.core.limits import BITS
from moesim.errors import ModelError

DTYPES = {
    "bfloat16": 16, "float16": 16, "half": 16, "float32": 32, "float": 32, "float8_e4m3fn": 8, "float8_e5m2": 8, "bf16": 16,
    "fp16": 16, "fp32": 32,
}  # fmt: skip
MXFP4, NVFP4, MXFP8, MXFP6 = 4.25, 4.5, 8.25, 6.25  # bits with a scale of 8 for each 32 weights, 16 for NVFP4
_ALGORITHMS = {
    "FP8": 8, "FP8_PB_WO": 8 + 32 / 128**2, "NVFP4": NVFP4, "W4A16_NVFP4": NVFP4, "NVFP4_AWQ": NVFP4, "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4, "MXFP8": MXFP8, "MXFP6": MXFP6, "W4A16_AWQ": 4 + 16 / 128, "W4A8_AWQ": 4 + 16 / 128, "W8A16": 8,
    "W8A8_SQ_PER_CHANNEL": 8, "INT8": 8, "INT4": 4.5,
}  # fmt: skip
"""Bits by modelopt's names, with scales by block sizes: AWQ in groups of 128, INT4 assumed in groups of 32."""
_GROUPED = ("gptq", "awq", "auto-round", "intel/auto-round", "gptqmodel", "awq_marlin", "gptq_marlin")
_WORDS = (  # of modules that a method leaves out
    "modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers", "llm_int8_skip_modules", "exclude",
    "modules_to_skip",
)  # fmt: skip


@dataclass(frozen=True)
class _Names:
    """Names of modules, also patterns: with ``*``, or a regular expression behind ``re:``."""

    exact: frozenset[str]
    patterns: tuple[re.Pattern[str], ...]

    def hold(self, module: str) -> bool:
        """Return whether a module or its holder is listed, by its whole name or one part of it."""
        parts = module.split(".")
        if not self.exact.isdisjoint(parts):
            return True
        ahead = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        return not self.exact.isdisjoint(ahead) or any(pattern.search(module) for pattern in self.patterns)


def _short(name: str) -> str:
    """Return a module's name without what wraps the layers: layers.3.mlp.gate."""
    at = name.find("layers.")
    return name[at:] if at >= 0 else name.rsplit("model.", 1)[-1]


def _names(given: Iterable[str]) -> _Names:
    exact, patterns = set(), []
    for name in given:
        if name.startswith("re:"):
            try:
                patterns.append(re.compile(name[3:]))
            except re.error:
                continue
        elif "*" in name:
            patterns.append(
                re.compile(r"(?:^|\.)" + ".*".join(re.escape(part) for part in _short(name).split("*")) + r"(?:$|\.)?")
            )
        else:
            exact.add(_short(name))
    return _Names(frozenset(exact), tuple(patterns))


@dataclass(frozen=True)
class Precision:
    """Bits of weights."""

    method: str  # as the config calls it; "" for none
    plain: float  # of modules that are not quantised
    bits: float  # of those that are
    kv_bits: float = 16  # of keys and values
    experts: float | None = None  # of routed experts, where they have their own
    head: float | None = None
    only_experts: bool = False  # nothing else is quantised
    everything: bool = False  # embedding, head and router are quantised, too
    left: _Names = field(default_factory=lambda: _names(()))
    own: tuple[tuple[_Names, float], ...] = ()  # modules with their own bits
    doubts: tuple[str, ...] = ()  # what was assumed

    def of(self, *modules: str) -> float:
        """Return the bits of a matrix of a layer; it may have several names, as checkpoints differ."""
        for names, bits in self.own:
            if any(names.hold(module) for module in modules):
                return bits
        if not self.method or any(self.left.hold(module) for module in modules):
            return self.plain
        if any(".experts" in module for module in modules):
            return self.bits if self.experts is None else self.experts
        return self.plain if self.only_experts else self.bits

    @property
    def ends(self) -> tuple[float, float]:
        """Bits of the embedding and of the output head."""
        head = self.head if self.head is not None else self.of("lm_head") if self.everything else self.plain
        return self.of("embed_tokens") if self.everything else self.plain, head

    @property
    def router(self) -> float:
        """Bits of routers, norms and other small parts."""
        return self.of("mlp.gate") if self.everything else self.plain


_NAMED = re.compile(r"(?i)nvfp4|mxfp4|fp8|awq|gptq|int[48]|w4a16|exl[23]")


def read_precision(data: Mapping[str, Any], extra: Mapping[str, Any] | None, name: str, place: object) -> Precision:
    """Read a checkpoint's precision from its config, or the ``hf_quant_config.json`` there."""
    key = next((key for key in ("dtype", "torch_dtype") if data.get(key) is not None), "dtype")
    dtype, doubts = data.get(key), []
    if dtype is None:
        doubts.append("dtype is not given: bfloat16 assumed")
    elif not isinstance(dtype, str) or dtype.removeprefix("torch.") not in DTYPES:
        raise ModelError(f"{place}: {key}: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    plain = DTYPES["bfloat16" if dtype is None else dtype.removeprefix("torch.")]
    given = data.get("quantization_config") or data.get("quantization") or (extra or {}).get("quantization") or extra
    if not given:
        named = _NAMED.search(str(name))
        if named and plain >= 16:
            doubts.append(f"the name says {named[0]}, but nothing describes it: {plain} bits; is hf_quant_config.json missing?")
        return Precision("", plain, plain, max(plain, 16), doubts=tuple(doubts))
    if not isinstance(given, Mapping):
        raise ModelError(f"{place}: quantization_config: expected a mapping, got {given!r}")
    return _quantised(given, max(plain, 16), data, doubts, place)


def _number(given: Mapping[str, Any], place: object, *keys: str, default: float | None = None) -> float:
    value = next((given[key] for key in keys if given.get(key) is not None), default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not (value == -1 or 0 < value <= 10**6):
        raise ModelError(f"{place}: quantization_config: {keys[0]}: expected a positive number, got {value!r}")
    return float(value)


def _quantised(given: Mapping[str, Any], plain: float, data: Mapping[str, Any], doubts: list[str], place: object) -> Precision:
    method = str(given.get("quant_method") or given.get("quant_algo") or ("mlx" if "group_size" in given else "")).lower()
    lists = [given[word] for word in _WORDS if given.get(word)]
    named = [name for one in lists if isinstance(one, list) for name in one]
    if not all(isinstance(one, list) for one in lists) or not all(isinstance(name, str) for name in named):
        raise ModelError(f"{place}: quantization_config: expected names of modules that are left out, got {str(lists)[:60]}")
    more: dict[str, Any] = {"left": _names(named), "kv_bits": _kv_bits(given)}
    algorithm = str(given.get("quant_algo") or "").upper()
    if algorithm == "MIXED_PRECISION" or isinstance(given.get("quantized_layers"), Mapping):
        own = {name: _algorithm(one, place) for name, one in (given.get("quantized_layers") or {}).items()}
        groups = {bits: _names(name for name, its in own.items() if its == bits) for bits in sorted(set(own.values()))}
        more["own"] = tuple((names, bits) for bits, names in groups.items())
        bits = plain
    elif algorithm in _ALGORITHMS:
        bits = _ALGORITHMS[algorithm]
        if not named:
            doubts.append(f"{algorithm}: modules that are left out are not given; attention, router and head may be in 16 bits")
    elif method == "fp8" or method == "fbgemm_fp8":
        block = given.get("weight_block_size")
        scale = 8 if given.get("scale_fmt") == "ue8m0" else 32
        bits = 8 + (scale / (block[0] * block[1]) if isinstance(block, list) and len(block) == 2 and all(block) else 0)
        if data.get("expert_dtype") == "fp4":
            more["experts"] = MXFP4
    elif method == "mxfp4":
        bits, more["only_experts"] = MXFP4, True
    elif method == "compressed-tensors":
        bits, more["own"] = _groups(given, plain, more["left"], place)
    elif method in _GROUPED:
        width, group = _number(given, place, "bits", "w_bit"), _number(given, place, "group_size", "q_group_size", default=128)
        bits = width + ((16 + width) / group if group > 0 else 0)
    elif method == "bitsandbytes":
        double = given.get("bnb_4bit_use_double_quant")
        bits = (4.127 if double else 4.5) if given.get("load_in_4bit") or given.get("_load_in_4bit") else 8
    elif method in ("exl2", "exl3"):
        bits, more["head"] = _number(given, place, "bits"), _number(given, place, "head_bits", default=6)
    elif method == "mlx":
        bits, more["own"], more["everything"] = *_mlx(given, place), True
    else:
        bits = _by_words(given) or _number(given, place, "bits", "num_bits", "nbits", "weight_bits")
        doubts.append(f"quantisation {method or 'without a name'}: {bits:g} bits, scales not counted")
    if not BITS.hold(bits):
        raise ModelError(f"{place}: quantization_config: expected a number of bits {BITS}, got {bits:g}")
    return Precision(method or algorithm.lower(), plain, bits, doubts=tuple(doubts), **more)


_WIDTHS = re.compile(r"nvfp4|mxfp[468](?![0-9])|(?:weights?_|quant_|n)bits\"?: (\d+)|(?:int|fp|float|nf|w)([1-8])(?![0-9])")


def _by_words(given: Mapping[str, Any]) -> float | None:
    """Return the bits that a description of another method names first: of Quark, torchao, HQQ, quanto."""
    found = _WIDTHS.search(json.dumps(given, default=str).lower())
    if found is None:
        return None
    return _ALGORITHMS[found[0].upper()] if found[0][:2] in ("nv", "mx") else float(found[1] or found[2])


def _algorithm(one: Any, place: object) -> float:
    name = str(one.get("quant_algo") if isinstance(one, Mapping) else one).upper()
    if name not in _ALGORITHMS:
        raise ModelError(f"{place}: quantized_layers: expected one of {', '.join(_ALGORITHMS)}, got {name}")
    return _ALGORITHMS[name]


def _kv_bits(given: Mapping[str, Any]) -> float:
    scheme = given.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and isinstance(scheme.get("num_bits"), int) and BITS.hold(scheme["num_bits"]):
        return float(scheme["num_bits"])
    return 8 if str(given.get("kv_cache_quant_algo") or "").upper() == "FP8" else 16


def _groups(
    given: Mapping[str, Any], plain: float, left: _Names, place: object
) -> tuple[float, tuple[tuple[_Names, float], ...]]:  # fmt: skip
    """Return the bits of compressed-tensors for all linear maps, and of modules that a group names."""
    groups = given.get("config_groups")
    found = [one for one in groups.values() if isinstance(one, Mapping)] if isinstance(groups, Mapping) else []
    found = [one for one in found if isinstance(one.get("weights"), Mapping)]
    if not found:
        raise ModelError(f"{place}: quantization_config: config_groups: expected weights with num_bits, got {groups!r}")
    bits, own = None, [(left, plain)]
    for one in found:
        width = _group_bits(one["weights"], str(one.get("format") or given.get("format")), place)
        targets = [name for name in one.get("targets") or () if isinstance(name, str)]
        named = [name for name in targets if name.startswith("re:") or "." in name or "*" in name]
        if named:
            own.append((_names(named), width))
        if len(named) < len(targets) or not targets:  # a class, such as Linear
            bits = width
    return (plain, tuple(own)) if bits is None else (bits, tuple(own) if len(own) > 1 else ())


def _group_bits(found: Mapping[str, Any], form: str, place: object) -> float:
    """Return the bits of a group, scales and zero points counted."""
    if "mxfp4" in form:
        return MXFP4
    if "nvfp4" in form:
        return NVFP4
    width, group = _number(found, place, "num_bits"), found.get("group_size") or 0
    if not isinstance(group, int) or group <= 0:
        return width
    if found.get("type") == "float":
        return width + 8 / group
    return width + (16 + (0 if found.get("symmetric", True) else width)) / group


def _mlx(given: Mapping[str, Any], place: object) -> tuple[float, tuple[tuple[_Names, float], ...]]:
    """Return the bits of MLX's affine quantisation, and those of modules with their own."""

    def bits_of(one: Mapping[str, Any]) -> float:
        width = _number(one, place, "bits")
        return MXFP4 if one.get("mode") == "mxfp4" else width + 32 / _number(one, place, "group_size", default=64)

    own = [(_names([name]), bits_of(one)) for name, one in given.items() if isinstance(one, Mapping) and "bits" in one]
    return bits_of(given), tuple(own)
