"""Models: shapes and bytes, built in or read from a Hugging Face config.json."""

from moesim.model.load import MXFP4_BITS, ModelSpec, bits_to_bytes, builtin_models, load_model

__all__ = ["MXFP4_BITS", "ModelSpec", "bits_to_bytes", "builtin_models", "load_model"]
