"""The weights in the safetensors shards of a checkpoint, by the names that they have once they are dequantised."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers.utils import hub as _hub

from moesim.core.gate import JSON, read_bytes
from moesim.recorder.errors import RecordError
from moesim.recorder.loading import LoadOptions
from moesim.recorder.quantised import FLOATS, Rule

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
        """Give its shape, as a weight of safetensors does."""
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
        """Find the shard of every weight; on the hub they are fetched first."""

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
        """Whether a weight has to be dequantised."""
        return name in self._pairs

    def slices(self, names: Iterable[str]) -> dict[str, Any]:
        """Give weights that are read when they are indexed; no page stays mapped once they are gone."""
        opened: dict[Path, Any] = {}

        def stored(key: str) -> Any:
            path = self._path_of[key]
            if path not in opened:
                opened[path] = safe_open(path, framework="pt")
            return opened[path].get_slice(key)

        return {name: self._slice(name, *map(stored, self._pairs.get(name, (name,)))) for name in names}

    def check(self, names: Iterable[str]) -> None:
        """Check that weights can be read as numbers, by what the shards say of their types and shapes."""
        self.slices(names)

    def _slice(self, name: str, *stored: Any) -> Any:
        place = f"{self._path_of[self._pairs.get(name, (name,))[0]]}: {name}"
        got = [(one.get_dtype(), tuple(one.get_shape())) for one in stored]
        told = " and ".join(f"{dtype} {shape}" for dtype, shape in got)
        if self._rule is None or not self.is_quantised(name):
            if got[0][0] not in FLOATS:
                expected = f"one of {', '.join(FLOATS)}, or a scale beside it"
                raise RecordError(f"{place}: expected {expected}, got {told}; fetch the model again")
            return stored[0]
        codes, scales = stored
        (code_type, code_shape), (scale_type, scale_shape) = got
        shape = self._rule.shape(code_shape, scale_shape)
        if code_type not in self._rule.code_types or scale_type not in self._rule.scale_types or shape is None:
            raise RecordError(f"{place}: expected {self._rule}, got {told}; fetch the model again")
        return _Dequantised(codes, scales, self._rule, shape, self._dtype, place)
