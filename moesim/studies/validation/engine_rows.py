"""Measured speeds of engines as people write them: which policy, cache, model, machine and tokens each row means."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from moesim.core.data import shipped
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, MoesimError
from moesim.hardware.parts import counted, read_parts
from moesim.model import ModelSpec
from moesim.policies.registry import policy_names
from moesim.studies.identify.bench import part_names
from moesim.studies.identify.cases import Case, make_cases
from moesim.studies.identify.named import NotUsableError, find_bits, find_model, spec_of
from moesim.studies.identify.observations import bits_in, observation, read_bits
from moesim.studies.identify.pastes import read_pasted_text
from moesim.studies.validation.public import shipped_table

NAMES: Final = "engine_names.yaml"
_PROMPT: Final = 64
"""Tokens of a prompt that is not stated."""
_TOKENS: Final = {True: 128, False: 256}
"""Decoded tokens that are not stated: of llama.cpp's placements, as of llama-bench, and of caches."""


@dataclass(frozen=True, eq=False)
class Row:
    """A measured speed, looked up."""

    place: str  # file and line
    # engine, setting, machine: as written
    engine: str
    setting: str
    machine: str
    case: Case  # model, policy, cache and tokens
    hardware: Any  # as in an experiment
    hit: float | None  # measured share of hits


@cache
def _names() -> Mapping[str, Any]:
    text = resources.files("moesim.studies.validation").joinpath(NAMES).read_text(encoding="utf-8")
    found: Mapping[str, Any] = read_yaml_value(text, NAMES)
    return found


