"""Placements as command lines of engines: flags of ``engine_flags.yaml``, or none."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError
from moesim.studies.advice.candidates import EXLLAMAV3_PAGE, SHIPPED, Candidate, shared_method
from moesim.studies.advice.question import PREFILL_CHUNK, Setting

FILE = "engine_flags.yaml"
COUNTS = "COUNTS.pt"  # of a command that needs counts of experts, recorded before


@dataclass(frozen=True)
class Engine:
    """An engine of the table."""

    # name, checked, date: name, and the version that was read and when
    name: str
    checked: str
    date: str
    program: str  # what is called
    expresses: tuple[str, ...]  # families of placements that its flags can say
    cannot: str  # what they cannot
    flags: Mapping[str, Mapping[str, Any]]  # `short`, `values`, `meaning`, `source` of each
    unknown: str = ""  # why nothing can be typed: the flag is not known; empty if it is

    def flag(self, name: str, *values: object) -> list[str]:
        if name not in self.flags:
            raise ConfigError(f"{FILE}: {self.name}: expected a flag of the table, got {name}; add it with its source")
        return [name, *map(str, values)]


@dataclass(frozen=True)
class Command:
    """A command line for a placement."""

    engine: str  # name
    checked: str  # version its flags were read in
    words: tuple[str, ...]  # the command; words in capitals are to be filled in
    condition: str = ""  # what must hold for it to be the placement that was simulated; may be empty
    remark: str = ""  # what else there is to know; may be empty

    def __str__(self) -> str:
        return shlex.join(self.words)


def engines() -> list[Engine]:
    """Read the table."""
    text = resources.files("moesim.studies.advice").joinpath(FILE).read_text(encoding="utf-8")
    found = []
    for name, entry in read_yaml_value(text, FILE)["engines"].items():
        cannot, unknown = (" ".join(entry.get(key, "").split()) for key in ("cannot", "unknown"))
        one = Engine(
            name, entry["checked"], str(entry["date"]), entry["program"], tuple(entry["expresses"]), cannot,
            entry.get("flags", {}), unknown,
        )  # fmt: skip
        found.append(one)
    return found


def commands(candidate: Candidate, setting: Setting) -> list[Command]:
    """Return command lines for a placement; none if no engine can express it."""
    makers = {
        "llama.cpp": _llama_cpp, "ktransformers": _ktransformers, "exllamav3": _exllamav3, "freetoken": _freetoken,
        "sglang": _all_gpu, "vllm": _all_gpu,
    }  # fmt: skip
    return [
        makers[one.name](one, candidate, setting) for one in engines() if candidate.family in one.expresses and not one.unknown
    ]


def _llama_cpp(engine: Engine, candidate: Candidate, setting: Setting) -> Command:
    model, number = setting.model, candidate.number or 0
    n_layers = len(model.blocks)
    file = setting.asked.gguf.name if setting.asked.gguf else "MODEL.gguf"
    words = [engine.program, *engine.flag("--model", file)]
    remark = ""
    if candidate.family == "whole-layers":
        words += engine.flag("--n-gpu-layers", "all" if number > n_layers else number)
    else:
        words += engine.flag("--n-gpu-layers", "all")
        if number > model.positions[-1]:
            words += engine.flag("--cpu-moe")
        elif number > model.positions[0]:
            words += engine.flag("--n-cpu-moe", number)
            tensors = f"{' '.join(engine.flag('--override-tensor'))} '{_tensors(range(number))}=CPU'"
            remark = f"or, instead of {' '.join(engine.flag('--n-cpu-moe'))}: {tensors}"
    if split := candidate.policy.get("tensor_split"):
        words += engine.flag("--tensor-split", ",".join(map(str, split)))
    words += engine.flag("--ctx-size", setting.kv_tokens) + engine.flag("--parallel", setting.asked.batch)
    words += engine.flag("--ubatch-size", PREFILL_CHUNK)
    return Command(engine.name, engine.checked, tuple(words), remark=remark)


def _tensors(layers: Sequence[int]) -> str:
    r"""Write a regular expression for the expert tensors of some layers.

    >>> print(_tensors([0, 1]))
    blk\.(0|1)\.ffn_(up|down|gate|gate_up)_exps
    """
    return rf"blk\.({'|'.join(map(str, layers))})\.ffn_(up|down|gate|gate_up)_exps"


def _ktransformers(engine: Engine, candidate: Candidate, setting: Setting) -> Command:
    policy, threshold = candidate.policy, candidate.policy.get("prefill_threshold")
    shared = threshold or setting.model.expert_bits == 16
    method = (shared_method(setting) if shared else None) or "LLAMAFILE"
    words = [*engine.program.split(), *engine.flag("--model-path", "MODEL"), *engine.flag("--kt-weight-path", "WEIGHTS")]
    words += engine.flag("--kt-method", method)
    words += engine.flag("--kt-cpuinfer", "CORES") + engine.flag("--kt-threadpool-count", "NUMA_NODES")
    words += engine.flag("--kt-num-gpu-experts", candidate.number or 0)
    conditions = []
    words += engine.flag("--kt-expert-placement-strategy", policy["strategy"])
    if policy["strategy"] == "frequency":
        words += engine.flag("--init-expert-location", COUNTS)
        conditions.append(f"{COUNTS} holds counts recorded on texts like yours")
    if threshold:
        words += engine.flag("--kt-gpu-prefill-token-threshold", threshold)
        if policy.get("dynamic_update"):
            words += engine.flag("--kt-enable-dynamic-expert-update")
            conditions.append(
                f"prompts have {threshold} tokens or more: after shorter ones the experts on the GPU stay as they were"
            )
        words += engine.flag("--chunked-prefill-size", PREFILL_CHUNK)
    words += engine.flag("--kt-max-deferred-experts-per-token", 0)
    words += engine.flag("--context-length", setting.context) + engine.flag("--max-running-requests", setting.asked.batch)
    if method == "LLAMAFILE" and candidate.number:
        conditions.append(f"MODEL, whose precision experts on the GPU have, is of {_bits(setting)} as WEIGHTS are")
    elif method not in ("LLAMAFILE", "BF16"):
        conditions.append(f"MODEL and WEIGHTS are the same folder, of {method} weights")
    return Command(engine.name, engine.checked, tuple(words), "; ".join(conditions))


def _exllamav3(engine: Engine, candidate: Candidate, setting: Setting) -> Command:
    flag = "--moe_cpu_offload" if candidate.family == "exllamav3-layers" else "--moe_cpu_split"
    tokens = -(-setting.kv_tokens // EXLLAMAV3_PAGE) * EXLLAMAV3_PAGE
    words = [*engine.program.split(), *engine.flag("--model_dir", "MODEL"), *engine.flag(flag, candidate.number or 0)]
    words += engine.flag("--cache_size", tokens)
    condition = f"MODEL has EXL3 weights of {_bits(setting)} with the mul1 codebook"
    remark = "PROGRAM.py is one that takes the options of exllamav3.model_init"
    return Command(engine.name, engine.checked, tuple(words), condition, remark)


def _freetoken(engine: Engine, candidate: Candidate, setting: Setting) -> Command:
    words = [
        *engine.program.split(),
        *engine.flag("--model", "MODEL"),
        *engine.flag("--moe-strategy", candidate.policy["backend"]),
    ]
    words += engine.flag("--moe-cache-size", candidate.slots)
    words += engine.flag("--max-seq-len-override", setting.context) + engine.flag("--max-running-requests", setting.asked.batch)
    remark = "first measure the rates of link and CPU: ft bench bw" if candidate.policy["backend"] == "hybrid" else ""
    return Command(engine.name, engine.checked, tuple(words), remark=remark)


def _all_gpu(engine: Engine, candidate: Candidate, setting: Setting) -> Command:
    asked = setting.asked
    bits = "" if setting.model.expert_bits == 16 else f"MODEL is quantised to {_bits(setting)}"
    if engine.name == "vllm":
        words = [*engine.program.split(), "MODEL", *engine.flag("--max-model-len", setting.context)]
        words += engine.flag("--max-num-seqs", asked.batch)
    else:
        words = [*engine.program.split(), *engine.flag("--model-path", "MODEL")]
    return Command(engine.name, engine.checked, tuple(words), bits)


def _bits(setting: Setting) -> str:
    model = setting.model
    return "the bits of the file" if model.expert_bytes_by_layer is not None else f"{model.expert_bits:g} bits"


def describe(candidate: Candidate, setting: Setting) -> str:
    """Describe where experts are."""
    model, number = setting.model, candidate.number or 0
    n_layers = len(model.blocks)
    if candidate.family == "all-gpu":
        return "everything on the GPU"
    if candidate.family == "expert-layers":
        if number > model.positions[-1]:
            return "all experts on the CPU, the rest on the GPU"
        return (
            f"experts of the first {number} of {n_layers} layers on the CPU, the rest on the GPU"
            if number > model.positions[0]
            else "all experts on the GPU"
        )
    if candidate.family == "whole-layers":
        if number < 2:
            return "the output on the GPU, everything else on the CPU" if number else "everything on the CPU"
        return f"the last {number - 1} of {n_layers} layers and the output on the GPU, the rest on the CPU"
    if candidate.policy["name"] == "kt-expert":
        return _kt_kernel(candidate, setting)
    if candidate.family == "exllamav3-layers":
        return f"experts of the first {number} of {model.n_layers} layers with experts on the CPU, the rest on the GPU"
    if candidate.family == "exllamav3-split":
        which = f"the last {number} of the {model.n_experts} experts of each layer"
        return f"{which} on the CPU, the others on the GPU; hot and cold ones change places"
    if what := next((one.what for one in SHIPPED if one.family == candidate.family), ""):
        return what
    return f"policy {candidate.family}, {candidate.gpu_experts} experts on the GPU at the start"


def _kt_kernel(candidate: Candidate, setting: Setting) -> str:
    policy, number = candidate.policy, candidate.number
    if not number:
        where = "all experts on the CPU, the rest on the GPU"
    else:
        which = {
            "uniform": f"{number} of the {setting.model.n_experts} experts of each layer",
            "front-loading": f"the first {candidate.gpu_experts} experts, layer by layer,",
            "frequency": f"the {candidate.gpu_experts} most frequent experts",
        }
        where = f"{which[policy['strategy']]} on the GPU, the others on the CPU"
    if rows := policy.get("prefill_threshold"):
        where += f"; chunks of {rows} tokens or more on the GPU, layer by layer"
        where += ", which then keeps what they used most" if policy.get("dynamic_update") else ""
    return where
