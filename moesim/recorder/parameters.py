"""Which weights in the shards make each parameter of a model, and how it is loaded.

The names of the weights and the way in which they are put together are those of transformers. A stack of experts is filled
one by one, so that the sources of one expert at most are there twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import conversion_mapping as _conversion_mapping
from transformers import core_model_loading as _core_model_loading
from transformers import modeling_utils as _modeling_utils

from moesim.recorder.errors import RecordError
from moesim.recorder.quantised import WORKING_BYTES
from moesim.recorder.shard_files import Shards

# Their types do not fit together.
conversion_mapping: Any = _conversion_mapping
core_model_loading: Any = _core_model_loading
modeling_utils: Any = _modeling_utils

_STACK = 3  # axes of a stack of experts


@dataclass(frozen=True)
class _Source:
    """Where one parameter of the model comes from."""

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
        self._model = model
        self._shards = shards
        self._device = device
        self._name = name
        self._plan = model._get_dtype_plan(model.dtype)
        self._mapping = conversion_mapping.get_model_conversion_mapping(model)
        self._sources = self._find()
        shards.check({weight for source in self._sources.values() for weight in source.weights})

    def of(self, part: str) -> list[str]:
        """Name the parameters of a module, the largest first."""
        names = [f"{part}.{name}" for name in self._model.get_submodule(part).state_dict()]
        missing = [name for name in names if name not in self._sources]
        if missing:
            raise self._missing(missing)
        return sorted(names, key=lambda name: (-self._sources[name].n_bytes, name))

    def load(self, part: str) -> None:
        """Load the parameters of a module."""
        for name in self.of(part):
            source = self._sources[name]
            if source.parts or source.stacked:
                self._load_stack(name, source)
            else:
                self._load_whole(name, source)

    def bytes_to_load(self, part: str) -> int:
        """Most memory that loading a module takes, with the sources of what is being loaded."""
        there, most = 0, 0
        for name in self.of(part):
            source = self._sources[name]
            most = max(most, there + source.n_bytes + source.n_working)
            there += source.n_bytes
        return most

    def _find(self) -> dict[str, _Source]:
        """Find out which weights of the shards make each parameter."""
        loading = core_model_loading
        renamings = [entry for entry in self._mapping if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, loading.WeightConverter)]
        expected = self._model.state_dict()
        converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        weights: dict[str, list[str]] = {}
        stacks: dict[str, dict[str, list[str]]] = {}
        for weight in sorted(self._shards.names, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(weight, renamings, converters, self._model.base_model_prefix, expected)
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
            working = self._working(weights[name], expected[name], n_parts)
            of = expected[name].dtype, expected[name].nbytes, working
            found[name] = _Source(weights[name], *of, parts, converter, stacked)
        return found

    def _working(self, weights: list[str], parameter: Any, n_parts: int) -> int:
        """A parameter, or one of a stack, is there twice for a moment, and the pages of the shard once more."""
        working: int = 2 * parameter.nbytes // n_parts
        return working + WORKING_BYTES * any(map(self._shards.is_quantised, weights))

    def _load_whole(self, name: str, source: _Source) -> None:
        how = modeling_utils.LoadStateDictConfig(
            device_map={"": self._device}, dtype=self._model.dtype, dtype_plan=self._plan, weight_mapping=self._mapping
        )
        slices = self._shards.slices(source.weights)
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(self._model, slices, how)
        if name in info.missing_keys or info.mismatched_keys or info.conversion_errors:
            raise self._missing([name])

    def _load_stack(self, name: str, source: _Source) -> None:
        """Fill a stack of experts one by one."""
        module, _, key = name.rpartition(".")
        empty = self._model.get_parameter(name)
        filled = torch.empty(empty.shape, dtype=empty.dtype, device=self._device)
        if self._n_experts(name, source) != len(empty):
            raise self._missing([name])
        for expert in range(len(empty)):
            one = self._one(name, source, expert)
            if one.shape != empty.shape[1:]:
                raise self._missing([name])
            filled[expert] = one
        setattr(self._model.get_submodule(module), key, nn.Parameter(filled, requires_grad=False))

    def _n_experts(self, name: str, source: _Source) -> int:
        return int(self._shards.slices([name])[name].get_shape()[0]) if source.stacked else len(source.parts)

    def _one(self, name: str, source: _Source, expert: int) -> Any:
        """Give one expert; the shard is opened anew each time, so that no more than its pages are in memory."""
        return self._shards.slices([name])[name][expert] if source.stacked else self._put_together(source.parts[expert], source)

    def _put_together(self, part: dict[str, str], source: _Source) -> Any:
        """Put one expert together; the operations of transformers make a stack of one."""
        slices = self._shards.slices(part.values())
        made: dict[str, Any] = {pattern: [slices[weight][...].to(source.dtype)] for pattern, weight in part.items()}
        for operation in source.converter.operations:
            patterns = source.converter.source_patterns, source.converter.target_patterns
            made = operation.convert(made, *patterns, config=self._model.config)
        (stack_of_one,) = made.values()
        return stack_of_one[0]

    def _missing(self, names: list[str]) -> RecordError:
        return RecordError(
            f"{self._name}: expected all weights of a {type(self._model).__name__}, got none that fits for {names[0]} and "
            f"{len(names) - 1} more; fetch the model again"
        )


def _stacks_experts(converter: Any) -> bool:
    """Whether a parameter is a stack of experts that can be put together one by one."""
    first, *others = converter.operations
    joins = all(isinstance(other, core_model_loading.Concatenate) and other.dim > 0 for other in others)
    return isinstance(first, core_model_loading.MergeModulelist) and first.dim == 0 and joins
