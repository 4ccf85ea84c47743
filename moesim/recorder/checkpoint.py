"""A model that is never whole in memory: parts of its safetensors shards are.

Quantised weights (MXFP4, and FP8 with a scale for a block, a row or a whole weight) are dequantised in float32, and rounded to
the model's type once. Stacked experts are filled one by one, so that one expert's sources at most are there twice.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, ClassVar

import torch
import transformers as _transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import conversion_mapping as _conversion_mapping
from transformers import core_model_loading as _core_model_loading
from transformers import modeling_utils as _modeling_utils
from transformers.utils import hub as _hub

from moesim.core.gate import JSON, read_bytes
from moesim.recorder import RecordError
from moesim.recorder.loading import LoadOptions, auto_model, short
from moesim.recorder.routers import Router, candidates

#: Values of the 16 codes of FP4 (E2M1): a sign, two bits of exponent, one of mantissa.
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_CODES = torch.cat([_E2M1, -_E2M1])
#: Values of the two codes in each byte, the lower four bits first; both are looked up as one number of 64 bits.
_PAIRS = torch.stack([_CODES.repeat(16), _CODES.repeat_interleave(16)], dim=1).view(torch.int64).flatten()
FLOATS = ("F64", "F32", "F16", "BF16")  # types of weights that are not quantised, as safetensors calls them
_BLOCK = 32  # values of MXFP4 that share a scale
_E8M0_BIAS = 127
_SUFFIXES = ("_scale", "_scale_inv")  # of the keys of scales of FP8, after those of their weights
_PIECE = 2**20  # values that are dequantised at once
WORKING_BYTES = 16 * _PIECE  # bytes at most for what is dequantised at once, next to codes and result
STREAMED = (
    "afmoe", "aria_text", "axk1", "axk2", "bailing_hybrid", "cohere2_moe", "deepseek_v2", "deepseek_v3", "deepseek_v32",
    "dots1", "dots3_note_text", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "glm4_moe_lite",
    "glm4v_moe_text", "gpt_oss", "granitemoe", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe", "hy_v3",
    "kimi_linear", "kolibri1", "laguna", "mellum", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "mixtral",
    "olmoe", "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "solar_open",
)  # fmt: skip
"""Architectures whose layers pass each other one state and nothing else."""
_TOLD = ("format", "bits", "load_in_4bit", "load_in_8bit", "expert_dtype")
"""Facts of a refused configuration, next to its method."""


@dataclass(frozen=True)
class Mxfp4:
    """A stack of weights: blocks of 32 FP4 codes, two a byte, and a power of two a block."""

    code_types: ClassVar = ("U8",)
    scale_types: ClassVar = ("U8",)

    def __str__(self) -> str:
        return f"MXFP4 in blocks of {_BLOCK}"

    def scales_of(self, keys: Collection[str]) -> dict[str, tuple[str, str]]:
        """Find the weights, by name: keys of codes and of scales."""
        names = [key.removesuffix("_blocks") for key in keys if key.endswith("_blocks")]
        return {name: (f"{name}_blocks", f"{name}_scales") for name in names if f"{name}_scales" in keys}

    def shape(self, codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
        """Return the shape of the weight; None: the two do not fit together."""
        if len(codes) != 4 or codes[:-1] != scales or codes[-1] != _BLOCK // 2:
            return None
        return codes[0], codes[2] * _BLOCK, codes[1]

    def pieces(self, codes: Tensor, scales: Tensor) -> Iterator[tuple[Any, Tensor]]:
        """Dequantise one of a stack to float32, transposed, in pieces with their places."""
        for rows in _pieces(len(codes), codes[0].numel() * 2):
            values = _PAIRS.index_select(0, codes[rows].flatten().int()).view(torch.float32).view(*scales[rows].shape, _BLOCK)
            values *= (scales[rows].float() - _E8M0_BIAS).exp2()[..., None]  # 255, which is no number, gives infinity
            yield (slice(None), rows), values.flatten(-2).T


@dataclass(frozen=True)
class Fp8:
    """Codes in E4M3, each times the scale of its block."""

    code_types: ClassVar = ("F8_E4M3",)
    scale_types: ClassVar = (*FLOATS, "F8_E8M0")

    block: tuple[int, int] | None = None  # None: a scale for the whole weight, or for each row

    def __str__(self) -> str:
        return "FP8 with a scale for a weight or a row" if self.block is None else "FP8 in blocks of {} x {}".format(*self.block)

    def scales_of(self, keys: Collection[str]) -> dict[str, tuple[str, str]]:
        return {key: (key, key + suffix) for suffix in _SUFFIXES for key in keys if key + suffix in keys}

    def shape(self, codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, ...] | None:
        return codes if len(codes) == 2 and self._block(codes, scales) is not None else None

    def _block(self, codes: tuple[int, ...], scales: tuple[int, ...]) -> tuple[int, int] | None:
        n_rows, n_columns = codes
        if self.block is None:
            if scales in ((), (1,), (1, 1)):
                return n_rows, n_columns
            return (1, n_columns) if scales in ((n_rows, 1), (n_rows,)) else None
        return self.block if scales == (ceil(n_rows / self.block[0]), ceil(n_columns / self.block[1])) else None

    def pieces(self, codes: Tensor, scales: Tensor) -> Iterator[tuple[Any, Tensor]]:
        n_rows, n_columns = codes.shape
        block = self._block((n_rows, n_columns), tuple(scales.shape))
        assert block is not None  # the shapes were checked before
        grid = scales.float().reshape(ceil(n_rows / block[0]), -1)
        for rows in _pieces(n_rows, n_columns):
            scale = grid[torch.arange(n_rows)[rows] // block[0]]
            yield rows, codes[rows].float() * scale.repeat_interleave(block[1], dim=1)[:, :n_columns]


Rule = Mxfp4 | Fp8


def _pieces(n_rows: int, n_columns: int) -> Iterator[slice]:
    step = max(1, _PIECE // n_columns)
    for first in range(0, n_rows, step):
        yield slice(first, min(first + step, n_rows))


def find_rule(config: Any, name: str) -> Rule | None:
    """Find out how a checkpoint is quantised; None: not at all."""
    quantised = getattr(config, "quantization_config", None)
    if quantised is None:
        return None
    stated: dict[str, Any] = quantised.to_dict() if hasattr(quantised, "to_dict") else dict(quantised)
    method = getattr(stated.get("quant_method"), "value", stated.get("quant_method"))
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8" and stated.get("expert_dtype", "fp8") == "fp8":
        return Fp8(_block(stated.get("weight_block_size")))
    if method == "compressed-tensors" and stated.get("format") == "float-quantized":
        groups = [group.get("weights") or {} for group in (stated.get("config_groups") or {}).values()]
        blocks = {_block(weights.get("block_structure")) for weights in groups}
        if len(blocks) == 1 and all(map(_is_fp8, groups)):
            return Fp8(blocks.pop())
    told = [str(method), *(f"{key} {stated[key]}" for key in _TOLD if stated.get(key))]
    raise RecordError(
        f"{name}: --stream-layers: expected weights that are not quantised, or are in MXFP4 or FP8, got {', '.join(told)}; "
        "leave the option out, or use a checkpoint in bfloat16"
    )


def _block(stated: Any) -> tuple[int, int] | None:
    if stated is None:
        return None
    if not (isinstance(stated, list | tuple) and len(stated) == 2 and all(type(n) is int and n > 0 for n in stated)):
        raise ValueError(f"blocks of {stated} in its quantization_config instead of two positive numbers")
    return stated[0], stated[1]


def _is_fp8(weights: Mapping[str, Any]) -> bool:
    kinds = weights.get("type"), weights.get("num_bits"), weights.get("symmetric", True)
    return kinds == ("float", 8, True) and weights.get("strategy") in ("tensor", "channel", "block")


hub: Any = _hub  # its types do not fit together


@dataclass(frozen=True)
class _Dequantised:
    """A quantised weight that is read when it is indexed, whole or one of a stack."""

    codes: Any
    scales: Any
    rule: Rule
    shape: tuple[int, ...]
    dtype: torch.dtype
    place: str

    def get_shape(self) -> tuple[int, ...]:
        return self.shape

    def __getitem__(self, index: Any) -> Tensor:
        if index is ... and len(self.shape) == 3:
            return torch.stack([self[n] for n in range(self.shape[0])])
        filled = torch.empty(self.shape[-2:], dtype=self.dtype)
        for place, values in self.rule.pieces(self.codes[index], self.scales[index]):
            if not values.sum().isfinite():
                raise RecordError(f"{self.place}: expected numbers once it is dequantised, got none; fetch the model again")
            filled[place] = values
        return filled


class Shards:
    """All weights of a checkpoint; nothing stays open."""

    def __init__(self, path_of: dict[str, Path], rule: Rule | None, dtype: torch.dtype) -> None:
        self._path_of = path_of
        self._rule = rule
        self._dtype = dtype  # of what is dequantised
        self._pairs = {} if rule is None else rule.scales_of(path_of.keys())
        parts = {key for pair in self._pairs.values() for key in pair}
        self.names = [*(key for key in path_of if key not in parts), *self._pairs]

    @classmethod
    def fetch(cls, options: LoadOptions, rule: Rule | None, dtype: torch.dtype) -> Shards:
        def fetched(file: str, *, optional: bool = False) -> str | None:
            found: str | None = hub.cached_file(
                options.model, file, revision=options.revision or "main", _raise_exceptions_for_missing_entries=not optional
            )
            return found

        index = fetched("model.safetensors.index.json", optional=True)
        if index is None:
            whole = Path(str(fetched("model.safetensors")))
            with safe_open(whole, framework="pt") as file:
                return cls(dict.fromkeys(file.keys(), whole), rule, dtype)
        shard_of: dict[str, str] = json.loads(read_bytes(Path(index), JSON))["weight_map"]
        paths = {name: Path(str(fetched(name))) for name in sorted(set(shard_of.values()))}
        return cls({key: paths[name] for key, name in shard_of.items()}, rule, dtype)

    def is_quantised(self, name: str) -> bool:
        return name in self._pairs

    def slices(self, names: Iterable[str]) -> dict[str, Any]:
        """Return weights that are read when they are indexed; no page stays mapped afterwards."""
        opened: dict[Path, Any] = {}

        def stored(key: str) -> Any:
            path = self._path_of[key]
            if path not in opened:
                opened[path] = safe_open(path, framework="pt")
            return opened[path].get_slice(key)

        return {name: self._slice(name, *map(stored, self._pairs.get(name, (name,)))) for name in names}

    def check(self, names: Iterable[str]) -> None:
        """Check from the shards' types and shapes that weights can be read as numbers."""
        self.slices(names)

    def _slice(self, name: str, *stored: Any) -> Any:
        place = f"{self._path_of[self._pairs.get(name, (name,))[0]]}: {name}"
        got = [(one.get_dtype(), tuple(one.get_shape())) for one in stored]
        told = " and ".join(f"{dtype} {shape}" for dtype, shape in got)
        if self._rule is None or not self.is_quantised(name):
            if got[0][0] not in FLOATS:
                expected = f"one of {', '.join(FLOATS)}, or a scale next to it"
                raise RecordError(f"{place}: expected {expected}, got {told}; fetch the model again")
            return stored[0]
        codes, scales = stored
        (code_type, code_shape), (scale_type, scale_shape) = got
        shape = self._rule.shape(code_shape, scale_shape)
        if code_type not in self._rule.code_types or scale_type not in self._rule.scale_types or shape is None:
            raise RecordError(f"{place}: expected {self._rule}, got {told}; fetch the model again")
        return _Dequantised(codes, scales, self._rule, shape, self._dtype, place)


