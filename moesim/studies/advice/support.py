"""Whether an engine can run a model on a machine: facts of ``support.yaml``, each with the version and file it was read in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, Final

from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, unknown_name
from moesim.hardware.engines import facts_of
from moesim.hardware.types import HardwareProfile
from moesim.model.spec import MXFP4_BITS, ModelSpec

FILE: Final = "support.yaml"
UNVERIFIED: Final = "not verified: "
"""Begins a reason that may be wrong: such an engine is no headline, but can be listed with the reason as its condition."""
_CHECKPOINT: Final = {16: "bf16", 8: "fp8", MXFP4_BITS: "mxfp4"}
"""Formats of released checkpoints, by the bits of an expert's weights."""
_NAMED: Final = re.compile(r"\((?:GGUF, )?([\w.-]{1,80})(?:, header only)?\)$")
"""Architecture in a model's `source`: general.architecture of a GGUF file, or a class of a config.json."""


@cache
def support() -> Mapping[str, Any]:
    """Read the table."""
    text = resources.files("moesim.studies.advice").joinpath(FILE).read_text(encoding="utf-8")
    found: Mapping[str, Any] = read_yaml_value(text, FILE)
    return found


def why_unsupported(engine: str, model: ModelSpec, hardware: HardwareProfile, *, one_file_gguf: bool) -> str:
    """Say in one short reason why an engine cannot run a model on a machine; empty if it can."""
    # Missing words of a machine, and an architecture that a model does not say, are no reason; CUDA and Linux are assumed.
    # With `one_file_gguf` the weights are a GGUF model, and nothing else of it is at hand.
    engines = support()["engines"]
    if engine not in engines:
        raise ConfigError(f"{FILE}: {unknown_name('engine', engine, engines)}")
    facts = facts_of(hardware.machine, [device.kind for device in hardware.devices.values()], hardware.path)
    known, facts = engines[engine], {**facts, "gpu": hardware.machine.get("gpu", "")}
    reasons = [*_machine(known, facts), *_weights(known, model, facts, one_file_gguf)]
    return min(reasons, key=lambda one: one.startswith(UNVERIFIED), default="")  # the first that is certain, else the first


def formats_of(engine: str) -> list[str]:
    """Name the weight formats that an engine reads."""
    return list(support()["engines"][engine]["formats"])


def kinds_of(model: ModelSpec) -> list[str]:
    """Name the architectures of the table that a model may have: that of a GGUF file can stand for several."""
    rows = support()["architectures"]
    if found := [kind for kind, row in rows.items() if model.name in row["models"]]:
        return found
    word = named[1] if (named := _NAMED.search(model.source)) else ""
    return [kind for kind, row in rows.items() if word and word in (kind, row.get("gguf"), *row["classes"])]


def _machine(known: Mapping[str, Any], facts: Mapping[str, str]) -> Iterator[str]:
    title, backend, system, gpu = known["title"], facts["backend"], facts["system"], facts["gpu"]
    row, systems = known["backends"].get(backend), known["systems"]
    if row is None:
        yield f"{title} does not run on {backend}"
        return
    if words := row.get("unverified"):
        yield f"{UNVERIFIED}{title} on {backend}: {words}"
    if gpu and "gpus" in row and not any(part.lower() in gpu.lower() for part in row["gpus"]):
        yield f"{UNVERIFIED}{title} on {backend} with the {gpu}: its documentation names other GPUs only"
    yield from _least(title, row, facts)
    if words := systems.get("unverified", {}).get(system):
        yield f"{UNVERIFIED}{title} on {system}: {words}"
    elif system not in systems["names"]:
        yield f"{title} does not run on {system}"


def _least(what: str, row: Mapping[str, Any], facts: Mapping[str, str]) -> Iterator[str]:
    """Compare the compute capability of CUDA."""
    had, least = facts.get("compute"), row.get("compute")
    if facts["backend"] == "cuda" and had and least and float(had) < float(least):
        yield f"{what} needs compute capability {least} or later, the {facts['gpu'] or 'GPU'} has {had}"


def _weights(known: Mapping[str, Any], model: ModelSpec, facts: Mapping[str, str], one_file_gguf: bool) -> Iterator[str]:
    title, formats, kinds = known["title"], known["formats"], kinds_of(model)
    gguf, loads, unverified = formats.get("gguf"), known["architectures"]["loads"], known["architectures"].get("unverified", {})
    checkpoint, width = _CHECKPOINT.get(float(model.expert_bits), ""), model.expert_intermediate
    first = support()["architectures"][kinds[0]] if kinds else {}
    architecture = first.get("name") if len(kinds) < 2 else f"'{first.get('gguf')}'"
    if not one_file_gguf:
        yield from _least(f"{title} with {checkpoint} weights", formats.get(checkpoint, {}), facts)
    elif gguf is None:
        yield f"{title} reads no GGUF files"
    elif "unverified" in gguf:
        yield f"{UNVERIFIED}{title} with a GGUF file: {gguf['unverified']}"
    elif "also" in gguf:
        yield f"{title} needs {gguf['also']}, not only a GGUF file"
    elif kinds and not set(kinds) & set(gguf.get("only", kinds)):
        yield f"{title} reads no GGUF files of {architecture}"
    if kinds and not set(kinds) & set(loads):
        words = next((unverified[kind] for kind in kinds if kind in unverified), "")
        yield f"{UNVERIFIED}{title} with {architecture}: {words}" if words else f"{title} has no {architecture}"
    if gguf and checkpoint not in formats and width % gguf.get("multiple", 1):  # it would read experts from GGUF files
        yield f"{title} needs experts whose width is a multiple of {gguf['multiple']} in GGUF files, got {width}"
