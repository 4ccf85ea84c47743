"""Which engines can run a model on a machine: the table is whole, and some known facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from moesim.errors import ConfigError
from moesim.hardware.engines import load_engine
from moesim.hardware.load import load_hardware
from moesim.model.load import load_model, model_names
from moesim.studies.advice.engines import engines
from moesim.studies.advice.support import UNVERIFIED, kinds_of, support, why_unsupported

TABLE = support()
KINDS = TABLE["architectures"]


def machine(**words: str) -> Any:
    return replace(load_hardware("rtx3090-epyc7532"), machine=words)


def why(engine: str, model: Any, *, gguf: bool = False, **words: str) -> str:
    spec = load_model(model) if isinstance(model, str) else model
    return why_unsupported(engine, spec, machine(**words), one_file_gguf=gguf)


def test_every_listed_model_has_one_architecture() -> None:
    assert {name: len(kinds_of(load_model(name))) for name in model_names()} == dict.fromkeys(model_names(), 1)


@pytest.mark.parametrize("engine", [one.name for one in engines()])
def test_every_model_gets_an_answer_of_one_line(engine: str) -> None:
    for name in model_names():
        for gguf in (False, True):
            assert "\n" not in why(engine, name, gguf=gguf)


@pytest.mark.parametrize("engine", TABLE["engines"])
def test_every_entry_has_a_version_and_a_source_or_says_that_it_is_not_verified(engine: str) -> None:
    row = TABLE["engines"][engine]
    entries = [*row["backends"].values(), *row["formats"].values(), row["systems"], row.get("cpu", row), row["architectures"]]
    assert row["version"] and row["date"]
    assert all(entry.get("source") or entry.get("unverified") for entry in entries if entry is not row)
    loads, unverified = row["architectures"]["loads"], row["architectures"].get("unverified", {})
    assert {*loads, *unverified, *(row["formats"].get("gguf", {}).get("only", ()))} <= set(KINDS)
    assert not set(loads) & set(unverified)
    if not engine.endswith("cache"):
        assert set(load_engine(engine, "").file.backends) <= set(row["backends"])


# Facts and where they can be read: exllamav3 1.6.5, architectures.py; vLLM 0.33.0, models/registry.py and its installation page;
# FreeToken 0.2.1, models/gguf/config.py; kt-kernel 0.7.2, README and utils/llamafile.py; llama.cpp 0c1e57098, llama-arch.cpp.
@pytest.mark.parametrize(
    ("engine", "model", "words", "expected"),
    [
        ("exllamav3", "qwen3-next-80b-a3b", {}, ""),
        ("exllamav3", "olmoe", {}, "exllamav3 has no OLMoE"),
        ("exllamav3", "qwen3-30b-a3b", {"gguf": True}, "exllamav3 reads no GGUF files"),
        ("exllamav3", "qwen3-30b-a3b", {"compute": "7.5"}, "exllamav3 needs compute capability 8.0 or later, the GPU has 7.5"),
        ("vllm", "qwen3-30b-a3b", {"compute": "6.1", "gpu": "GTX 1060"}, "the GTX 1060 has 6.1"),
        ("vllm", "gpt-oss-20b", {"compute": "7.5", "gpu": "T4"}, "vLLM with mxfp4 weights needs compute capability 8.0"),
        ("vllm", "qwen3-30b-a3b", {"backend": "hip", "gpu": "AMD Radeon RX 6800 XT"}, UNVERIFIED),
        ("vllm", "qwen3-30b-a3b", {"backend": "hip", "gpu": "AMD Instinct MI300X"}, ""),
        ("vllm", "qwen3-30b-a3b", {"system": "windows"}, "vLLM does not run on windows"),
        ("vllm", "qwen3-30b-a3b", {"backend": "vulkan"}, "vLLM does not run on vulkan"),
        ("vllm", "grok-2", {}, "vLLM has no Grok-2"),
        ("freetoken", "qwen3-30b-a3b", {"gguf": True}, ""),
        ("freetoken", "gpt-oss-20b", {"gguf": True}, "FreeToken reads no GGUF files of gpt-oss"),
        ("freetoken", "mixtral-8x7b", {}, "FreeToken has no Mixtral"),
        ("ktransformers", "qwen3-30b-a3b", {}, ""),
        ("ktransformers", "qwen3-30b-a3b", {"gguf": True}, "not only a GGUF file"),
        ("ktransformers", "mixtral-8x7b", {}, UNVERIFIED),
        ("sglang", "qwen3-30b-a3b", {"gguf": True}, UNVERIFIED),
        ("llama.cpp", "kimi-k3", {"gguf": True, "backend": "vulkan", "system": "windows"}, ""),
        ("llama.cpp", "longcat-flash", {}, "llama.cpp has no LongCat-Flash"),
        ("llama.cpp", "llada-moe-7b-a1b", {}, UNVERIFIED),
    ],
)  # fmt: skip
def test_known_facts(engine: str, model: str, words: dict[str, Any], expected: str) -> None:
    found = why(engine, model, **words)
    assert expected in found if expected else not found


def test_an_expert_of_an_odd_width_is_not_read_from_gguf_files() -> None:
    quantised = load_model({"base": "deepseek-v2-lite", "expert_bits": 4.5})
    assert "multiple of 256 in GGUF files, got 1408" in why("ktransformers", quantised)


def test_the_architecture_of_a_file_is_taken_from_its_source() -> None:
    model = replace(load_model("qwen3-30b-a3b"), name="mine")
    assert kinds_of(replace(model, source="mine.gguf (GGUF, olmoe, header only)")) == ["olmoe"]
    assert kinds_of(replace(model, source="config.json (DbrxForCausalLM)")) == ["dbrx"]
    assert "deepseek_v2" in kinds_of(replace(model, source="mine.gguf (GGUF, deepseek2)"))  # and those that share the name
    assert why("freetoken", replace(model, source="mine.gguf (GGUF, deepseek2)"), gguf=True).endswith("files of 'deepseek2'")
    assert not why("exllamav3", replace(model, source="written by hand"))


def test_an_unknown_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"support.yaml: unknown engine 'vlm'; did you mean 'vllm'"):
        why("vlm", "olmoe")
