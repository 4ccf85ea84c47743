"""Load a model and its tokenizer from a folder or the Hugging Face hub into little memory."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers as _transformers
from safetensors import SafetensorError

from moesim.errors import install
from moesim.recorder import RecordError, check_model_name
from moesim.recorder.routers import Router

transformers: Any = _transformers  # its types do not fit together

DTYPES = ("auto", "float32", "float16", "bfloat16")
_SIZE = re.compile(r"\d+(\.\d+)?\s?(GiB|MiB|GB|MB)")


@dataclass(frozen=True)
class LoadOptions:
    """How to load a model.

    Attributes
    ----------
    model : str
        Folder, or name on the hub.
    revision : str or None
        Branch, tag or commit on the hub.
    dtype : str
        One of `DTYPES`; ``auto``: that of the checkpoint.
    device_map : str or None
        ``auto`` spreads layers over GPUs, then the CPU; or a device. None: the first GPU if there is one.
    gpu_memory, cpu_memory : str or None
        Most of each GPU's and of the host's memory that ``auto`` may fill with weights, such as ``22GiB``.
    bits : int or None
        4 or 8: quantise linear layers with bitsandbytes while loading.
    stream_layers : bool
        Have one decoder layer in memory at a time.
    memory : str or None
        Most of the host's memory that such a recording may take, such as ``6GB``.
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    device_map: str | None = None
    gpu_memory: str | None = None
    cpu_memory: str | None = None
    bits: int | None = None
    stream_layers: bool = False
    memory: str | None = None

    def check(self) -> None:
        """Raise `RecordError` for what can be checked before anything is loaded."""
        if self.dtype not in DTYPES:
            raise RecordError(f"--dtype: expected one of {', '.join(DTYPES)}, got '{self.dtype}'")
        for option, value in (("--gpu-memory", self.gpu_memory), ("--cpu-memory", self.cpu_memory)):
            if value is None:
                continue
            if not _SIZE.fullmatch(value):
                raise RecordError(f"{option}: expected a size such as 22GiB, got '{value}'")
            if self.device_map != "auto":
                raise RecordError(f"{option}: expected --device-map auto with it, got {self.device_map or 'none'}")
        if self.gpu_memory and not torch.cuda.is_available():
            raise RecordError("--gpu-memory: expected a CUDA device, got none; leave the option out")
        if self.device_map and not _installed("accelerate"):
            raise RecordError(f"--device-map: expected the package accelerate, got none; {install('record')}")
        if self.memory is not None and not self.stream_layers:
            raise RecordError(
                "--memory: expected --stream-layers with it, got none; --cpu-memory bounds what --device-map auto takes"
            )
        if self.stream_layers and self.device_map == "auto":
            raise RecordError("--device-map: expected a device such as cuda with --stream-layers, got auto")
        if self.bits is not None:
            option = f"--load-in-{self.bits}bit"
            if not torch.cuda.is_available():
                raise RecordError(f"{option}: expected a CUDA device, got none; leave the option out, or use --dtype bfloat16")
            if not _installed("bitsandbytes"):
                raise RecordError(f"{option}: expected the package bitsandbytes, got none; pip install bitsandbytes")


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def quiet() -> None:
    """Keep the bars and notes of transformers off stderr."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()


def load_tokenizer(options: LoadOptions) -> Any:
    """Load the tokenizer of a model; errors as for `load_model`."""
    check_model_name(options.model)
    try:
        return transformers.AutoTokenizer.from_pretrained(options.model, revision=_revision(options), trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise RecordError(f"{options.model}: expected a tokenizer of transformers, got: {short(error)}") from None


def load_model(options: LoadOptions) -> Any:
    """Load a causal language model in evaluation mode."""
    options.check()
    check_model_name(options.model)
    more: dict[str, Any] = {}
    if options.device_map:
        more["device_map"] = options.device_map
        memory: dict[int | str, str] = {}
        if options.gpu_memory:
            memory |= dict.fromkeys(range(torch.cuda.device_count()), options.gpu_memory.replace(" ", ""))
        if options.cpu_memory:
            memory["cpu"] = options.cpu_memory.replace(" ", "")
        if memory:
            more["max_memory"] = memory
    if options.bits is not None:
        more["quantization_config"] = _bitsandbytes(options)
        more.setdefault("device_map", {"": 0})
    where = {"revision": _revision(options), "trust_remote_code": False}
    try:
        config = transformers.AutoConfig.from_pretrained(options.model, **where)
        quantised = getattr(config, "quantization_config", None)
        if (quantised or {}).get("quant_method") == "mxfp4":
            # Its kernels leave the routers out. The values are the same.
            more["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
        model, loaded = auto_model(config).from_pretrained(
            options.model, config=config, dtype=options.dtype, use_safetensors=True, output_loading_info=True, **where, **more
        )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, torch.OutOfMemoryError) as error:
        raise RecordError(f"{options.model}: expected a causal language model of transformers, got: {short(error)}") from None
    missing = sorted([*loaded["missing_keys"], *loaded["mismatched_keys"]], key=str)
    if missing:
        raise RecordError(
            f"{options.model}: expected all weights of a {type(model).__name__}, got none that fits for {missing[0]} and "
            f"{len(missing) - 1} more; fetch the model again"
        )
    if quantised is not None:
        model.config.quantization_config = quantised  # transformers forgets it where it has dequantised
    if "device_map" not in more and torch.cuda.is_available():
        model = model.to("cuda")
    return model.eval()


def auto_model(config: Any) -> Any:
    """Return the class of transformers that makes a model: a language model, or one that also sees and reads text alone."""
    language, seeing = transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText
    return seeing if type(config) in seeing._model_mapping and type(config) not in language._model_mapping else language


def _bitsandbytes(options: LoadOptions) -> Any:
    compute = torch.float16 if options.dtype == "float16" else torch.bfloat16
    if options.bits == 4:
        return transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=compute)
    return transformers.BitsAndBytesConfig(load_in_8bit=True)


def _revision(options: LoadOptions) -> str:
    return options.revision or "main"


def short(error: BaseException) -> str:
    """Put an error into one line."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def quantisation(model: Any, bits: int | None) -> dict[str, Any] | None:
    """Describe a model's quantisation for header and warning; None: not quantised."""
    config: Any = getattr(model.config, "quantization_config", None)
    if bits is None:
        if config is None:
            return None
        stated = config.to_dict() if hasattr(config, "to_dict") else dict(config)
        return {"method": str(stated.get("quant_method", "unknown")), "by": "checkpoint", "may_change_routing": True}
    method = "bitsandbytes nf4" if bits == 4 else "bitsandbytes int8"
    return {"method": method, "by": "recorder", "share": round(_quantised_share(model), 4), "may_change_routing": True}


