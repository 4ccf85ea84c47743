"""Models: layers, parameters, bytes; by name, from a config.json or from a GGUF file."""

from moesim.model.card import Card
from moesim.model.load import MXFP4_BITS, ModelSpec, bits_to_bytes, builtin_models, load_model

__all__ = ["MXFP4_BITS", "Card", "ModelSpec", "bits_to_bytes", "builtin_models", "load_model"]
