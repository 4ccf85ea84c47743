"""A model that is never in memory as a whole: its parts are loaded from the safetensors shards, used and given back.

The modules, the names of the weights in the shards and the way in which weights are put together are those of
transformers. A part is loaded one parameter after another, so that the sources of one parameter at most are there twice.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as _transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import conversion_mapping as _conversion_mapping
from transformers import core_model_loading as _core_model_loading
from transformers import modeling_utils as _modeling_utils
from transformers.utils import hub as _hub

from moesim.recorder.architectures import ARCHITECTURES, find_routers
from moesim.recorder.errors import RecordError
from moesim.recorder.loading import LoadOptions, short

# Their types do not fit together.
transformers: Any = _transformers
conversion_mapping: Any = _conversion_mapping
core_model_loading: Any = _core_model_loading
modeling_utils: Any = _modeling_utils
hub: Any = _hub


@dataclass(frozen=True)
class _Source:
    """Where one parameter of the model comes from."""

    keys: dict[str, Path]  # names in the shards, and in which shard each is
    n_bytes: int  # in memory, once loaded
    parts: list[dict[str, str]]  # of a stack of experts: for each, its names in the shards by the converter's patterns
    converter: Any = None  # of transformers, that puts one expert together


class LayeredModel:
    """A causal language model on the meta device, of which parts can be loaded; rotary embedding and routers are."""

    def __init__(self, model: Any, files: dict[str, Path], device: torch.device, name: str) -> None:
        self.model = model
        self.device = device
        self._name = name
        self._plan = model._get_dtype_plan(model.dtype)
        self._mapping = conversion_mapping.get_model_conversion_mapping(model)
        self._sources = self._find(files)
        self._own_forwards()
        self._make_buffers()
        for router in find_routers(model):
            self.load(router.name)

    @classmethod
    def open(cls, options: LoadOptions) -> LayeredModel:
        """Open a checkpoint in safetensors of an architecture in the table; a quantised one is refused."""
        options.check()
        where = {"revision": options.revision or "main", "trust_remote_code": False}
        try:
            config = transformers.AutoConfig.from_pretrained(options.model, **where)
            _check_config(config, options.model)
            files = _shards(options)
            dtype = config.dtype or torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            raise RecordError(f"{options.model}: expected a causal language model in safetensors, got: {short(error)}") from None
        device = options.device_map or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(model.eval(), files, torch.device(device), options.model)

    @property
    def decoder(self) -> Any:
        """The model without its head."""
        return self.model.get_decoder()

    @property
    def n_layers(self) -> int:
        """Decoder layers, with and without a router."""
        return len(self.decoder.layers)

    def layer_name(self, number: int) -> str:
        """Name of a decoder layer among the modules of the model."""
        return self._name_of(self.decoder.layers[number])

    @property
    def embedding_name(self) -> str:
        """Name of the input embedding among the modules of the model."""
        return self._name_of(self.model.get_input_embeddings())

    def _name_of(self, wanted: nn.Module) -> str:
        names: list[str] = [name for name, module in self.model.named_modules() if module is wanted]
        return names[0]

    def load(self, part: str) -> None:
        """Load the parameters of a module, the largest first."""
        for name in self._largest_first(part):
            self._load(name)

    def free(self, part: str) -> None:
        """Give the memory of a module back."""
        self.model.get_submodule(part).to("meta")

    def bytes_to_load(self, part: str) -> int:
        """Most memory that loading a module takes, with the sources of the parameter that is being loaded.

        A parameter, or one expert of a stack, is there twice for a moment, and the pages of the shard once more.
        """
        there, most = 0, 0
        for name in self._largest_first(part):
            source = self._sources[name]
            twice = source.n_bytes // max(1, len(source.parts))
            most = max(most, there + source.n_bytes + 2 * twice)
            there += source.n_bytes
        return most

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Embed the tokens of one text, (n_tokens,) int64 to (n_tokens, hidden); the embedding is loaded."""
        states: Tensor = self.model.get_input_embeddings()(tokens.to(self.device))
        return states

    @torch.no_grad()
    def run_layer(self, number: int, states: Tensor) -> Tensor:
        """Put the states of one text through a layer that is loaded, (n_tokens, hidden) to the same.

        The decoder's own forward makes masks and positions and calls the layer; the other layers pass the states on.
        """
        layer = self.decoder.layers[number]
        passing = layer.__dict__.pop("forward")
        try:
            output = self.decoder(inputs_embeds=states[None].to(self.device), use_cache=False)
        finally:
            layer.forward = passing
        after: Tensor = output.last_hidden_state[0]
        return after

    def _own_forwards(self) -> None:
        for module in [*self.decoder.layers, self.decoder.norm]:
            module.forward = _pass_on

    def _make_buffers(self) -> None:
        """Make what is computed from the configuration: the tables of rotary embeddings."""
        for name, module in list(self.model.named_modules()):
            if any(buffer.is_meta for key, buffer in module.named_buffers(recurse=False) if not _is_stored(module, key)):
                self.model.set_submodule(name, type(module)(config=self.model.config).to(self.device))

    def _find(self, files: dict[str, Path]) -> dict[str, _Source]:
        """Find out which weights of the shards make each parameter."""
        loading = core_model_loading
        renamings = [entry for entry in self._mapping if isinstance(entry, loading.WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, loading.WeightConverter)]
        expected = self.model.state_dict()
        converter_of = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        keys: dict[str, dict[str, Path]] = {}
        stacks: dict[str, dict[str, list[str]]] = {}
        for key in sorted(files, key=loading.dot_natural_key):
            name, pattern = loading.rename_source_key(key, renamings, converters, self.model.base_model_prefix, expected)
            if name not in expected:
                name, pattern = key, None
            keys.setdefault(name, {})[key] = files[key]
            if pattern is not None and _stacks_experts(converter_of[pattern]):
                stacks.setdefault(name, {}).setdefault(pattern, []).append(key)
        found = {}
        for name in expected.keys() & keys.keys():
            by_pattern = stacks.get(name, {})
            parts = [dict(zip(by_pattern, part, strict=True)) for part in zip(*by_pattern.values(), strict=True)]
            converter = converter_of[next(iter(by_pattern))] if by_pattern else None
            found[name] = _Source(keys[name], expected[name].nbytes, parts, converter)
        return found

    def _largest_first(self, part: str) -> Sequence[str]:
        names = [f"{part}.{name}" for name in self.model.get_submodule(part).state_dict()]
        missing = [name for name in names if name not in self._sources]
        if missing:
            raise self._missing(missing)
        return sorted(names, key=lambda name: (-self._sources[name].n_bytes, name))

    def _load(self, name: str) -> None:
        source = self._sources[name]
        if source.parts:
            self._load_stack(name, source)
            return
        how = modeling_utils.LoadStateDictConfig(
            device_map={"": self.device}, dtype=self.model.dtype, dtype_plan=self._plan, weight_mapping=self._mapping
        )
        slices = _slices(source.keys)
        info, _ = core_model_loading.convert_and_load_state_dict_in_model(self.model, slices, how)
        if name in info.missing_keys or info.mismatched_keys or info.conversion_errors:
            raise self._missing([name])

    def _load_stack(self, name: str, source: _Source) -> None:
        """Fill a stack of experts one by one; the operations of transformers put each together as a stack of one."""
        module, _, key = name.rpartition(".")
        empty = self.model.get_parameter(name)
        if len(source.parts) != len(empty):
            raise self._missing([name])
        filled = torch.empty(empty.shape, dtype=empty.dtype, device=self.device)
        for expert, part in enumerate(source.parts):
            slices = _slices({key: source.keys[key] for key in part.values()})
            made: dict[str, Any] = {pattern: [slices[key][...].to(empty.dtype)] for pattern, key in part.items()}
            for operation in source.converter.operations:
                patterns = source.converter.source_patterns, source.converter.target_patterns
                made = operation.convert(made, *patterns, config=self.model.config)
            (one,) = made.values()
            if one.shape[1:] != filled.shape[1:]:
                raise self._missing([name])
            filled[expert] = one[0]
        setattr(self.model.get_submodule(module), key, nn.Parameter(filled, requires_grad=False))

    def _missing(self, names: list[str]) -> RecordError:
        return RecordError(
            f"{self._name}: expected all weights of a {type(self.model).__name__}, got none that fits for {names[0]} and "
            f"{len(names) - 1} more; fetch the model again"
        )