def _quantised_share(model: Any) -> float:
    linear = [module for module in model.modules() if type(module).__module__.startswith("bitsandbytes")]
    packed = {id(parameter) for module in linear for parameter in module.parameters(recurse=False)}
    quantised = sum(module.in_features * module.out_features for module in linear)
    others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in packed)
    return float(quantised / (quantised + others))


def describe_quantisation(facts: dict[str, Any]) -> str:
    """Describe in one line how quantisation affects what is recorded."""
    whose = "the checkpoint is" if facts["by"] == "checkpoint" else f"{facts['share']:.0%} of the weights are"
    return f"{whose} quantised ({facts['method']}): routing may differ from that of the unquantised model; the header says so"


def routers_sha256(routers: list[Router]) -> str:
    """Hash all router weights in float32, which identifies a model however the rest was loaded."""
    digest = hashlib.sha256()
    for router in routers:
        digest.update(router.weight().numpy().tobytes())
    return digest.hexdigest()


def config_sha256(model: Any) -> str:
    """Hash a model's configuration without what depends on how it was loaded."""
    others = ("transformers_version", "dtype", "quantization_config")
    config = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_") and key not in others}
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()


def end_tokens(model: Any) -> tuple[int, ...]:
    """List the tokens that end a text, by generation settings or configuration."""
    for holder in (getattr(model, "generation_config", None), model.config):
        found = getattr(holder, "eos_token_id", None)
        if found is not None:
            return (int(found),) if isinstance(found, int) else tuple(int(token) for token in found)
    return ()
