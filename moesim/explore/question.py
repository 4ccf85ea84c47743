"""A question of the page: what its inputs say, as an experiment, and as a command, YAML or Python that gives the same number."""

from __future__ import annotations

import json
import pprint
import re
import shlex
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import yaml

from moesim.core.units import digits
from moesim.errors import CapacityError, ConfigError, MoesimError
from moesim.experiment.routing import choose_traces
from moesim.hardware.engines import OWN
from moesim.model import load_model
from moesim.policies.registry import make_policy
from moesim.studies.advice.candidates import Candidate, gib
from moesim.studies.advice.engines import commands
from moesim.studies.advice.llama_cpp import LlamaCpp, Place, Point, Speed
from moesim.studies.advice.question import PREFILL_CHUNK, Asked, Setting, look_up, usual_bits
from moesim.studies.advice.recommend import candidate_of
from moesim.trace.made import ASSUMED, EVEN, MADE

PLACE: Final = "explore"
LLAMA_CPP: Final = "llama.cpp"
"""The system whose ``--n-cpu-moe`` the page finds or varies; every other one is a policy by its name."""
CONTEXTS: Final = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PROMPTS: Final = (32, 64, 128, 256, 512, 1024, 2048, 4096)
ANSWERS: Final = (8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class Question:
    """Choices made on the page."""

    model: str = "qwen3-30b-a3b"
    bits: str = "Q4_K_M"
    # gpu, cpu, ram, pcie: parts, empty ones are left out
    gpu: str = "rtx 3060"
    cpu: str = "ryzen 5 5600"
    ram: str = "64GB DDR4-3200"
    pcie: str = ""
    profile: str = ""  # instead of parts
    system: str = LLAMA_CPP
    engine: str = OWN  # whose costs
    context: int = 16384  # tokens of a user for which there is room
    users: int = 1
    # prompt, answer: tokens of each user's request in the simulation
    prompt: int = 512
    answer: int = 32
    n_cpu_moe: int | None = None  # None: the least that fits
    cache: float | None = None  # share of all experts that the GPU caches; None: as many as fit

    @property
    def hardware(self) -> str:
        """The machine, as in an experiment."""
        if self.profile:
            return self.profile
        pcie = self.pcie.strip()
        pcie = f"PCIe {pcie}" if re.fullmatch(r"\d ?x ?\d{1,2}", pcie) else pcie
        pieces = [text.strip() for text in (self.gpu, self.cpu, self.ram, pcie) if text.strip()]
        return " + ".join(pieces) + (" +" if len(pieces) == 1 else "")

    @property
    def asked(self) -> Asked:
        """The question of ``moesim recommend``."""
        return Asked(
            self.model, self.hardware, bits=self.bits, batch=self.users, prompt=self.prompt, decode=self.answer,
            context=self.context,
        )  # fmt: skip


@lru_cache(maxsize=64)
def _setting(asked: tuple[tuple[str, Any], ...]) -> Setting:
    question = Question(**dict(asked))
    if question.context < question.prompt + question.answer:
        tokens = question.prompt + question.answer
        raise ConfigError(f"context: expected room for prompt and answer, {tokens} tokens, got {question.context}; raise it")
    ram = question.ram.strip()
    if not question.profile and re.fullmatch(r"\d+(\.\d+)?", ram):
        raise ConfigError(f"RAM: expected a size with its unit, such as '{ram}GB', got '{ram}'; add the unit")
    with tempfile.TemporaryDirectory(prefix="moesim.") as folder:  # only models of GGUF files are written
        return look_up(question.asked, Path(folder))


@lru_cache(maxsize=64)
def _llama(asked: tuple[tuple[str, Any], ...]) -> LlamaCpp:
    return LlamaCpp(_setting(asked))


def _key(question: Question) -> tuple[tuple[str, Any], ...]:
    """Return what `look_up` depends on."""
    kept = asdict(question)
    return tuple((name, kept[name]) for name in kept if name not in ("system", "engine", "n_cpu_moe", "cache"))


def bits_of(question: Question) -> str:
    """Return the usual bits of the model, which may have been chosen anew; those of the question of one that is not known."""
    try:
        return usual_bits(load_model(question.model, PLACE))
    except MoesimError:
        return question.bits


def setting_of(question: Question) -> Setting:
    """Look up model and machine."""
    return _setting(_key(question))


def llama_of(question: Question) -> LlamaCpp:
    """Return llama.cpp with the model on the machine."""
    return _llama(_key(question))


def place_of(question: Question) -> Place:
    """Return llama.cpp's setting: the one that was chosen, else the one with most on the GPU that fits."""
    llama = llama_of(question)
    if question.n_cpu_moe is not None and llama.setting.has_gpu:
        return llama.place(min(max(question.n_cpu_moe, llama.first), llama.last), question.context)
    place = llama.least(question.context)
    if place is None:
        raise CapacityError(f"it does not fit: {llama.misfit(question.context)}; {_fits_with(question, llama)}")
    return place


def _fits_with(question: Question, llama: LlamaCpp) -> str:
    """Say which changes, each alone, make the model fit."""
    more = None if llama.setting.one_memory else llama.more_ram()
    found = [] if more is None else [f"{more[0]} GiB of RAM ({digits(more[1].decode.value, 3)} tokens/s)"]
    found += [f"{one.name} ({gib(one.n_bytes)})" for one in llama.quants() if one.point is not None and not one.paging][:1]
    found += ["a shorter context"] if llama.least(question.prompt + question.answer) is not None else []
    alone = replace(question, users=1)
    found += ["fewer users"] if question.users > 1 and llama_of(alone).least(question.context) is not None else []
    return f"it fits with {', or '.join(found)}" if found else "a smaller model may"


@dataclass(frozen=True)
class Run:
    """One run that answers a question."""

    raw: Mapping[str, Any]  # the experiment
    place: Place | None  # llama.cpp's setting
    note: str  # which routing, and why


def run_of(question: Question) -> Run:
    """Write a question as an experiment of one run."""
    setting, place = setting_of(question), None
    policy: dict[str, Any] = {"name": question.system}
    cache: dict[str, Any] = {"ratio": 1.0}
    if question.system == LLAMA_CPP:
        place = place_of(question)
        policy = place.policy if setting.has_gpu else {"name": "all-cpu"}
    elif question.cache is not None:
        cache = {"ratio": question.cache}
    elif setting.has_gpu and setting.host_computes and not _routing_free(policy):
        cache = {"budget": setting.vram_bytes - setting.spare_kv_bytes}  # next to a KV cache for the whole context
    raw: dict[str, Any] = {
        "model": setting.model_ref,
        "hardware": question.hardware,
        "workload": {
            "batch_size": question.users, "prompt_tokens": question.prompt, "decode_tokens": question.answer,
            "prefill_chunk": PREFILL_CHUNK,
        },
        "cache": cache,
        "policies": [policy],
        **({} if question.engine == OWN else {"engine": question.engine}),
        "timeline": None,
    }  # fmt: skip
    trace, note = _routing(json.dumps(raw["model"]), json.dumps(raw["workload"]), json.dumps(policy))
    return Run({**raw, "trace": trace}, place, note)


def _routing_free(policy: Mapping[str, Any]) -> bool:
    return bool(getattr(make_policy(policy), "routing_free", False))


@lru_cache(maxsize=64)
def _routing(model: str, workload: str, policy: str) -> tuple[Any, str]:
    """Choose routing as `moesim compare` does, but make no more of it up than is used."""
    asked, written = json.loads(workload), json.loads(policy)
    sizes = {"requests": asked["batch_size"], "prompt": asked["prompt_tokens"], "decode": asked["decode_tokens"]}
    if asked["batch_size"] == 1 and _routing_free(written):
        words = "a prompt is assumed to use all experts evenly; recommend, which assumes preferences, finds up to a fifth more"
        return {MADE: EVEN, **sizes}, f"routing: makes no difference to decoding here; {words}"
    raw: dict[str, Any] = {
        "model": json.loads(model), "hardware": "rtx3090-epyc7532", "workload": asked, "cache": {"ratio": 1.0},
        "policies": [written],
    }  # fmt: skip
    lines = choose_traces(raw, PLACE, ends=False)
    trace = {**raw["trace"], **sizes} if isinstance(raw["trace"], Mapping) else raw["trace"]
    said = "; ".join(lines) if isinstance(trace, str) else f"routing: synthetic, with the statistics of {trace[MADE]}"
    return trace, "routing: assumed, as none of this model is known" if MADE in trace and trace[MADE] == ASSUMED else said


def yaml_of(run: Run) -> str:
    """Write the run as a file for ``moesim run``."""
    return yaml.safe_dump({key: value for key, value in run.raw.items() if value is not None}, sort_keys=False)


def python_of(run: Run) -> str:
    """Write the run as Python."""
    raw = {key: value for key, value in run.raw.items() if value is not None}
    written = pprint.pformat(raw, width=88, sort_dicts=False)
    return f'import moesim\n\nresult = moesim.run({written})\nprint(result.table["decode_tokens_per_s"])\n'


def command_of(question: Question, run: Run) -> str:
    """Write the question as commands of a shell."""
    setting = setting_of(question)
    words = ["--model", question.model, "--hardware", question.hardware]
    lines = ["moesim run explore.yaml"]
    if question.system == LLAMA_CPP:
        more = ["--bits", question.bits] if question.bits else []
        sizes = ["--context", question.context, "--batch", question.users, "--prompt", question.prompt]
        lines.append(_joined(["moesim", "recommend", *words, *more, *sizes, "--quick"]))
        if run.place is not None and setting.has_gpu:
            lines.append(_joined(commands(_candidate(run.place, setting), setting)[0].words))
    return "\n".join(lines) + "\n"


def _joined(words: Sequence[Any]) -> str:
    return shlex.join(map(str, words))


def _candidate(place: Place, setting: Setting) -> Candidate:
    return candidate_of(Point(place, setting.context, Speed(1.0, 1.0, 1.0), 0, 0), setting)