def _slices(keys: dict[str, Path]) -> dict[str, Any]:
    """Weights in the shards that are read when they are indexed; no page stays mapped once they are gone."""
    opened: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in set(keys.values())}
    return {key: opened[path].get_slice(key) for key, path in keys.items()}


def _stacks_experts(converter: Any) -> bool:
    """Whether a parameter is a stack of experts that can be put together one by one."""
    first, *others = converter.operations
    joins = all(isinstance(other, core_model_loading.Concatenate) and other.dim > 0 for other in others)
    return isinstance(first, core_model_loading.MergeModulelist) and first.dim == 0 and joins


def _pass_on(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return states


def _is_stored(module: nn.Module, key: str) -> bool:
    return key not in module._non_persistent_buffers_set


def _check_config(config: Any, name: str) -> None:
    if config.model_type not in ARCHITECTURES:
        raise RecordError(
            f"{name}: --stream-layers: expected one of {', '.join(sorted(ARCHITECTURES))}, got '{config.model_type}'; "
            "leave the option out"
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        stated = quantised.to_dict() if hasattr(quantised, "to_dict") else dict(quantised)
        method = stated.get("quant_method", "quantised ones")
        raise RecordError(
            f"{name}: --stream-layers: expected weights that are not quantised (none are dequantised yet), got {method}; "
            "leave the option out, or use a checkpoint in bfloat16"
        )


def _shards(options: LoadOptions) -> dict[str, Path]:
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
            return dict.fromkeys(file.keys(), whole)
    shard_of: dict[str, str] = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
    paths = {name: Path(str(fetched(name))) for name in sorted(set(shard_of.values()))}
    return {key: paths[name] for key, name in shard_of.items()}
