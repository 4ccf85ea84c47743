"""Ways to spoil an input: its structure, its text, its bytes."""

from __future__ import annotations

import copy
import io
import json
import random
import re
import zipfile
from hashlib import sha256
from typing import Any

import yaml

from moesim.trace.format import HEADER_SUM_KEY, METADATA_KEY
from tests.cli.mutation_kit import VALUES as OF_EXPERIMENTS
from tests.cli.mutation_kit import at, change, garble, places


def _nested(depth: int, inner: Any = 0) -> Any:
    for _ in range(depth):
        inner = [inner]
    return inner


VALUES: list[Any] = [
    *OF_EXPERIMENTS, "\x1b[2J\x1b]0;x\x07", "a\x9bb", "=cmd|' /c calc'!A1", "\u2066x", "\r\nmoesim: x", 5e-324, 1e-300,
    1e308, -0.0, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63), "1e400", "0x10", "1_000", "[[[[", "null", "%s%n{0}",
    "é" * 300, _nested(45), _nested(200), {"a": {"a": {"a": {}}}}, {"\x1b[31m": 1}, {"value": None},
    {"value": 1, "source": "measured"}, [1, "1", 1.0, True], [[1, 1], [1, 1]],
]  # fmt: skip
TEXTS = [str(value) for value in VALUES if isinstance(value, str) and "\0" not in value and "\ud800" not in value] + [
    "0", "-1", "1", "2", "nan", "inf", "-inf", "1e308", "1e-300", "5e-324", "9" * 30, "1,2", "a,b", ",", "=", "a=b",
    "a=", "=b", "a=b=c", "x x1", "{", "[", "{}", "[]", "[1]", "{a: 1}", "*", "&", "!", "-", "--", "-o", "table", "json",
    "lru", "lru,lru", "mixtral-8x7b", "small.safetensors", "tiny.yaml", "nothing.yaml", "result", "result:0",
    "result:9", "result:lru", "link.bytes_per_s x2", "cache.ratio=0.5", "cache.ratio=nan", "workload.batch_size=0",
    "model=null", "policies=[]", "policies.0=lru", "x=1", "..x=1", "0=1",
    "trace={synthesize: mixtral-8x7b, requests: 1, prompt: 1, decode: 1}", "\u0661\u0662", "1\u00a0GiB", "12 GiB",
    "-3GiB", "0B", "1e30TiB",
]  # fmt: skip


def spoil(raw: Any, rng: random.Random) -> None:
    """Change one place of a structure, itself a mapping or a list."""
    if isinstance(raw, dict) and rng.random() < 0.5:
        change(raw, rng)
        return
    path = rng.choice(places(raw))
    holder, key = at(raw, path[:-1]), path[-1]
    how = rng.randrange(6)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, list):
        rng.shuffle(holder)
    elif how == 2 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif how == 3 and isinstance(holder[key], int | float) and not isinstance(holder[key], bool):
        holder[key] = holder[key] * rng.choice([-1, 0, 1e-12, 1e12, 1e300, float("nan")])
    elif how == 4 and isinstance(holder, dict):
        holder[rng.choice(["\x1b[31mred", "x" * 3000, "", "größe", "__class__"])] = holder.pop(key)
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))


def spoilt(raw: Any, rng: random.Random) -> Any:
    """Give a copy with one place changed, or a few."""
    raw = copy.deepcopy(raw)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        if places(raw):
            spoil(raw, rng)
    return raw


def as_yaml(text: str, rng: random.Random) -> bytes:
    """Spoil a file in YAML, its structure or its text."""
    if rng.random() < 0.25:
        return garble(text, rng)
    raw = spoilt(yaml.load(text, yaml.CSafeLoader), rng)
    return yaml.dump(raw, Dumper=yaml.SafeDumper, sort_keys=False, allow_unicode=True).encode("utf-8", "surrogatepass")


def as_json(text: str, rng: random.Random) -> bytes:
    """Spoil a file in JSON, its structure or its text."""
    if rng.random() < 0.25:
        return garble(text, rng)
    return json.dumps(spoilt(json.loads(text), rng)).encode()


def as_lines(text: str, rng: random.Random) -> bytes:
    """Spoil a text of lines with cells, or with JSON."""
    how, lines = rng.randrange(5), text.splitlines()
    where = rng.randrange(len(lines))
    if how == 0:
        return garble(text, rng)
    if how == 1 and lines[where].startswith(("{", "[")):
        lines[where] = as_json(lines[where], rng).decode("utf-8", "replace")
    elif how == 2:
        other = rng.randrange(len(lines))
        lines[where], lines[other] = lines[other], lines[where]
    elif how == 3:
        del lines[where : where + rng.choice([1, 1, 5])]
    else:
        cells = lines[where].split(",")
        cells[rng.randrange(len(cells))] = rng.choice(TEXTS)[:2000]
        lines[where] = ",".join(cells)
    return "\n".join([*lines, ""]).encode("utf-8", "surrogatepass")


