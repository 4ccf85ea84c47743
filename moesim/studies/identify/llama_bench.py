"""What ``llama-bench -o json``, ``-o jsonl`` and ``-o csv`` write, as observations."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from moesim.errors import ConfigError
from moesim.model import builtin_models
from moesim.studies.identify.observations import Observation, observation
from moesim.studies.identify.quants import bits_in

_KEYS: Final = ("model_type", "n_prompt", "n_gen", "avg_ts")
_ALL: Final = 99
_TOLD: Final = {
    "n_threads": "-t", "flash_attn": "-fa", "n_batch": "-b", "use_mmap": "-mmp", "cpu_mask": "-C", "poll": "--poll",
    "split_mode": "-sm", "tensor_split": "-ts", "main_gpu": "-mg", "cpu_info": "CPU", "gpu_info": "GPU",
    "build_commit": "build",
}  # fmt: skip
"""Fields that the model does not know, with llama-bench's options: named where rows that differ in them contradict."""


def is_bench(text: str) -> bool:
    """Tell whether a text is llama-bench's: JSON, or CSV with its columns."""
    stripped = text.lstrip()
    return stripped.startswith(("{", "[")) or all(key in stripped.partition("\n")[0] for key in _KEYS)


def bench_rows(text: str, path: Path, models: Sequence[str]) -> list[Observation]:
    """Read rows of llama-bench."""
    found = []
    for number, record in enumerate(_records(text, path), 1):
        place = f"{path}: row {number}"
        missing = [key for key in _KEYS if key not in record]
        if missing:
            raise ConfigError(f"{place}: expected the field {missing[0]} of llama-bench, got none; give its output as it is")
        found.append(_row(record, number, place, models))
    return found


def _records(text: str, path: Path) -> list[Mapping[str, Any]]:
    stripped = text.strip()
    try:
        if stripped.startswith("["):
            found: list[Any] = json.loads(stripped)
        elif stripped.startswith("{"):
            found = [json.loads(line) for line in stripped.splitlines() if line.strip()]
        else:
            found = list(csv.DictReader(io.StringIO(stripped)))
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"{path}: expected the output of llama-bench, got: {error}; run it again with -o json") from None
    if not all(isinstance(record, dict) for record in found):
        raise ConfigError(f"{path}: expected objects, one a row of llama-bench, got something else; give its output as it is")
    return found


def _row(record: Mapping[str, Any], number: int, place: str, models: Sequence[str]) -> Observation:
    n_prompt, n_gen = _whole(record, "n_prompt", place), _whole(record, "n_gen", place)
    if (n_prompt > 0) == (n_gen > 0):
        raise ConfigError(
            f"{place}: expected a prompt or generated tokens, got {n_prompt} and {n_gen}; run llama-bench -p or -n alone"
        )
    depth, prefill = _whole(record, "n_depth", place, 0), n_prompt > 0
    if prefill and depth:
        raise ConfigError(f"{place}: expected a prompt at depth 0, got {depth}; leave the row out")
    values: dict[str, Any] = {
        "row": f"{number}:{'pp' if prefill else 'tg'}{n_prompt or n_gen}" + (f"@d{depth}" if depth else ""),
        "model": _model(record, place, models),
        "bits": bits_in(f"{record.get('model_type', '')} {Path(str(record.get('model_filename', ''))).name}"),
        "setting": _setting(record, place),
        "context": n_prompt if prefill else depth,
        "value": record["avg_ts"],
        "unit": "tokens/s",
        "kind": "prefill" if prefill else "decode",
        "source": f"llama-bench {record.get('build_commit', '')}".strip(),
        "alias": True,
        "place": place,
        "told": tuple((f"{key} {option}", str(record[key])) for key, option in _TOLD.items() if key in record),
    }
    if not prefill:
        values["decode"] = n_gen
    if record.get("n_ubatch"):
        values["ubatch"] = record["n_ubatch"]
    if record.get("stddev_ts"):
        values["spread"] = record["stddev_ts"]
    return observation(values)


def _whole(record: Mapping[str, Any], key: str, place: str, default: int | None = None) -> int:
    value = record.get(key, default)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{place}: {key}: expected a whole number, got {value!r}; give llama-bench's output as it is") from None


