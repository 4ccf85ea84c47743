"""Records of speeds in any text: tables, JSON, CSV and lines that benchmarks and servers print, with noise around them.

A record has the names of llama-bench's JSON fields, whichever program printed it.
"""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from moesim.core.gate import SMALLER, TABLE, TooLargeError, pasted, read_bytes, why_not
from moesim.errors import ConfigError


class Record(NamedTuple):
    """One measurement as it was printed."""

    place: str  # file and line, or its number in JSON
    text: str  # the row, shortened
    fields: dict[str, Any]
    reason: str  # why it cannot be used, whatever the model and the machine; else empty


COLUMNS: Final[Mapping[str, str]] = {
    "model": "model_type", "size": "model_size", "params": "model_n_params", "backend": "backends", "ngl": "n_gpu_layers",
    "ncmoe": "n_cpu_moe", "threads": "n_threads", "fa": "flash_attn", "mmap": "use_mmap", "mmp": "use_mmap",
    "nkvo": "no_kv_offload", "nopo": "no_op_offload", "ot": "tensor_buft_overrides", "dev": "devices", "ts": "tensor_split",
    "sm": "split_mode", "mg": "main_gpu", "embd": "embeddings", "ub": "n_ubatch", "b": "n_batch", "fitt": "fit_target",
    "ctk": "type_k", "ctv": "type_v", "rpc": "rpc_servers",
}  # fmt: skip
"""Columns of llama-bench's Markdown, and short options, that are called otherwise in its JSON; others keep their names."""

_OPTIONS: Final[Mapping[str, str]] = {
    "n-gpu-layers": "n_gpu_layers", "gpu-layers": "n_gpu_layers", "n-cpu-moe": "n_cpu_moe", "t": "n_threads",
    "override-tensor": "tensor_buft_overrides", "cache-type-k": "type_k", "cache-type-v": "type_v", "flash-attn": "flash_attn",
    "batch-size": "n_batch", "ubatch-size": "n_ubatch", "tensor-split": "tensor_split", "split-mode": "split_mode",
    "device": "devices", "main-gpu": "main_gpu", "model-draft": "draft", "md": "draft", "fit-target": "fit_target", "ser": "ser",
    "rpc": "rpc_servers",
    "max-concurrency": "concurrency", "cpu-offload-gb": "cpu_offload", "kt-num-gpu-experts": "gpu_experts",
    "threads": "n_threads", **dict.fromkeys(("model", "m", "hf", "hf-repo", "gguf-path", "model-path"), "model_filename"),
}  # fmt: skip
_FLAGS: Final[Mapping[str, tuple[str, str]]] = {
    "cmoe": ("n_cpu_moe", "999"), "cpu-moe": ("n_cpu_moe", "999"), "nkvo": ("no_kv_offload", "1"), "fa": ("flash_attn", "1"),
    "no-kv-offload": ("no_kv_offload", "1"), "nopo": ("no_op_offload", "1"), "no-op-offload": ("no_op_offload", "1"),
    "no-mmap": ("use_mmap", "0"), "flash-attn": ("flash_attn", "1"),
}  # fmt: skip
_PROGRAM: Final = re.compile(
    r"(?:^|[\s/\\$>&`\"])(llama-(?:bench|batched-bench|sweep-bench|server|cli|completion)|ollama run|vllm (?:bench|serve)|"
    r"[^\s]{0,80}ktransformers|sglang\.launch_server)(?:\.exe|\.local_chat|\S*\.py)?[\"`]?(?=\s|$)(.*)"
)
_NUMBER: Final = r"(\d{1,15}(?:\.\d+)?(?:[eE][+-]?\d\d?)?)"
_TIMING: Final = re.compile(
    rf"(prompt )?eval time\s*=\s*{_NUMBER} ms\s*/\s*(\d{{1,9}}) (?:tokens|runs)(?:.*?{_NUMBER} tokens per second)?"
)
_RATE: Final = re.compile(rf"^\W*(prompt )?eval (count|rate):\s*{_NUMBER}\s*(?:token\(s\)|tokens/s)")
_BOTH: Final = rf"prefill {_NUMBER}, decode {_NUMBER}"
_PERFORMANCE: Final = re.compile(rf"Performance\(T/s\): {_BOTH}\. Time\(s\):.*?{_BOTH}")
_SERVING: Final = {
    "Successful requests": "requests", "Maximum request concurrency": "concurrency", "Total input tokens": "n_prompt",
    "Total generated tokens": "n_gen", "Mean TPOT (ms)": "tpot",
}  # fmt: skip
_DEVICE: Final = re.compile(
    r"Device \d+: (?P<a>[^,|]+?)(?:, (?:compute capability|gfx|VMM|pci).*)?$|ggml_vulkan: \d+ = (?P<b>[^|]+?) \|"
    r"|ggml_metal\w*: (?:found device|picking default device|GPU name):\s*(?P<c>.+)$"
    r"|using device \w+ \((?P<d>[^)]+)\) (?:\([^)]*\) )?- \d+ MiB free"
)
_DEVICES: Final = re.compile(r"ggml_\w+: found \d+ \w+ devices|ggml_metal_init: allocating", re.IGNORECASE)
_CPU: Final = re.compile(r"^\W*(?:CPU\s*:|Model name:|model name\s*:)\s*(.{4,}?)(?: \(\d+ MiB.*)?$")
_BUILD: Final = re.compile(r"\bbuild(?:: (?P<below>[0-9a-f]{7,}) \(\d+\)|(?:: | = )\d+ \((?P<above>[0-9a-f]{7,})\))")
_PRINTED: Final = {
    "arch": "arch", "model type": "label", "model ftype": "file_type", "file type": "file_type", "model params": "model_n_params",
    "model size": "model_size", "file size": "model_size",
}  # fmt: skip
_LOADED: Final = re.compile(r"(?:print_info|llm_load_print_meta):\s*([a-z ]+?)\s*=\s*(.+)")
_OVERRIDDEN: Final = re.compile(r"[Tt]ensor (blk\.\d+\.\w+\.\w+) .*buffer type overrid+en to (\w+)")
_HEADER: Final = ("n_batch", "n_ubatch", "flash_attn", "n_threads", "n_gpu_layers")
_UNITS: Final = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_LONG: Final = 20_000  # characters of a line that is no line of a benchmark
_NOWHERE: Final = "where layers and experts were is not said: add the line that started it, with -m, -ngl, -ncmoe or -ot"


