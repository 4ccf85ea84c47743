"""Read a model's shapes and bytes from a GGUF file; weights are not read.

Format and names are llama.cpp's; the library ``gguf`` reads them (``pip install 'moesim[gguf]'``).
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Final

from moesim.core.gate import ENTRIES, TENSORS, check_claim
from moesim.errors import ModelError, unknown_name
from moesim.model.check import find_problem
from moesim.model.spec import DEFAULTS, ModelSpec

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING, _ARRAY = 8, 9
_WIDTHS: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value of each type that has a fixed length."""
_LEAST_FIELD: Final = 8 + 4 + 1  # an empty name, a type, a byte
_LEAST_TENSOR: Final = 8 + 4 + 4 + 8  # an empty name, no axis, a type, an offset
_MAX_AXES: Final = 8
_MAX_DEPTH: Final = 4  # lists inside each other
_REMEDY: Final = "it is truncated or altered, fetch it anew"


def check_claims(path: Path) -> None:
    """Raise `ModelError` if a GGUF file claims what it cannot hold."""
    with path.open("rb") as file:
        if not file.read(1):
            raise ModelError(f"{path}: expected a GGUF file, got an empty one; fetch it anew")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(path, data).whole()


class _Walk:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._size = path, data, len(data)
        self._at = 0
        self._order = "<"
        self._n_entries = 0

    def whole(self) -> None:
        if self._data[:4] != _MAGIC:
            raise self._wrong("a whole GGUF file", f"one that begins with {self._data[:4]!r}")
        self._skip(4, "the version")
        if self._size >= 8 and not int.from_bytes(self._data[4:6], "little"):
            self._order = ">"
        version = self._number("I", "the version")
        if version not in _VERSIONS:
            raise self._wrong("GGUF of version 2 or 3", version)
        n_tensors, n_fields = self._number("Q", "the number of tensors"), self._number("Q", "the number of fields")
        self._claim("tensors", n_tensors, TENSORS, _LEAST_TENSOR)
        self._claim("fields of metadata", n_fields, ENTRIES, _LEAST_FIELD)
        for _ in range(n_fields):
            name = self._text("a name in the metadata")
            self._value(self._number("I", name), name, 0)
        offsets = [self._tensor() for _ in range(n_tensors)]
        for name, offset in offsets:
            self._check(f"bytes to the data of {name}", offset, self._size - self._at)

    def _claim(self, what: str, n: int, most: int, least: int) -> None:
        """Check a count against a limit and against the rest of the file, at ``least`` bytes each."""
        self._check(what, n, min(most, (self._size - self._at) // least))

    def _check(self, what: str, n: int, most: int) -> None:
        check_claim(self._path, what, n, most, error=ModelError, remedy=_REMEDY)

    def _wrong(self, expected: str, got: object) -> ModelError:
        return ModelError(f"{self._path}: expected {expected}, got {got}; {_REMEDY}")

    def _skip(self, n: int, what: str) -> None:
        self._check(f"bytes of {what}", n, self._size - self._at)
        self._at += n

    def _number(self, kind: str, what: str) -> int:
        at, form = self._at, struct.Struct(self._order + kind)
        self._skip(form.size, what)
        return int(form.unpack_from(self._data, at)[0])

    def _text(self, what: str) -> str:
        length, at = self._number("Q", what), self._at
        self._skip(length, what)
        return self._data[at : at + min(length, 100)].decode("utf-8", "replace")

    def _value(self, kind: int, name: str, depth: int) -> None:
        if kind == _STRING:
            self._skip(self._number("Q", name), name)
        elif kind == _ARRAY:
            if depth == _MAX_DEPTH:
                raise self._wrong(f"at most {_MAX_DEPTH} lists inside each other in {name}", "more")
            inner, n = self._number("I", name), self._number("Q", name)
            width = _WIDTHS.get(inner, 8 if inner == _STRING else 12)
            self._claim(f"entries of {name}", n, ENTRIES - self._n_entries, width)
            self._n_entries += n
            if inner in _WIDTHS:
                self._skip(n * width, name)
            else:
                for _ in range(n):
                    self._value(inner, name, depth + 1)
        else:
            if kind not in _WIDTHS:
                raise self._wrong(f"a type of value from 0 to 12 of {name}", kind)
            self._skip(_WIDTHS[kind], name)

    def _tensor(self) -> tuple[str, int]:
        """Check a tensor's name and shape; return its name and the offset of its data."""
        name = self._text("a tensor's name")
        self._claim(f"axes of {name}", n_axes := self._number("I", name), _MAX_AXES, 8)
        n_weights = 1
        for _ in range(n_axes):
            n_weights *= self._number("Q", name)
        self._check(f"weights of {name}", n_weights, 8 * self._size)  # no type has less than a bit a weight
        self._skip(4, name)
        return name, self._number("Q", name)


ARCHITECTURES: Final = ("deepseek2", "gpt-oss", "llama", "olmoe", "phimoe", "qwen2moe", "qwen3moe")
"""Architectures, by llama.cpp's names, whose layers are of the kinds that `ModelSpec` describes."""

_EXPERTS = re.compile(r"blk\.(\d+)\.ffn_(?:up|down|gate|gate_up)_exps\.")
_OLD_EXPERTS = re.compile(r"blk\.\d+\.ffn_(?:up|down|gate)\.\d+\.")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]  # the width of a row first, as in the file
    n_bytes: int


class _File:
    """Metadata and tensors of a model, of all its parts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, _Tensor] = {}
        self._fields: dict[str, Any] = {}
        for number, part in enumerate(parts_of(path)):
            reader = _open(part)
            if number == 0:
                self._fields = dict(reader.fields)
            for tensor in reader.tensors:
                self.tensors[str(tensor.name)] = _Tensor(tuple(int(n) for n in tensor.shape), int(tensor.n_bytes))
        self.architecture = self.text("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = unknown_name("architecture", self.architecture, ARCHITECTURES)
            raise ModelError(f"{path}: general.architecture: {known}; give the model's config.json or YAML with --model")

    def get(self, key: str) -> Any:
        field = self._fields.get(key)
        return None if field is None else field.contents()

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str) or not value.strip():
            raise ModelError(f"{self.path}: {key}: expected a text in the metadata, got {value!r}")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """Return an integer of the architecture's own metadata; of one value a layer the largest."""
        name = f"{self.architecture}.{key}"
        value = self.get(name)
        if isinstance(value, list) and value and all(isinstance(one, int) for one in value):
            value = max(value)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(f"{self.path}: {name}: expected an integer in the metadata, got {value!r}")
        return value

    def any_layer(self, name: str) -> _Tensor | None:
        """Return a tensor of the last layer that has it: leading layers may differ."""
        found = [key for key in self.tensors if _BLOCK.match(key) and key.split(".", 2)[2] == name]
        return self.tensors[max(found, key=lambda key: int(key.split(".")[1]))] if found else None

    def has(self, name: str) -> bool:
        return self.any_layer(name) is not None


def _open(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ModelError(f"{path}: reading it needs the library gguf; pip install 'moesim[gguf]'") from None
    try:
        check_claims(path)
        return GGUFReader(path)
    except OSError as error:
        raise ModelError(f"{path}: expected a GGUF file, got: {error.strerror or error}; check the path") from None
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        # The library says what it stumbled over, which for a file cut short is any of these.
        why = " ".join(str(error).split()) or type(error).__name__
        raise ModelError(f"{path}: expected a whole GGUF file, got another or a truncated one ({why}); fetch it anew") from None


def parts_of(path: Path) -> list[Path]:
    """List the files of a model: itself, or all parts of one that is split."""
    found = _PART.fullmatch(path.name)
    if found is None:
        paths = [path]
    else:
        n_parts = int(found[3])
        paths = [path.with_name(f"{found[1]}-{number:05d}-of-{n_parts:05d}.gguf") for number in range(1, n_parts + 1)]
    for part in paths or [path]:
        if not part.is_file():
            got = "a folder" if part.is_dir() else "nothing there"
            what = "a GGUF file" if len(paths) == 1 else f"{len(paths)} parts of a split GGUF file"
            raise ModelError(f"{part}: expected {what}, got {got}; check the path")
    return paths


def read_gguf(path: Path) -> ModelSpec:
    """Read a model's specification from a GGUF file.

    ``expert_bytes_by_layer`` are the tensors' own bytes; ``other_bits`` is the mean over all other tensors, so that their sum
    is right. Keys, values and activations are of 16 bits.
    """
    file = _File(path)
    values = _shape(file)
    values |= {"name": _name(file), "source": f"{path.name} (GGUF, {file.architecture})", "labels": ()}
    values["expert_bytes_by_layer"] = _expert_bytes(file, values["n_experts"])
    problem = find_problem(DEFAULTS | values)
    if problem is not None:
        raise ModelError(f"{path}: {problem}")
    n_params = ModelSpec(**values | {"other_bits": 8}).non_expert_bytes  # with 8 bits, bytes are parameters
    held = sum(tensor.n_bytes for name, tensor in file.tensors.items() if not _EXPERTS.match(name) and not _unused(file, name))
    values["other_bits"] = min(ceil(held * 8 / n_params * 1e4) / 1e4, 64)
    return ModelSpec(**values)


def _name(file: _File) -> str:
    given = file.get("general.name")
    name = given if isinstance(given, str) and given.strip() else _PART.sub(r"\1", file.path.name).removesuffix(".gguf")
    return "-".join(name.lower().split())


def _n_blocks(file: _File) -> int:
    return file.count("block_count") - file.count("nextn_predict_layers", 0)


def _unused(file: _File, name: str) -> bool:
    """Whether a tensor is of the layers that predict further tokens, which decoding leaves out."""
    found = _BLOCK.match(name)
    return found is not None and int(found[1]) >= _n_blocks(file)


def _expert_layers(file: _File) -> list[int]:
    layers = {int(found[1]) for name in file.tensors if (found := _EXPERTS.match(name)) and not _unused(file, name)}
    if not layers:
        old = any(_OLD_EXPERTS.match(name) for name in file.tensors)
        got = (
            "one tensor an expert, as files of before 2024 have; convert the model anew" if old else "none; choose another model"
        )
        raise ModelError(f"{file.path}: expected the tensors of routed experts (blk.N.ffn_down_exps), got {got}")
    return sorted(layers)


def _expert_bytes(file: _File, n_experts: int) -> tuple[int, ...]:
    total = dict.fromkeys(_expert_layers(file), 0)
    for name, tensor in file.tensors.items():
        if (found := _EXPERTS.match(name)) and int(found[1]) in total:
            total[int(found[1])] += tensor.n_bytes
    return tuple(ceil(n_bytes / n_experts) for n_bytes in total.values())


def _shape(file: _File) -> dict[str, Any]:
    layers = _expert_layers(file)
    down = file.any_layer("ffn_down_exps.weight")
    embedding = file.tensors.get("token_embd.weight")
    if down is None or len(down.shape) != 3 or embedding is None:
        raise ModelError(f"{file.path}: expected tensors token_embd and ffn_down_exps of 3 axes, got others; fetch the file anew")
    width, hidden, n_experts = down.shape
    n_dense = _n_blocks(file) - len(layers)
    # Dense layers that do not lead are counted as if they did: their bytes and operations are the same.
    values: dict[str, Any] = {
        "n_layers": len(layers), "n_experts": n_experts, "top_k": file.count("expert_used_count"),
        "hidden": hidden, "expert_intermediate": width, "vocab": embedding.shape[-1],
        "n_dense_layers": n_dense, "dense_intermediate": file.count("feed_forward_length") if n_dense else 0,
        "n_mats": 3 if file.has("ffn_gate_exps.weight") or file.has("ffn_gate_up_exps.weight") else 2,
        "tie_embeddings": "output.weight" not in file.tensors, "head_bias": "output.bias" in file.tensors,
    }  # fmt: skip
    shared = file.any_layer("ffn_down_shexp.weight")
    if shared is not None:  # one tensor holds all shared experts; their number is known or follows from the width
        n_shared = file.count("expert_shared_count", 0) or max(shared.shape[0] // width, 1)
        values |= {
            "n_shared": n_shared,
            "shared_intermediate": shared.shape[0],
            "shared_gate": file.has("ffn_gate_inp_shexp.weight"),
        }
    flags: dict[str, Callable[[], bool]] = {
        "expert_bias": lambda: file.has("ffn_down_exps.bias"),
        "router_bias": lambda: file.has("ffn_gate_inp.bias") or file.has("exp_probs_b.bias"),
        "qkv_bias": lambda: file.has("attn_q.bias") or file.has("attn_qkv.bias"),
        "out_bias": lambda: file.has("attn_output.bias"),
        "norm_bias": lambda: file.has("attn_norm.bias"),
        "attention_sinks": lambda: file.has("attn_sinks.weight"),
    }
    return values | _attention(file, hidden) | {name: there() for name, there in flags.items()}


def _attention(file: _File, hidden: int) -> dict[str, Any]:
    n_heads = file.count("attention.head_count")
    if not n_heads:
        raise ModelError(f"{file.path}: {file.architecture}.attention.head_count: expected a positive integer, got 0")
    key = file.count("attention.key_length", hidden // n_heads)
    value = file.count("attention.value_length", key)
    rank = file.count("attention.kv_lora_rank", 0)
    if rank:
        # Newer files give the lengths of the compressed cache, and those of the heads under names of their own.
        key, value = file.count("attention.key_length_mla", key), file.count("attention.value_length_mla", value)
        rope = file.count("rope.dimension_count")
        return {
            "n_heads": n_heads, "n_kv_heads": n_heads, "head_dim": key, "kv_lora_rank": rank, "rope_head_dim": rope,
            "nope_head_dim": key - rope, "v_head_dim": value, "q_lora_rank": file.count("attention.q_lora_rank", 0),
        }  # fmt: skip
    norm = file.any_layer("attn_q_norm.weight")
    kind = "none" if norm is None else "head" if norm.shape[0] == key else "full"
    n_kv_heads = file.count("attention.head_count_kv", n_heads)
    return {"n_heads": n_heads, "n_kv_heads": n_kv_heads, "head_dim": max(key, value), "qk_norm": kind}
