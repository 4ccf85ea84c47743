"""Schedulers of released servers, a file each."""

from moesim.serving.schedulers.freetoken import FreeToken
from moesim.serving.schedulers.ktransformers import KTransformers
from moesim.serving.schedulers.llama_server import LlamaServer
from moesim.serving.schedulers.sglang import Sglang
from moesim.serving.schedulers.static import Static
from moesim.serving.schedulers.strata import Strata
from moesim.serving.schedulers.vllm import Vllm

__all__ = ["FreeToken", "KTransformers", "LlamaServer", "Sglang", "Static", "Strata", "Vllm"]