@dataclass
class Seen:
    """What lines before a record said."""

    gpus: list[str] = field(default_factory=list)
    cpu: str = ""
    build: str = ""
    program: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    printed: dict[str, Any] = field(default_factory=dict)  # by a model's loader
    counts: dict[str, float] = field(default_factory=dict)  # numbers that belong to a speed that is printed later


def read_pasted_text(path: Path) -> str:
    """Read a text in UTF-8 or UTF-16, with any ends of lines; other bytes in it become a sign of their own."""
    try:
        data = read_bytes(path, TABLE)
    except OSError as wrong:
        remedy = SMALLER if isinstance(wrong, TooLargeError) else "check the path"
        raise ConfigError(f"{path}: expected a table of observed speeds, got: {why_not(wrong)}; {remedy}") from None
    text = pasted(data).lstrip("\ufeff")
    if "\0" in text:
        raise ConfigError(f"{path}: expected observed speeds as text, got other bytes; give what a benchmark printed")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_records(text: str, place: str) -> tuple[list[Record], Seen]:
    """Read all records of a text in order, and what its lines say of the machine."""
    return _Reader(text, place).read()


class _Reader:
    def __init__(self, text: str, place: str) -> None:
        self.place, self.seen, self.found = place, Seen(), list[Record]()
        self.blobs, self.lines = _without_json(text)
        self.head: list[str] = []  # cells of the table that is being read
        self.comma: list[str] = []  # columns of the CSV that is being read
        self.number = 0

    def read(self) -> tuple[list[Record], Seen]:
        joined = ""
        for number, line in enumerate(map(str.strip, self.lines), 1):
            self.number = number
            for value in self.blobs.get(number, ()):
                self.json(value)
            if line.endswith(("\\", "^")) and len(joined) < _LONG:
                joined += line[:-1] + " "
                continue
            if len(line) < _LONG:
                self.line(joined + line)
            joined = ""
        return self.found, self.seen

    def line(self, line: str) -> None:
        cells = [cell.strip().strip("`*") for cell in re.sub(r"^\W*?\||\|$", "", line).split("|")]
        if "|" in line and self.row(cells):
            return
        if self.comma or "avg_ts," in line or '"avg_ts"' in line:
            cells = next(csv.reader([line]), [])
            if "n_prompt" in cells and "avg_ts" in cells:
                self.comma = cells
                return
            if len(cells) == len(self.comma):
                self.llama_bench(dict(zip(self.comma, cells, strict=True)))
                return
        self.said(line)
        self.timed(line)

    def add(self, text: str, fields: dict[str, Any], reason: str = "", place: str = "") -> None:
        seen, short = self.seen, " ".join(text.split())
        known = {"gpu_info": ", ".join(seen.gpus), "cpu_info": seen.cpu, "build_commit": seen.build}
        fields = {name: value for name, value in known.items() if value} | fields
        short = short if len(short) <= 60 else short[:57] + "..."
        self.found.append(Record(place or f"{self.place}:{self.number}", short, fields, reason))

    def row(self, cells: list[str]) -> bool:
        """Read a line of a table; return whether it is one."""
        names = [cell.lower() for cell in cells]
        if {"t/s", "test"} <= set(names) or {"s_tg t/s", "pp"} <= set(names):
            self.head = names
            return True
        if (more := len(cells) - len(self.head)) > 0 and "ot" in self.head:  # a pattern of -ot may have bars
            at = self.head.index("ot")
            cells = [*cells[:at], "|".join(cells[at : at + more + 1]), *cells[at + more + 1 :]]
        if not self.head or len(cells) != len(self.head):
            return False
        given = {name: cell for name, cell in zip(self.head, cells, strict=True) if cell not in ("", "-")}
        if set("".join(cells)) <= set(":- "):
            pass  # the line below the head
        elif "t/s" in self.head and "test" in self.head:
            self.bench(given)
        else:
            self.sweep({name.split()[0]: cell for name, cell in given.items()})
        return True

    def bench(self, cells: dict[str, str]) -> None:
        test = re.fullmatch(r"(?:pp(\d{1,9}))?\+?(?:tg(\d{1,9}))?(?:\s*@\s*(?:d|pp)(\d{1,9}))?", cells.get("test", ""))
        speed = re.match(rf"{_NUMBER}(?:\s+[^\s\d.]{{0,3}}\s*{_NUMBER})?$", cells.get("t/s", "").replace(",", ""))
        if test is None or speed is None:
            self.add(" ".join(cells.values()), {}, "no test such as pp512 or tg128, or no speed")
            return
        fields: dict[str, Any] = {COLUMNS.get(name, name): cell for name, cell in cells.items() if name not in ("test", "t/s")}
        if "ngl" not in cells and "n_gpu_layers" in self.seen.options:  # a build with BLAS does not print it
            fields["n_gpu_layers"] = self.seen.options["n_gpu_layers"]
        if "rpc_servers" in self.seen.options:
            fields["rpc_servers"] = self.seen.options["rpc_servers"]
        fields |= {key: number(fields[key]) for key in ("model_size", "model_n_params") if key in fields}
        fields |= dict(zip(("n_prompt", "n_gen", "n_depth"), (int(n or 0) for n in test.groups()), strict=True))
        fields |= {"avg_ts": float(speed[1])} | ({"stddev_ts": float(speed[2])} if speed[2] else {})
        self.add(f"{fields.get('model_type', '')} {cells['test']} {speed[1]}", fields)

    def sweep(self, cells: Mapping[str, Any]) -> None:
        """Read a row of llama-sweep-bench or llama-batched-bench: a prompt, then decoding."""
        numbers = {name: number(str(cells[name])) for name in ("pp", "tg", "n_kv", "s_pp", "s_tg", "b") if name in cells}
        pp, tg, n_kv, s_pp, s_tg = (numbers.get(name) for name in ("pp", "tg", "n_kv", "s_pp", "s_tg"))
        if pp is None or tg is None or n_kv is None:
            self.add(" ".join(map(str, cells.values())), {}, "a cell that should be a number is none")
            return
        batched, batch = "b" in numbers, int(numbers.get("b") or 1)
        shared = batch > 1 and n_kv == pp + batch * tg  # one prompt for all sequences
        self.seen.program = self.seen.program or ("llama-batched-bench" if batched else "llama-sweep-bench")
        text = f"PP {pp:g} TG {tg:g} " + (f"B {batch} " if batched else f"N_KV {n_kv:g} ")
        if pp and s_pp:
            before, n = 0 if batched else int(n_kv), 1 if shared else batch
            fields: dict[str, Any] = {"n_prompt": int(pp), "n_depth": before, "avg_ts": s_pp, "n_seqs": n}
            self.run(f"{text}S_PP {s_pp:g}", fields, cells)
        if tg and s_tg:
            fields = {"n_gen": int(tg), "n_depth": int(pp if batched else n_kv), "avg_ts": s_tg, "n_seqs": batch}
            self.run(f"{text}S_TG {s_tg:g}", fields, cells, "sequences that share a prompt are not simulated" if shared else "")

    def run(self, text: str, fields: dict[str, Any], more: Mapping[str, Any] | None = None, reason: str = "") -> None:
        """Add a record of a program that does not print its options with each speed."""
        seen = self.seen
        known = {**seen.printed, **seen.options, "program": seen.program}
        known |= {key: more[key] for key in _HEADER[:-1] if more and more.get(key) is not None}
        if known.get("draft"):
            reason = reason or "with a draft model, whose speed depends on how often it is right"
        if "n_gpu_layers" not in known and not re.search("ktransformers|vllm|sglang", seen.program):
            reason = reason or _NOWHERE
        self.add(text, {"n_prompt": 0, "n_gen": 0, "n_depth": 0, **known, **fields}, reason)

    def answered(self, *, prompt: bool, n: int, speed: float, before: int) -> None:
        """Add a prompt, or the tokens decoded after one."""
        if n and speed:
            self.run(f"{'prompt' if prompt else 'decode'} {n} {speed:g}", {
                "n_prompt" if prompt else "n_gen": n, "n_depth": before, "avg_ts": speed,
            })  # fmt: skip

    def llama_bench(self, fields: dict[str, Any]) -> None:
        missing = [key for key in ("n_prompt", "n_gen", "avg_ts") if fields.get(key) in (None, "")]
        words = f"{fields.get('model_type', '')} pp{fields.get('n_prompt')} tg{fields.get('n_gen')} {fields.get('avg_ts')}"
        reason = f"the field {missing[0]} of llama-bench is missing" if missing else ""
        self.add(words, fields, reason, f"{self.place}: row {len(self.found) + 1}")

    def json(self, value: Any, depth: int = 0) -> None:
        """Read records out of JSON, however they are wrapped."""
        inner: Any = value if isinstance(value, list) else []
        if isinstance(value, dict):
            timings = value.get("timings", value)
            if "avg_ts" in value or {"n_prompt", "n_gen"} <= set(value):
                self.llama_bench(value)
            elif {"pp", "tg", "n_kv"} <= set(value):
                if self.seen.program and "n_gpu_layers" in value:
                    self.seen.options.setdefault("n_gpu_layers", value["n_gpu_layers"])
                names = {"speed_pp": "s_pp", "speed_tg": "s_tg", "pl": "b"}
                self.sweep(value | {new: value[old] for old, new in names.items() if old in value})
            elif isinstance(timings, dict) and {"prompt_n", "predicted_n"} <= set(timings):
                self.seen.options |= {"draft": True} if timings.get("draft_n") else {}
                cached, prompt, n = (_int(timings.get(key)) for key in ("cache_n", "prompt_n", "predicted_n"))
                self.answered(prompt=True, n=prompt, speed=_float(timings.get("prompt_per_second")), before=cached)
                self.answered(prompt=False, n=n, speed=_float(timings.get("predicted_per_second")), before=cached + prompt)
            elif {"eval_count", "eval_duration"} <= set(value):
                self.seen.program, self.seen.options["model_filename"] = "ollama", str(value.get("model", ""))
                prompt, n = _int(value.get("prompt_eval_count")), _int(value["eval_count"])
                seconds = [_float(value.get(key)) / 1e9 or 1e9 for key in ("prompt_eval_duration", "eval_duration")]
                self.answered(prompt=True, n=prompt, speed=prompt / seconds[0], before=0)
                self.answered(prompt=False, n=n, speed=n / seconds[1], before=prompt)
            else:
                inner = value.values()
        for one in inner if depth < 20 else ():
            self.json(one, depth + 1)

    def timed(self, line: str) -> None:
        """Read a line with a speed that a server or a chat printed."""
        counts = self.seen.counts
        if found := _TIMING.search(line):
            n, seconds, prompt = int(found[3]), float(found[2]) / 1e3, found[1] is not None
            counts["prompt count"] = n if prompt else counts.get("prompt count", 0)
            speed = float(found[4] or 0) or (n / seconds if seconds else 0.0)
            self.answered(prompt=prompt, n=n, speed=speed, before=0 if prompt else int(counts["prompt count"]))
        elif found := _RATE.search(line):
            kind, value = found[1] or "", float(found[3])
            counts[f"{kind}{found[2]}"] = value
            n, before = (int(counts.get(key, 0)) for key in (f"{kind}count", "prompt count"))
            if found[2] == "rate" and not n:
                self.run(line, {}, reason="the number of tokens is missing: give all lines of --verbose")
            elif found[2] == "rate":
                self.answered(prompt=bool(kind), n=n, speed=value, before=0 if kind else before)
        elif found := _PERFORMANCE.search(line):
            self.seen.program = "ktransformers"
            speeds, seconds_of = [float(one) for one in found.groups()[:2]], [float(one) for one in found.groups()[2:]]
            n_prompt, n = (int(min(1e9, one * time)) for one, time in zip(speeds, seconds_of, strict=True))
            self.answered(prompt=True, n=n_prompt, speed=speeds[0], before=0)
            self.answered(prompt=False, n=n, speed=speeds[1], before=n_prompt)
        elif re.search(r"Throughput: [\d.]+ requests/s", line):
            self.run(line, {}, reason="prompts and decoding in one number: give what 'vllm bench serve' prints")
        elif (found := re.match(r"\W*([\w ()]{4,40}):\s+([\d.]+)$", line)) and found[1] in _SERVING:
            counts[_SERVING[found[1]]] = _float(found[2])
            if "tpot" in counts:
                self.served(counts.pop("tpot"))

    def served(self, each: float) -> None:
        """Add the decoding that a benchmark of a server measured, in ms a token."""
        counts, seen = self.seen.counts, self.seen
        seen.program = seen.program or "vllm"
        n, at_once = counts.pop("requests", 0), counts.pop("concurrency", 0) or _int(seen.options.get("concurrency"))
        n_prompt, n_gen = (int(counts.pop(key, 0) / n) if n else 0 for key in ("n_prompt", "n_gen"))
        reason = "" if at_once == 1 else "the number of requests in a step is not known: measure with --max-concurrency 1"
        fields = {"n_gen": n_gen, "n_depth": n_prompt, "avg_ts": 1e3 / each if each else 0.0}
        self.run(f"Mean TPOT {each:g} ms", fields, None, reason)

    def said(self, line: str) -> None:
        """Read what a line says of machine, build, model and options."""
        seen = self.seen
        if found := _PROGRAM.search(line):
            self.started(found[1], found[2])
        elif _DEVICES.search(line):
            seen.gpus = []
        elif found := _DEVICE.search(line):
            name = next(one for one in found.groups() if one).strip()
            seen.gpus.append(re.sub(r"(?: \([^()]*\)){1,2}$", "", name) if found["b"] else name)
        elif found := _CPU.match(line):
            seen.cpu = found[1].strip()
        elif (found := _LOADED.search(line)) and found[1].strip() in _PRINTED:
            key = _PRINTED[found[1].strip()]
            seen.printed[key] = number(found[2]) if key.startswith("model_") else found[2].strip()
        elif found := _OVERRIDDEN.search(line):
            seen.printed.setdefault("overridden", {})[found[1]] = found[2]
        elif found := re.search(r"offloaded (\d{1,4})/\d+ layers to GPU", line):
            seen.printed["n_gpu_layers"] = found[1]
        elif found := re.search(r"\d [KMG]B\s+100% ([CG])PU\b", line):  # ollama ps
            seen.printed["n_gpu_layers"] = "0" if found[1] == "C" else "999"
        elif "n_kv_max = " in line and seen.program:
            printed = dict(re.findall(r"(\w+) = (-?\d+)", line))
            seen.options = {key: printed[key] for key in _HEADER if key in printed} | seen.options
        if (found := _BUILD.search(line)) and found["above"]:
            seen.build = found["above"]
        elif found:  # llama-bench prints it below its table
            for record in reversed(self.found):
                if "build_commit" in record.fields:
                    break
                record.fields["build_commit"] = found["below"]

    def started(self, program: str, rest: str) -> None:
        """Read the options of a program."""
        seen = self.seen
        seen.program, seen.options, seen.counts, seen.printed = program, {}, {}, {}
        try:
            words = shlex.split(rest, posix="\\" not in rest or "'" in rest or '"' in rest)
        except ValueError:
            words = rest.split()
        if program == "ollama run" and words:
            seen.options["model_filename"] = words[0]
        index = 0
        while index < len(words):
            option, index = words[index], index + 1
            if not option.startswith("-"):
                continue
            long, (option, equals, value) = option.startswith("--"), option.partition("=")
            name = option.lstrip("-").replace("_", "-")
            key = _OPTIONS.get(name) or (None if long or name == "model" else COLUMNS.get(name))
            if not equals and index < len(words) and not re.match(r"-[a-zA-Z-]", words[index]):
                value = words[index]
            if name in _FLAGS and value not in ("0", "1", "on", "off", "auto"):
                seen.options.update([_FLAGS[name]])
            elif key and value:
                index += not equals
                both = key == "tensor_buft_overrides" and key in seen.options
                seen.options[key] = f"{seen.options[key]},{value}" if both else value


