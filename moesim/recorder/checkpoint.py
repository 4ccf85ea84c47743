"""A model that is never in memory as a whole: its parts are loaded from the safetensors shards, used and given back."""

from __future__ import annotations

from typing import Any

import torch
import transformers as _transformers
from safetensors import SafetensorError
from torch import Tensor, nn

from moesim.recorder.architectures import ARCHITECTURES, find_routers
from moesim.recorder.errors import RecordError
from moesim.recorder.loading import LoadOptions, short
from moesim.recorder.parameters import Parameters
from moesim.recorder.quantised import find_rule
from moesim.recorder.shard_files import Shards

transformers: Any = _transformers  # its types do not fit together


class LayeredModel:
    """A causal language model on the meta device, of which parts can be loaded; rotary embedding and routers are."""

    def __init__(self, model: Any, shards: Shards, device: torch.device, name: str) -> None:
        self.model = model
        self.device = device
        self._parameters = Parameters(model, shards, device, name)
        self._own_forwards()
        self._make_buffers()
        for router in find_routers(model):
            self.load(router.name)

    @classmethod
    def open(cls, options: LoadOptions) -> LayeredModel:
        """Open a checkpoint in safetensors of an architecture in the table, quantised in a way that is known or not at all."""
        options.check()
        where = {"revision": options.revision or "main", "trust_remote_code": False}
        try:
            config = transformers.AutoConfig.from_pretrained(options.model, **where)
            _check_architecture(config, options.model)
            rule = find_rule(config, options.model)
            dtype = config.dtype or torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
            shards = Shards.fetch(options, rule, dtype)
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
        except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
            raise RecordError(f"{options.model}: expected a causal language model in safetensors, got: {short(error)}") from None
        device = options.device_map or ("cuda" if torch.cuda.is_available() else "cpu")
        return cls(model.eval(), shards, torch.device(device), options.model)

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
        self._parameters.load(part)

    def free(self, part: str) -> None:
        """Give the memory of a module back."""
        self.model.get_submodule(part).to("meta")

    def bytes_to_load(self, part: str) -> int:
        """Most memory that loading a module takes."""
        return self._parameters.bytes_to_load(part)

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


def _pass_on(states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return states


def _is_stored(module: nn.Module, key: str) -> bool:
    return key not in module._non_persistent_buffers_set


def _check_architecture(config: Any, name: str) -> None:
    if config.model_type not in ARCHITECTURES:
        raise RecordError(
            f"{name}: --stream-layers: expected one of {', '.join(sorted(ARCHITECTURES))}, got '{config.model_type}'; "
            "leave the option out"
        )