def _has(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


def read_rows(path: Path) -> tuple[list[Row], list[tuple[str, str, str]], list[str]]:
    """Read rows, those that cannot be predicted (place, engine, reason), and columns whose names mean nothing here."""
    try:
        lines = list(csv.reader(io.StringIO(read_pasted_text(shipped(path)))))
    except csv.Error as error:
        raise ConfigError(f"{path}: expected a table of measured speeds, got: {error}; check its quotes") from None
    head, columns = [name.strip().lower() for name in lines[0]] if lines else [], _names()["columns"]
    for wanted in ("model", "engine", "speed"):
        if not set(columns[wanted]) & set(head):
            got = f"got {','.join(head)[:200] or 'nothing'}; add it"
            raise ConfigError(f"{path}:1: expected a column {' or '.join(columns[wanted])}, {got}")
    known, rows, skipped = {name: key for key, names in columns.items() for name in names}, [], []
    for number, cells in enumerate(lines[1:], 2):
        said = dict.fromkeys(columns, "")
        said |= {known[name]: cell.strip() for name, cell in zip(head, cells, strict=False) if name in known and cell.strip()}
        if not any(said.values()):
            continue
        place = f"{path}:{number}"
        try:
            rows.append(_row(said, place, number))
        except (NotUsableError, MoesimError) as error:
            skipped.append((place, said["engine"], str(error).removeprefix(f"{place}: ").partition("; say which")[0]))
    return rows, skipped, [name for name in head if name and name not in known]


def _row(said: Mapping[str, str], place: str, number: int) -> Row:
    words = f"{said['engine']}; {said['setting']}"
    for pattern, reason in _names()["not_simulated"]:
        if _has(pattern, words):
            raise NotUsableError(reason)
    found, fields = (
        _numbers(said, f"{said['setting']}; {said['engine']}"),
        {"model_type": said["model"], "file_type": said["bits"]},
    )
    given = said["model"].startswith("{") or said["model"].endswith((".json", ".yaml", ".gguf"))
    model = said["model"] if given else find_model(fields, ())
    prefill, policy = said["kind"].lower().startswith("p"), policy_of(words)
    if prefill and policy["name"].startswith("kt-"):
        raise NotUsableError("a prompt that is computed layer by layer, in chunks of a size that is not said")
    context, decode = _tokens(said, prefill=prefill, static=policy["name"] == "llama-cpp")
    case = make_cases([observation({
        "row": str(number), "model": model, "bits": _bits(said["bits"], fields, model), "alias": True, "place": place,
        "setting": _setting(policy, found, spec_of(model)), "batch": int(found.get("batch", 1)), "context": context,
        "decode": decode, "ubatch": int(found.get("ubatch", 512)), "value": _number(said["speed"], "speed"), "unit": "tokens/s",
        "kind": "prefill" if prefill else "decode", "source": said["source"],
    })])[0]  # fmt: skip
    hardware, machine = _machine(said, case.model, words)
    return Row(place, said["engine"], said["setting"], machine, case, hardware, found.get("hit"))


def _number(text: str, what: str) -> float:
    try:
        return float(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except ValueError:
        raise NotUsableError(f"{what}: expected a number, got '{text[:40]}'") from None


def _numbers(said: Mapping[str, str], words: str) -> dict[str, float]:
    """Read the numbers of a row: those of its columns, else those of its texts; 0 for words without one."""
    found = {}
    for key, pattern in _names()["numbers"].items():
        number = r"(\d{1,9}(?:\.\d{1,9})?)"
        match = re.search(pattern.replace("P", "N ?%").replace("N", number), words, re.IGNORECASE)
        if said.get(key):
            found[key] = _number(said[key], key)
        elif match is not None:
            found[key] = float(next(one for one in match.groups() if one is not None) or 0)
        if key in ("hit", "cached") and found.get(key, 0) > 1:
            found[key] /= 100
    return found


def policy_of(words: str) -> dict[str, Any]:
    """Return the policy that an engine and its setting mean; `NotUsableError` if there is none."""
    name = words.partition(";")[0].strip()
    if name.startswith("{"):
        return dict(read_yaml_value(name, "engine"))
    meant = (policy for text in (name, words) for pattern, policy in _names()["engines"] if _has(pattern, text))
    found = name if name in policy_names() else next(meant, "")
    if found not in policy_names():
        raise NotUsableError(f"no policy for the engine '{name[:60]}'")
    if found == "llama-cpp" and _has(r"\bcached?\b|(?<!experts-)\bslots\b", words):
        found = "llama-cpp-cache"
    caught = [(re.search(pattern, words, re.IGNORECASE), one) for of, pattern, one in _names()["options"] if of == found]
    return {"name": found} | {key: int(at[1]) if it == "N" else it for at, one in caught if at for key, it in one.items()}


def _setting(policy: Mapping[str, Any], found: Mapping[str, float], model: ModelSpec) -> str:
    """Write policy and cache in the words of a table of observed speeds."""
    options = [f"{key}={str(one).lower() if isinstance(one, bool) else one}" for key, one in policy.items() if key != "name"]
    share, n_layers = found.get("cached"), len(model.blocks)
    if "slots" in found:
        share = found["slots"] / model.n_experts
    elif share is None and (n_bytes := found.get("gib", 0) * 2**30 + found.get("mib", 0) * 2**20):
        share = n_bytes / sum(model.expert_bytes(layer) * model.n_experts for layer in range(model.n_layers))
    if share is not None and share > 1:
        raise NotUsableError(f"more slots of a layer than the {model.n_experts} experts that {model.name} has")
    if policy["name"] != "llama-cpp":
        share = 0.0 if share is None and policy["name"].startswith("kt-") and "all_on_cpu" in found else share
        return " ".join([f"policy={policy['name']}", *([] if share is None else [f"cache={share:.9g}"]), *options])
    numbers = {
        "n_cpu_moe": found.get("n_cpu_moe"), "first_on_gpu": n_layers - found.get("first_on_gpu", 0),
        "last_on_gpu": n_layers - found.get("last_on_gpu", 0) - 1, "share": None if share is None else n_layers * (1 - share),
        "all_on_cpu": n_layers, "all_on_gpu": 0,
    }  # fmt: skip
    number = next((number for key, number in numbers.items() if key in found or (key == "share" and share is not None)), None)
    if number is None and not {"ngl", "n_cpu_moe", "n_gpu_layers"} & {*found, *policy}:
        raise NotUsableError("where experts were is not said: give n_cpu_moe, or a share of experts on the GPU")
    layers = {"ngl": found.get("ngl"), "n_cpu_moe": number}
    return " ".join([*(f"{key}={one:.0f}" for key, one in layers.items() if one is not None and key not in policy), *options])


def _bits(text: str, fields: Mapping[str, Any], model: str) -> str:
    """Return a row's bits: numbers, a type's name, or those of most of a mixture's blocks."""
    known = _names()["blocks"]
    try:
        read_bits(text, "")
    except ConfigError:
        block = max((name for name in known if name in text.upper()), key=len, default="")
        if bits_in(text) or not block or spec_of(model).expert_bits < 8:
            return find_bits(fields, model)
        return f"{known[block]:g}/{max(_names()['other_bits'], known[block]):g}"
    return text or find_bits(fields, model)


def _tokens(said: Mapping[str, str], *, prefill: bool, static: bool) -> tuple[int, int]:
    """Return the tokens before the first decoded one (or of the prompt), and those decoded."""
    text = said["context"].replace(",", "")
    found = {key: int(number) for key, number in reversed(re.findall(r"(tg|pp|(?<=@ )d|(?<=@)d) ?(\d{1,7})", text))}
    numbers = [] if found else re.findall(r"(?<![\w-])(\d{1,7}) ?(k\b)?(?: ?- ?(\d{1,7}) ?(k\b)?)?", text, re.IGNORECASE)
    decode, n = int(_number(said["decode"], "decode")) if said["decode"] else found.get("tg", 0), 0
    if numbers:  # of a range its middle
        first, k, second, k2 = numbers[-1]
        n = round((int(first) + int(second or first)) / 2 * (1000 if k or k2 else 1))
    if prefill:
        return found.get("pp", n) or 8 * _PROMPT, 1  # 512, as of llama-bench
    if not decode and re.search(r"\d tokens$", text):  # without a word for the prompt
        n, decode = 0, n
    return found.get("d", n) or _PROMPT, decode or _TOKENS[static]


def _machine(said: Mapping[str, str], model: ModelSpec, words: str) -> tuple[Any, str]:
    """Return the hardware of a row as in an experiment, and its name."""
    enough = f"{16 * math.ceil(1.1 * model.n_bytes / 2**34)}GB"  # evidently, where no memory is stated
    if written := said["hardware"]:
        if "+" in written and not written.startswith("{"):
            return {"parts": {"ram": enough} | read_parts(written, "hardware")}, written
        given = read_yaml_value(written, "hardware") if written.startswith("{") else written
        return given, str(given.get("base", "own")) if isinstance(given, dict) else written
    gpu, cpu = (re.sub(r"\(.*?\)|,.*|\bunified\b|\b\d+C\b|^none$|^-$", "", said[key]).strip() for key in ("gpu", "cpu"))
    if not (gpu or cpu):
        raise NotUsableError("the machine is not said: give gpu and cpu, or hardware")
    n, name = counted(gpu)
    if n > 1:
        raise NotUsableError(f"{n} GPUs: rows of one are predicted")
    if _has(r"not (?:named|stated)|^-t\b|^\d+ threads", said["cpu"]) or not re.search(r"\d\w{2}", cpu):
        cpu = ""
    title = " + ".join(filter(None, (name, cpu)))
    if gpu and cpu and (profile := _profile(name, cpu)):
        return profile, title
    ram = re.sub(r"\(.*?\)|;.*|\d+(?:\.\d+)? ?[GM]B/s", "", said["ram"])
    if not _has(r"\d ?[gt]i?b|\dx\d", ram):
        ram = f"{ram if _has('ddr', ram) else ''} {enough}".strip()
    system = re.findall(r"windows|wsl|macos|vulkan|rocm|hip|metal|sycl", f"{said['os']} {words} {said['gpu']}".lower())
    link = re.search(r"pcie ?(?:gen ?)?\d(?:\.0)? ?x ?\d{1,2}", said["pcie"].lower())
    parts = {"gpu": name, "cpu": cpu, "ram": ram, "pcie": link[0] if link else "", "os": " ".join(dict.fromkeys(system))}
    return {"parts": {key: text for key, text in parts.items() if text}}, title


@cache
def _machines() -> Sequence[tuple[str, str]]:
    path = shipped_table("machines_by_parts.csv", "the parts of machines with profiles")
    with path.open(encoding="utf-8", newline="") as file:
        return [(row["machine"], f"{row['parts']} {row['note']}") for row in csv.DictReader(file)]


def _profile(gpu: str, cpu: str) -> str:
    """Return the shipped profile of a machine with this GPU and CPU; empty if there is none."""
    own = [part_names(gpu), part_names(cpu)]
    return next((name for name, text in _machines() if all(names and names <= part_names(text) for names in own)), "")


def grouped(skipped: Sequence[tuple[str, str, str]]) -> Iterator[str]:
    """Say which rows were skipped, by reason."""
    reasons = dict[str, list[str]]()
    for place, _, reason in skipped:
        reasons.setdefault(reason, []).append(place.rpartition(":")[2])
    for reason, lines in reasons.items():
        more = f" and {len(lines) - 6} more" if len(lines) > 6 else ""
        yield f"skipped, line {', '.join(lines[:6])}{more}: {reason}"