# Their types do not fit together.
conversion_mapping: Any = _conversion_mapping
core_model_loading: Any = _core_model_loading
modeling_utils: Any = _modeling_utils

_STACK = 3  # axes of a stack of experts


@dataclass(frozen=True)
class _Source:
    weights: list[str]  # names in the shards
    dtype: torch.dtype
    n_bytes: int  # in memory, once loaded
    n_working: int  # bytes more at most, while it is being loaded
    parts: list[dict[str, str]]  # of a stack of experts: for each, its names in the shards by the converter's patterns
    converter: Any = None  # of transformers, that puts one expert together
    stacked: bool = False  # whether the shards hold it as a stack


class Parameters:
    """The parameters of a model on the meta device."""

    def __init__(self, model: Any, shards: Shards, device: torch.device, name: str) -> None:
        self.model, self.device = model, device
        self._shards, self._name = shards, name
        self._plan = model._get_dtype_plan(model.dtype)
        self._mapping = conversion_mapping.get_model_conversion_mapping(model)
        self._sources = self._find()
        shards.check({weight for source in self._sources.values() for weight in source.weights})

    def of(self, part: str) -> list[str]:
        if part in self._sources:
            return [part]
        names = [f"{part}.{name}" for name in self.model.get_submodule(part).state_dict()]
        missing = [name for name in names if name not in self._sources]
        if missing:
            raise self._missing(missing)
        return sorted(names, key=lambda name: (-self._sources[name].n_bytes, name))

    def load(self, part: str) -> None:
        for name in self.of(part):
            source = self._sources[name]
            if source.parts or source.stacked:
                self._load_stack(name, source)
            else:
                self._load_whole(name, source)

    def bytes_to_load(self, part: str) -> int:
        """Return the most memory that loading a module takes, sources included."""
        there, most = 0, 0
        for name in self.of(part):
            source = self._sources[name]
            most = max(most, there + source.n_bytes + source.n_working)
            there += source.n_bytes
        return most

    def _find(self) -> dict[str, _Source]:
        loading = core_model_loading
        renamings = [entry for entry in self._mapping if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, loading.WeightConverter)]
        expected = self.model.state_dict()
        converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        weights: dict[str, list[str]] = {}
        stacks: dict[str, dict[str, list[str]]] = {}
        for weight in sorted(self._shards.names, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(weight, renamings, converters, self.model.base_model_prefix, expected)
            if name not in expected:
                name, pattern = weight, None
            weights.setdefault(name, []).append(weight)
            if pattern is not None and _stacks_experts(converter_of[pattern]):
                stacks.setdefault(name, {}).setdefault(pattern, []).append(weight)
        found = {}
        for name in expected.keys() & weights.keys():
            by_pattern = stacks.get(name, {})
            parts = [dict(zip(by_pattern, part, strict=True)) for part in zip(*by_pattern.values(), strict=True)]
            converter = converter_of[next(iter(by_pattern))] if by_pattern else None
            stacked = not parts and weights[name] == [name] and expected[name].ndim == _STACK
            n_parts = len(parts) or (len(expected[name]) if stacked else 1)
            # A parameter, or one of a stack, is there twice for a moment, and the pages of the shard once more.
            working = 2 * expected[name].nbytes // n_parts
            working += WORKING_BYTES * any(map(self._shards.is_quantised, weights[name]))
            of = expected[name].dtype, expected[name].nbytes, working
            found[name] = _Source(weights[name], *of, parts, converter, stacked)
        return found

    def _load_whole(self, name: str, source: _Source) -> None:
        how = modeling_utils.LoadStateDictConfig(
            device_map={"": self.device}, dtype=self.model.dtype, dtype_plan=self._plan, weight_mapping=self._mapping
        )
        slices = self._shards.slices(source.weights)
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(self.model, slices, how)
        if name in info.missing_keys or info.mismatched_keys or info.conversion_errors:
            raise self._missing([name])

    def _load_stack(self, name: str, source: _Source) -> None:
        module, _, key = name.rpartition(".")
        empty = self.model.get_parameter(name)
        filled = torch.empty(empty.shape, dtype=empty.dtype, device=self.device)
        n_experts = self._shards.slices([name])[name].get_shape()[0] if source.stacked else len(source.parts)
        if n_experts != len(empty):
            raise self._missing([name])
        for expert in range(len(empty)):  # the shard is opened anew each time: no more than its pages are in memory
            stack = self._shards.slices([name])[name] if source.stacked else None
            one = self._put_together(source.parts[expert], source) if stack is None else stack[expert]
            if one.shape != empty.shape[1:]:
                raise self._missing([name])
            filled[expert] = one
        setattr(self.model.get_submodule(module), key, nn.Parameter(filled, requires_grad=False))

    def _put_together(self, part: dict[str, str], source: _Source) -> Any:
        """Put one expert together; the operations of transformers make a stack of one."""
        slices = self._shards.slices(part.values())
        made: dict[str, Any] = {pattern: [slices[weight][...].to(source.dtype)] for pattern, weight in part.items()}
        for operation in source.converter.operations:
            patterns = source.converter.source_patterns, source.converter.target_patterns
            made = operation.convert(made, *patterns, config=self.model.config)
        (stack_of_one,) = made.values()
        return stack_of_one[0]

    def _missing(self, names: list[str]) -> RecordError:
        return RecordError(
            f"{self._name}: expected all weights of a {type(self.model).__name__}, got none that fits for {names[0]} and "
            f"{len(names) - 1} more; fetch the model again"
        )


def _stacks_experts(converter: Any) -> bool:
    first, *others = converter.operations
    joins = all(isinstance(other, core_model_loading.Concatenate) and other.dim > 0 for other in others)
    return isinstance(first, core_model_loading.MergeModulelist) and first.dim == 0 and joins


transformers: Any = _transformers  # its types do not fit together


class LayeredModel(Parameters):
    """A causal language model on the meta device, whose parts can be loaded."""

    def __init__(self, model: Any, shards: Shards, device: torch.device, name: str) -> None:
        super().__init__(model, shards, device, name)
        for module in [*self.decoder.layers, self.decoder.norm]:
            module.forward = _pass_on
        self._make_buffers()
        self._check_states()
        for router in (one for parts in candidates(model).values() for one in parts if isinstance(one, Router)):
            for name in (router.name, *(f"{router.name.rpartition('.')[0]}.{extra}" for extra in router.extras)):
                self.load(name)

    @classmethod
    def open(cls, options: LoadOptions) -> LayeredModel:
        """Open a safetensors checkpoint of a known architecture, in a known quantisation or none."""
        options.check()
        where = {"revision": options.revision or "main", "trust_remote_code": False}
        try:
            config = transformers.AutoConfig.from_pretrained(options.model, **where)
            if config.get_text_config().model_type not in STREAMED:
                raise RecordError(
                    f"{options.model}: --stream-layers: expected an architecture whose layers pass each other one state, as "
                    f"'{STREAMED[-1]}', got '{config.model_type}'; leave the option out"
                )
            rule = find_rule(config, options.model)
            dtype = config.dtype or torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
            shards = Shards.fetch(options, rule, dtype)
            with torch.device("meta"):
                model = auto_model(config).from_config(config, dtype=dtype)
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            raise RecordError(f"{options.model}: expected a causal language model in safetensors, got: {short(error)}") from None
        device = options.device_map or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(model.eval(), shards, torch.device(device), options.model)

    @property
    def decoder(self) -> Any:
        return self.model.get_decoder()

    @property
    def n_layers(self) -> int:
        return len(self.decoder.layers)

    def layer_name(self, number: int) -> str:
        return self._name_of(self.decoder.layers[number])

    @property
    def embedding_name(self) -> str:
        return self._name_of(self.model.get_input_embeddings())

    def _name_of(self, wanted: nn.Module) -> str:
        names: list[str] = [name for name, module in self.model.named_modules() if module is wanted]
        return names[0]

    def free(self, part: str) -> None:
        self.model.get_submodule(part).to("meta")

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        states: Tensor = self.model.get_input_embeddings()(tokens.to(self.device))
        return states

    @torch.no_grad()
    def run_layer(self, number: int, states: Tensor) -> Tensor:
        layer = self.decoder.layers[number]
        passing = layer.__dict__.pop("forward")
        try:
            output = self.decoder(inputs_embeds=states[None].to(self.device), use_cache=False)
        finally:
            layer.forward = passing
        after: Tensor = output.last_hidden_state[0]
        return after

    @torch.no_grad()
    def _check_states(self) -> None:
        """Check that nothing but the layers changes a state."""
        states = torch.randn(1, 2, self.model.config.get_text_config().hidden_size, dtype=self.model.dtype, device=self.device)
        if not torch.equal(self.decoder(inputs_embeds=states, use_cache=False).last_hidden_state, states):
            kind, what = self.model.config.model_type, "an embedding that its decoder scales"
            raise RecordError(f"{self._name}: --stream-layers: expected a '{kind}' without {what}, got one; leave the option out")

    def _make_buffers(self) -> None:
        """Make what is computed from the configuration: the tables of rotary embeddings."""
        config = self.model.config.get_text_config()
        for name, module in list(self.decoder.named_modules()):
            buffers = module.named_buffers(recurse=False)
            if any(buffer.is_meta and key in module._non_persistent_buffers_set for key, buffer in buffers):
                self.decoder.set_submodule(name, type(module)(config=config).to(self.device))


def _pass_on(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return states
