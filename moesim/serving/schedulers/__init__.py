"""Schedulers of released servers, a file each."""

from moesim.serving.schedulers.llama_server import LlamaServer
from moesim.serving.schedulers.vllm import Vllm

__all__ = ["LlamaServer", "Vllm"]