def as_bytes(data: bytes, rng: random.Random, first: int = 0) -> bytes:
    """Spoil bytes, from a place on."""
    at, how = rng.randrange(first, len(data)), rng.randrange(5)
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + rng.randbytes(rng.choice([1, 4, 40])) + data[at:]
    n = rng.choice([1, 2, 4, 8])
    new = rng.choice([rng.randbytes(n), b"\xff" * n, bytes(n), b"\x7f" + b"\xff" * (n - 1)])
    return data[:at] + new + data[at + n :]


COUNTS = (2**16, 2**31 - 1, 2**32, 2**33, 2**40, 2**53 + 1, 2**62, 2**63, 2**64 - 1)
"""What a file may claim of which it holds next to nothing."""


def as_claim(data: bytes, rng: random.Random, first: int = 0) -> bytes:
    """Blow up a count in a header: a whole number of 2, 4 or 8 bytes, wherever a small one stands, or a number as text."""
    texts = [found.span() for found in re.finditer(rb"(?<![\w.])\d{1,6}(?![\w.])", data[first:])]
    if texts and rng.random() < 0.5:
        begin, end = rng.choice(texts)
        new = (str(rng.choice(COUNTS)) if rng.random() < 0.8 else "1" + "0" * rng.choice([20, 300, 310, 5000])).encode()
        return data[: first + begin] + new + data[first + end :]
    n = rng.choice([2, 4, 8, 8, 8])
    small = [at for at in range(first, len(data) - n) if 0 < int.from_bytes(data[at : at + n], "little") < 2**10]
    if not small:
        return as_bytes(data, rng, first)
    at, count = rng.choice(small), rng.choice(COUNTS) % 256**n or 256**n - 1
    return data[:at] + count.to_bytes(n, "little") + data[at + n :]


def as_archive(data: bytes, rng: random.Random) -> bytes:
    """Blow up a count in an archive of arrays: in the header of an array, whose checksum is made anew, or in the directory."""
    if rng.random() < 0.3:
        return as_claim(data, rng)
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as archive, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        chosen = rng.choice(archive.namelist())
        for name in archive.namelist():
            member = archive.read(name)
            new.writestr(name, as_npy(member, rng) if name == chosen else member)
    return out.getvalue()


def as_npy(data: bytes, rng: random.Random) -> bytes:
    """Blow up a count in the header of an array; the header is as long as before it."""
    begin, end = 10, 10 + int.from_bytes(data[8:10], "little")
    changed = as_claim(data[begin:end].rstrip(), rng)
    return data[:8] + len(changed).to_bytes(2, "little") + changed + data[end:]


def large_scalar(text: str, rng: random.Random) -> bytes:
    """Put a scalar into a text of YAML or JSON that takes long to read, or that no number of a machine holds."""
    digits = [found.span() for found in re.finditer(r"(?<![\w.])\d+(\.\d+)?(?![\w.])", text)]
    begin, end = rng.choice(digits) if digits else (len(text), len(text))
    n = 10 ** rng.choice([1, 2, 3, 5])
    scalars = [
        "9" * n, "1" + ":59" * n, "0x" + "f" * n, "0b" + "1" * n, f"1e{n}", "-1e309", "1e-400", "x" * 50 * n, "." * n,
        '"' + "y" * 5 * 10**6 + '"', str(2**1024), str(2**1023), "1.7e308", "5e-324",
    ]  # fmt: skip
    return (text[:begin] + rng.choice(scalars) + text[end:]).encode()


def as_safetensors(data: bytes, rng: random.Random) -> bytes:
    """Spoil the header of a safetensors file, its length, or its data."""
    size = int.from_bytes(data[:8], "little")
    how = rng.randrange(7)
    if how == 0:
        return as_bytes(data, rng, 8 + size)
    if how == 6:
        text = as_claim(data[8 : 8 + size], rng)
        return len(text).to_bytes(8, "little") + text + data[8 + size :]
    if how == 1:
        return as_bytes(data[: 8 + size], rng) + data[8 + size :]
    if how == 2:
        return rng.choice([0, 1, size - 1, size + 1, 2**31, 2**63, 2**64 - 1]).to_bytes(8, "little") + data[8:]
    header = json.loads(data[8 : 8 + size])
    inner = {key: json.loads(value) for key, value in header.get("__metadata__", {}).items() if value[:1] in "{["}
    if how == 3 and inner:  # what the file says of itself is JSON within JSON
        key = rng.choice(sorted(inner))
        header["__metadata__"][key] = json.dumps(spoilt(inner[key], rng))
        if rng.random() < 0.8:  # as one who writes such files would
            header["__metadata__"][HEADER_SUM_KEY] = sha256(header["__metadata__"][METADATA_KEY].encode()).hexdigest()
    else:
        header = spoilt(header, rng)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]