def _setting(record: Mapping[str, Any], place: str) -> str:
    ngl = _whole(record, "n_gpu_layers", place, _ALL)
    words = [f"ngl={ngl}"]
    for key in ("type_k", "type_v"):
        kind = str(record.get(key) or "f16").lower()
        if kind not in ("f16", "bf16"):
            raise ConfigError(
                f"{place}: {key}: expected a KV cache of f16, got {kind}; leave the row out, or measure it with f16"
            )
    if _is_true(record, "no_kv_offload") and ngl > 1:
        raise ConfigError(f"{place}: no_kv_offload: expected the KV cache beside its layers, got true; leave the row out")
    n_cpu_moe = _whole(record, "n_cpu_moe", place, 0)
    overrides = str(record.get("tensor_buft_overrides") or "none")
    if overrides not in ("none", ""):
        n_cpu_moe = _overridden(overrides, place)
    if n_cpu_moe and ngl > 1:  # with at most the output layer on the GPU, all experts are on the CPU
        words.append(f"n_cpu_moe={n_cpu_moe}")
    if _is_true(record, "no_op_offload"):
        words.append("op_offload=false")
    return " ".join(words)


def _is_true(record: Mapping[str, Any], key: str) -> bool:
    return str(record.get(key, "0")).lower() in ("1", "true")


def _overridden(text: str, place: str) -> int:
    """Count the layers whose experts a pattern keeps on the CPU, which must be the first ones, or all."""
    layers: set[int] = set()
    for pattern in re.split(r"[,;]", text):
        name, _, where = pattern.partition("=")
        if "exps" not in name or where != "CPU":
            raise ConfigError(f"{place}: tensor_buft_overrides: expected experts on the CPU, got '{pattern}'; leave the row out")
        found = re.match(r"\^?blk\\?\.\(?([\d|]+)\)?\\?\.", name)
        if found is None:
            return _ALL
        layers |= {int(layer) for layer in found[1].split("|") if layer}
    if layers != set(range(len(layers))):
        raise ConfigError(f"{place}: tensor_buft_overrides: expected the first layers, got {text}; leave the row out")
    return len(layers)


def _model(record: Mapping[str, Any], place: str, models: Sequence[str]) -> str:
    """Find the model of a row: named for its type, the only one that is named, or the one whose name it contains."""
    told = f"{record.get('model_type', '')} {Path(str(record.get('model_filename', ''))).name}"
    plain = [one for one in models if "=" not in one or one.lstrip().startswith("{")]
    for one in models:
        kind, _, name = one.partition("=")
        if one not in plain and kind.lower() in told.lower():
            return name
    if len(plain) == 1:
        _check_named(plain[0], told, place)
        return plain[0]
    words = _letters(told)
    fits = [name for name in (plain or list(builtin_models())) if _letters(name) in words]
    if not fits:
        fits = [name for name in (plain or list(builtin_models())) if _family(name) in words]
    if len(fits) != 1:
        got = f"'{told.strip()}'" + (f", which may be {' or '.join(fits)}" if fits else "")
        raise ConfigError(f"{place}: expected a model that is known, got {got}; say which with --model 'PART OF ITS NAME=MODEL'")
    return fits[0]


def _check_named(name: str, told: str, place: str) -> None:
    """Refuse a model of this project for a row whose type or file name is another's."""
    others = builtin_models()
    words = _letters(told)
    fits = [one for one in others if _letters(one) in words or _family(one) in words]
    kind = told.split()[0] if told.split() else ""
    kinds = _KINDS.get(kind, ())
    if name in others and ((fits and name not in fits) or (kinds and not name.startswith(kinds))):
        raise ConfigError(
            f"{place}: expected a row of {name}, as --model says, got '{told.strip()}'; leave the row out, or, if they are the "
            f"same, give --model '{kind}={name}'"
        )


_KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": ("mixtral",), "phimoe": ("phi",), "deepseek2": ("deepseek", "moonlight"), "qwen2moe": ("qwen1.5", "qwen2"),
    "qwen3moe": ("qwen3",), "olmoe": ("olmoe",), "gpt-oss": ("gpt-oss",),
}  # fmt: skip
"""llama.cpp's names of architectures: how the models of this project that have one begin."""


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _family(name: str) -> str:
    """Write a name as llama.cpp does its types: ``qwen3-30b-a3b`` as ``qwen3moe 30B.A3B``."""
    head, _, rest = name.partition("-")
    return _letters(f"{head}moe{rest}")