def _without_json(text: str) -> tuple[dict[int, list[Any]], list[str]]:
    """Take JSON values out of a text: by line, and the lines that are left; of one that is cut off, what is whole."""
    decoder, blobs, rest = json.JSONDecoder(), dict[int, list[Any]](), list[str]()
    at = spent = 0
    for found in re.finditer(r"[\[{](?=\s*[\[{\"])", text):
        if found.start() < at or spent > 10 * len(text):
            continue
        try:
            value, end = decoder.raw_decode(text, found.start())
        except (ValueError, RecursionError) as error:
            spent += getattr(error, "pos", len(text)) - found.start()  # so that brackets alone do not take their square
            continue
        rest.append(text[at : found.start()] + "\n" * text.count("\n", found.start(), end))
        blobs.setdefault(text.count("\n", 0, found.start()) + 1, []).append(value)
        at = end
    return blobs, ("".join(rest) + text[at:]).split("\n")


def number(text: str) -> float | None:
    """Read a number with the unit of a size or a count.

    >>> number("59.02 GiB"), number("116.83 B"), number("x")
    (63372242452.48, 116830000000.0, None)
    """
    found = re.match(rf"{_NUMBER}\s*([KMGT]iB|[KMBT])?\b", text.replace(",", ""))
    return None if found is None or float(found[1]) > 1e15 else float(found[1]) * _UNITS.get(found[2] or "", 1)


def _int(value: Any) -> int:
    return int(_float(value))


def _float(value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return found if 0 <= found < 1e15 else 0.0


def pairs(names: str) -> Iterator[str]:
    """Split the names of GPUs as llama-bench joins them."""
    yield from (name.strip() for name in names.split(", ") if name.strip())
