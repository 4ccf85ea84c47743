"""Experiment files with one thing changed at random."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]


# All but the league, for which routing of six models would be made up each time.
SEEDS = sorted(file for file in (ROOT / "experiments").rglob("*.yaml") if file.name != "league.yaml")


VALUES: list[Any] = [
    None, True, False, 0, -1, -1.5, 1e9, 10**9, 10**18, 10**40, 1e300, float("nan"), float("inf"), "", " ", "nan", "8 G", "12 GX",
    "-3 GiB", "1e9", "yes", "∞ GiB", "Mixtral-8×7B", "a\tb", "a\0b", "\u202e", "\ud800", "../../..", "/", "~", "lru", "oracle",
    [], [[]], {}, [None], [1, "x"], {"base": None}, {"name": "dali", "w_size": [1, [2]]}, {"": 1}, {1: 2},
    list(range(50)), "x" * 5000,
]  # fmt: skip


KEYS = ("model", "hardware", "trace", "workload", "cache", "policies", "zip", "exclude", "include", "repeat", "batch_size",
        "ratio", "budget", "seed", "predictors", "plots", "timeline", "frames", "output", "name", "base", "decision_us", "Cache",
        "größe", "")  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Name every place in nested lists and mappings."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, v in inside for found in ((*path, key), *places(v, (*path, key)))]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def change(raw: dict[str, Any], rng: random.Random) -> None:
    """Change one place of an experiment."""
    path = rng.choice(places(raw))
    holder, key = at(raw, path[:-1]), path[-1]
    how = rng.randrange(8)
    if how == 0:
        del holder[key]
    elif how == 1 and isinstance(holder, dict):  # another name for the same
        holder[rng.choice([*KEYS, f"{key}s", str(key)[:-1], str(key).upper(), f" {key}", f"{key}.x"])] = holder.pop(key)
    elif how == 2:  # what stands elsewhere
        holder[key] = copy.deepcopy(at(raw, rng.choice(places(raw))))
    elif how == 3:
        holder[key] = [copy.deepcopy(holder[key])] * rng.choice([1, 2, 3])
    elif how == 4:
        holder[key] = {rng.choice(KEYS): copy.deepcopy(holder[key])}
    elif how == 5 and isinstance(holder[key], int | float):
        holder[key] = holder[key] * rng.choice([-1, 0, 0.5, 1e6, 10**12])
    elif how == 6 and isinstance(holder, dict):
        holder[rng.choice(KEYS)] = copy.deepcopy(rng.choice(VALUES))
    else:
        holder[key] = copy.deepcopy(rng.choice(VALUES))


def garble(text: str, rng: random.Random) -> bytes:
    """Change a file as a text."""
    lines, how, where = text.splitlines(keepends=True), rng.randrange(9), rng.randrange(len(text))
    line = rng.randrange(len(lines))
    if how == 0:
        return text[:where].encode()
    if how == 1:  # a repeated line
        lines.insert(line, lines[line])
    elif how == 2:
        lines[line] = "\t" + lines[line]
    elif how == 3:
        lines[line] = rng.choice("   -:?&*!|>'\"%@`{}[]#,") + lines[line]
    elif how == 4:
        lines[line], lines[-1] = lines[-1], lines[line]
    elif how == 5:
        return text[:where].encode() + bytes(rng.choices(range(256), k=rng.choice([1, 4, 40]))) + text[where:].encode()
    elif how == 6:
        lines.insert(
            line, rng.choice(["x: &a [*a]\n", "<<: *nothing\n", "? [1]\n: 2\n", "!!python/name:os.system x\n", "---\n", "...\n"])
        )
    elif how == 7:
        lines[line] = lines[line].replace(":", rng.choice([": &a", ": *a", ":", ": !!float", ": !!bool", ": !!int", ": !!set"]))
    else:
        lines[line] = lines[line].translate({ord(a): b for a, b in zip("aeio01", "äеіо١O", strict=True)})
    return "".join(lines).encode()


def mutant(number: int) -> tuple[Path, bytes]:
    """Make a broken file; the same number gives the same."""
    rng = random.Random(number)
    seed = SEEDS[number % len(SEEDS)]
    text = seed.read_text(encoding="utf-8")
    if rng.random() < 0.35:
        return seed, garble(text, rng)
    raw = yaml.safe_load(text)
    for _ in range(rng.choice([1, 1, 2, 4])):
        if places(raw):
            change(raw, rng)
    dumped = yaml.safe_dump(raw, sort_keys=False, allow_unicode=True)
    return seed, dumped.encode("utf-8", "surrogatepass")


_KNOWN: dict[tuple[str, str], Any] = {}


def remembered(name: str) -> Callable[..., Any]:
    import moesim.experiment.resolve as module

    original = getattr(module, name)

    def read(written: Any, place: str, *more: Any) -> Any:
        key = (name, json.dumps([written, *more], sort_keys=True, default=str))
        if key not in _KNOWN:
            _KNOWN[key] = original(written, place, *more)
        return _KNOWN[key]

    return read
