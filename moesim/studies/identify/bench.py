"""Rows of an identification out of what people paste: which can be used, which belong together, and why others are skipped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from moesim.core.data import shipped
from moesim.errors import ConfigError, InputError
from moesim.hardware import HardwareProfile
from moesim.model import ModelSpec
from moesim.studies.identify import observations as tables
from moesim.studies.identify.named import NotUsableError, find_bits, find_model, spec_of
from moesim.studies.identify.observations import AGREE, Observation, contradict, observation
from moesim.studies.identify.pastes import Record, pairs, read_pasted_text, read_records

LONGEST: Final = 4096
"""Tokens of a prompt that an identification simulates, again for each constant."""


@dataclass(frozen=True)
class Bench:
    """Rows of a file that one identification may use, and the others."""

    rows: tuple[Observation, ...]
    skipped: tuple[tuple[str, str, str], ...] = ()  # place, row, reason
    machine: Mapping[str, Any] = field(default_factory=dict)  # parts, as the file names them: gpu, cpu
    group: Mapping[str, str] = field(default_factory=dict)  # what printed rows have in common; empty: a table of speeds

    @property
    def n_read(self) -> int:
        return len(self.rows) + len(self.skipped)

    def lines(self) -> list[str]:
        """Say in a few lines what was read, used and skipped."""
        common = ", ".join(f"{name} {value}" for name, value in self.group.items() if value not in ("", "f16"))
        n, reasons = len(self.rows), dict[str, list[str]]()
        for place, _, reason in self.skipped:
            reasons.setdefault(reason, []).append(place.rpartition(":")[2].strip().removeprefix("row "))
        said = [f"rows: {self.n_read} read, {n} used" + (f" ({common})" if common else "") + f", {self.n_read - n} skipped"]
        for reason, places in reasons.items():
            more = f" and {len(places) - 4} more" if len(places) > 4 else ""
            said.append(f"skipped {', '.join(places[:4])}{more}: {reason}")
        if "RPC" in self.group.get("backend", ""):
            said.append(f"backend {self.group['backend']}: no row names a server of RPC, so all GPUs are of this machine")
        return said


class _Usable(NamedTuple):
    row: Observation
    group: Mapping[str, str]  # rows are comparable where all of these are equal
    record: Record


def read_speeds(
    path: Path, models: Sequence[str] = (), profile: HardwareProfile | None = None, *, any_machine: bool = False
) -> Bench:
    """Read observed speeds: a table of them, or whatever a benchmark or server printed."""
    path = shipped(path)
    text = read_pasted_text(path)
    if not tables.is_table(text):
        return read_bench(text, str(path), models, profile, any_machine=any_machine)
    rows = tables.read_table(text, path)
    if not rows:
        raise ConfigError(f"{path}: expected at least one observation, got none; add a row")
    tables.check_rows(rows)
    return Bench(tuple(rows))


def read_observations(path: Path, models: Sequence[str] = ()) -> list[Observation]:
    """Read the rows of `read_speeds` that can be used."""
    return list(read_speeds(path, models).rows)


def read_bench(
    text: str, place: str, models: Sequence[str] = (), profile: HardwareProfile | None = None, *, any_machine: bool = False
) -> Bench:
    """Read speeds out of a text; rows that cannot be used are listed with the reason.

    `models` are what rows may be of: names, or ``PART OF ITS TYPE=NAME``; `profile` is the machine, whose names must be those of
    the rows unless `any_machine`. Raises `ConfigError` if no row is left.
    """
    records, seen = read_records(text, place)
    usable: list[_Usable] = []
    reasons: dict[int, str] = {}
    for number, record in enumerate(records):
        try:
            if profile is not None and not any_machine:
                check_names(record.fields, profile)
            row = _row(record, number + 1, models, profile)
            usable.append(_Usable(row, _alike(record.fields, "" if len(models) > 1 else row.model), record))
        except NotUsableError as error:
            reasons[number] = str(error)
    used, others = _chosen(usable)
    reasons |= {next(i for i, one in enumerate(records) if one is record): reason for record, reason in others}
    skipped = tuple((records[i].place, records[i].text, reasons[i]) for i in sorted(reasons))
    if not used:
        raise ConfigError(f"{place}: {_nothing(text, records, skipped)}")
    fields = used[0].record.fields
    gpus = list(pairs(str(fields.get("gpu_info") or ""))) or seen.gpus
    machine = {"gpu": gpus[0] if gpus else "", "cpu": str(fields.get("cpu_info") or seen.cpu)}
    return Bench(tuple(one.row for one in used), skipped, {key: name for key, name in machine.items() if name}, used[0].group)


def _nothing(text: str, records: Sequence[Record], skipped: Sequence[tuple[str, str, str]]) -> str:
    """Say what a text without a usable row looked like, and what is wanted."""
    if records:
        programs = {str(record.fields.get("program") or "llama-bench") for record in records}
        reasons = Counter(reason for _, _, reason in skipped).most_common(3)
        of = f"{len(records)} of {' and '.join(sorted(programs))} that cannot"
        return f"expected a row that can be used, got {of}: " + "; ".join(f"{reason} ({n})" for reason, n in reasons)
    start, looks = text.lstrip()[:20].lower(), f"{len(text.splitlines())} lines without a speed"
    for begin, words in (("<", "a web page"), ("insert", "SQL"), ("create", "SQL"), ("{", "other JSON"), ("[", "other JSON")):
        looks = words if start.startswith(begin) else looks
    return (
        "expected what llama-bench, llama-server, Ollama or another benchmark printed, or a table of observed speeds, "
        f"got {looks if start else 'nothing'}; paste the output with its head"
    )


def _row(record: Record, number: int, models: Sequence[str], profile: HardwareProfile | None) -> Observation:
    """Make an observation of a record, or raise `NotUsableError` with the reason."""
    fields = record.fields
    if record.reason:
        raise NotUsableError(record.reason)
    n_prompt, n_gen, depth = (_whole(fields, key) for key in ("n_prompt", "n_gen", "n_depth"))
    if (n_prompt > 0) == (n_gen > 0):
        raise NotUsableError("prompt and decoding in one number (-pg)" if n_gen else "neither a prompt nor decoded tokens")
    if n_prompt and depth:
        raise NotUsableError("a prompt behind others (-d) is not simulated")
    if n_prompt > LONGEST:
        raise NotUsableError(f"a prompt of more than {LONGEST} tokens takes minutes to simulate")
    _check_simulated(fields)
    model = find_model(fields, models)
    spec = spec_of(model)
    _check_cache(fields, spec, n_prompt + depth + n_gen)
    batch, kind = _whole(fields, "n_seqs", 1), "prefill" if n_prompt else "decode"
    name = f"{number}:{'pp' if n_prompt else 'tg'}{n_prompt or n_gen}{f'@d{depth}' if depth else ''}"
    values: dict[str, Any] = {
        "row": name + (f"x{batch}" if batch > 1 else ""), "model": model, "bits": find_bits(fields, model),
        "setting": _setting(fields, spec, profile), "batch": batch, "context": n_prompt or depth, "value": fields.get("avg_ts"),
        "unit": "tokens/s", "kind": kind, "alias": True, "place": record.place,
        "ubatch": min(_whole(fields, "n_ubatch", 512), _whole(fields, "n_batch", 2048)),
        "source": f"{fields.get('program') or 'llama-bench'} {fields.get('build_commit') or ''}".strip(),
    }  # fmt: skip
    values |= {"decode": n_gen} if n_gen else {}
    values |= {"spread": fields["stddev_ts"]} if fields.get("stddev_ts") not in (None, "", "0", 0) else {}
    try:
        return observation(values)
    except InputError as error:
        raise NotUsableError(str(error).removeprefix(f"{record.place}: ")) from None


_ALIKE: Final = {
    "GPU": "gpu_info", "CPU": "cpu_info", "build": "build_commit", "backend": "backends", "devices": "devices", "-t": "n_threads",
    "program": "program",
}  # fmt: skip


def _alike(fields: Mapping[str, Any], model: str) -> dict[str, str]:
    """Return what comparable rows have in common."""
    known = {name: str(fields.get(key) or "") for name, key in _ALIKE.items()}
    known["devices"] = "" if known["devices"] in ("auto", "none") else known["devices"]
    attention = {"1": "on", "true": "on", "on": "on", "0": "off", "false": "off", "off": "off"}
    kinds = {str(fields.get(key) or "f16").lower() for key in ("type_k", "type_v")}
    attended = attention.get(str(fields.get("flash_attn")).lower(), "")
    return {"model": model, "-fa": attended, "KV cache": "/".join(sorted(kinds)), **known}


def _chosen(usable: Sequence[_Usable]) -> tuple[list[_Usable], list[tuple[Record, str]]]:
    """Return the largest group of comparable rows, of equals the fastest, and why others are not in it."""
    groups: dict[tuple[str, ...], list[_Usable]] = {}
    for one in usable:
        groups.setdefault(tuple(one.group.values()), []).append(one)
    if not groups:
        return [], []

    def size(group: Sequence[_Usable]) -> tuple[int, int, bool, float]:
        decoded = [one.row.value for one in group if one.row.kind == "decode"]
        return len(group), len(decoded), group[0].group["KV cache"] == "f16", fmean(decoded) if decoded else 0.0

    common = max(groups.values(), key=size)[0].group
    used: list[_Usable] = []
    others: list[tuple[Record, str]] = []
    for one in usable:
        name = next((name for name, value in one.group.items() if value != common[name]), None)
        if name is not None:
            others.append((one.record, f"another {name}: {one.group[name] or 'not said'} (used: {common[name] or 'not said'})"))
        elif any(_again(before.row, one.row) for before in used):
            others.append((one.record, f"measured again, more than {100 * AGREE:g} % and three spreads from the first time"))
        else:
            used.append(one)
    return used, others


def _again(before: Observation, one: Observation) -> bool:
    about = ("model", "bits", "setting", "kind", "batch", "context", "decode" if one.kind == "decode" else "ubatch")
    return all(getattr(one, name) == getattr(before, name) for name in about) and contradict(before, one)


def _whole(fields: Mapping[str, Any], key: str, default: int = 0) -> int:
    value = fields.get(key)
    try:
        return default if value in (None, "") else int(float(str(value)))
    except (ValueError, OverflowError):
        raise NotUsableError(f"{key}: expected a whole number, got '{value}'") from None


def _is_true(fields: Mapping[str, Any], key: str) -> bool:
    return str(fields.get(key) or "0").lower() not in ("0", "false", "none", "off", "0.0")


def _check_simulated(fields: Mapping[str, Any]) -> None:
    """Refuse rows of what the simulator does not know."""
    ngl = _layers(fields)
    for is_so, why in (
        (_is_true(fields, "no_kv_offload") and ngl > 1, "a KV cache in main memory next to layers on the GPU (-nkvo)"),
        (_is_true(fields, "embeddings"), "embeddings, no generation"),
        (_is_true(fields, "ser"), "experts are left out (-ser)"),
        (_is_true(fields, "fit_target"), "llama.cpp chose the placement (-fitt): give -ngl and -ncmoe"),
        (_is_remote(fields), "GPUs of other hosts (RPC)"),
    ):
        if is_so:
            raise NotUsableError(why)
    split = [share for share in re.findall(r"\d+\.?\d*", str(fields.get("tensor_split") or "")) if float(share)]
    names, chosen = list(pairs(str(fields.get("gpu_info") or ""))), str(fields.get("devices") or "auto")
    n_gpus = len(split) or (len(names) if chosen in ("auto", "none") else len(re.split("[/,]", chosen)))
    if n_gpus > 1 and str(fields.get("split_mode")) != "none" and ngl > 0:
        raise NotUsableError(f"{n_gpus} GPUs: constants are identified from rows of one; measure with -sm none")


def _is_remote(fields: Mapping[str, Any]) -> bool:
    """Return whether a row names a server or device of RPC; builds that could use one print ``CUDA,RPC`` for all rows."""
    named = any(re.search(r"\brpc", str(fields.get(key) or ""), re.IGNORECASE) for key in ("devices", "gpu_info"))
    return named or bool(fields.get("rpc_servers")) or fields.get("backends") == "RPC"


def _check_cache(fields: Mapping[str, Any], spec: ModelSpec, n_tokens: int) -> None:
    """Refuse a quantised KV cache where it matters: its bytes could be counted, unpacking them is not simulated."""
    for key in ("type_k", "type_v"):
        kind = str(fields.get(key) or "f16").lower()
        if kind not in ("f16", "bf16") and spec.all_kv_bytes(n_tokens) > AGREE * spec.token_bytes(1, n_tokens):
            raise NotUsableError(f"a KV cache of {kind}, whose unpacking is not simulated: measure with f16")


def _layers(fields: Mapping[str, Any]) -> int:
    """Return the layers on the GPU; a negative number or none means all, as in llama-bench."""
    given = str(fields.get("n_gpu_layers") or ("0" if fields.get("n_gpu_layers") == 0 else "all"))
    if _without_gpu(fields):
        return 0
    if given in ("auto", "-1") and fields.get("program"):
        raise NotUsableError("llama.cpp chose the placement (-ngl auto): give -ngl and -ncmoe")
    ngl = -1 if given in ("all", "auto") else _whole({"n_gpu_layers": given}, "n_gpu_layers")
    return tables.ALL if ngl < 0 else min(ngl, tables.ALL)


def _without_gpu(fields: Mapping[str, Any]) -> bool:
    """Return whether a program was built without a backend of a GPU."""
    return set(re.split(r"[,\s]+", str(fields.get("backends") or "?").upper())) <= {"CPU", "BLAS", "ZENDNN"}


def _setting(fields: Mapping[str, Any], spec: ModelSpec, profile: HardwareProfile | None) -> str:
    """Write where layers and experts were in the words of a table of speeds."""
    program, ngl, n_blocks = str(fields.get("program") or ""), _layers(fields), len(spec.blocks)
    if "vllm" in program:
        if fields.get("cpu_offload") or profile is None or not profile.machine.get("engine", "").startswith("vllm"):
            raise NotUsableError("of vLLM: name a machine with its costs (--engine vllm), all weights on the GPU")
        return "all_gpu"
    if "ktransformers" in program or "sglang" in program:
        return f"policy=kt-expert gpu_experts={_whole(fields, 'gpu_experts')}"
    if profile is not None and not any(device.role == "accelerator" for device in profile.devices.values()):
        if ngl > 0:
            raise NotUsableError("layers on a GPU, which the profile does not have")
        return "all_cpu"
    words, first = [f"ngl={ngl}"], min(_whole(fields, "n_cpu_moe"), n_blocks)
    overrides, listed = str(fields.get("tensor_buft_overrides") or "none"), fields.get("overridden")
    if listed or overrides != "none":
        on_cpu = listed_layers(listed, spec) if listed else overridden_layers(overrides, spec, first)
        first = _first_layers(set(on_cpu), spec, ngl)
    if first and ngl > 1:  # with at most the output layer on the GPU, all experts are on the CPU
        words.append(f"n_cpu_moe={first}")
    if _is_true(fields, "no_op_offload") or _without_gpu(fields):
        words.append("op_offload=false")
    elif _whole(fields, "n_prompt") and first and not _is_true({"use_mmap": 1} | dict(fields), "use_mmap"):
        words.append("mmap=false")  # large batches copy experts at another rate
    return " ".join(words)


def _first_layers(on_cpu: set[int], spec: ModelSpec, ngl: int) -> int:
    """Return ``--n-cpu-moe`` of as many layers as have their experts on the CPU.

    Where all layers are on the GPU, those with equal experts cost the same: each sends its rows to the CPU and takes them back.
    """
    n, wanted = len(on_cpu), list(spec.positions)
    alike = ngl > len(spec.blocks) and len({spec.expert_bytes(layer) for layer in range(spec.n_layers)}) == 1
    if on_cpu != set(wanted[:n]) and not alike:
        raise NotUsableError("experts on the CPU of layers that are not the first (-ot)")
    return wanted[n - 1] + 1 if n else 0


_OTHERS: Final = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_qkv", "attn_output", "attn_kv_b", "ssm_in", "ssm_out", "ffn_norm",
    "ffn_gate_inp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ffn_gate", "ffn_up", "ffn_down", "post_attention_norm",
)  # fmt: skip
"""Tensors of a block that are no routed experts' and lie on the GPU."""
_MOST: Final = 400  # characters of a pattern
_REPEATS: Final = 3  # with names of 40 characters, more could take seconds


def overridden_layers(text: str, spec: ModelSpec, n_cpu_moe: int = 0) -> Iterator[int]:
    """Yield the blocks whose experts patterns keep on the CPU: of each tensor's name, the first pattern that is found in it.

    ``PATTERN=CPU``, several separated by commas or semicolons, then those of ``--n-cpu-moe``.
    """
    rules = [_rule(one.strip()) for one in re.split(r"(?<=[A-Za-z0-9])[;,]", text) if one.strip()]

    def device(block: int, name: str) -> str:
        tensor = f"blk.{block}.{name}.weight"
        found = next((where for pattern, where in rules if pattern.search(tensor)), "")
        return found or ("CPU" if block < n_cpu_moe and name.endswith("_exps") else "GPU")

    for block in range(len(spec.blocks)):
        for name in _OTHERS:
            if device(block, name) == "CPU":
                raise NotUsableError(f"-ot moves more than experts: blk.{block}.{name}.weight")
        where = {device(block, f"ffn_{part}_exps") for part in ("down", "up", "gate")[: spec.n_mats]}
        if block in spec.positions and len(where) > 1:
            raise NotUsableError(f"-ot moves only a part of the experts' matrices: of layer {block}")
        if block in spec.positions and where == {"CPU"}:
            yield block


def _rule(text: str) -> tuple[re.Pattern[str], str]:
    pattern, _, where = text.rpartition("=")
    device = "CPU" if re.fullmatch(r"CPU(_\w+)?|\w+_Host", where) else "GPU" if re.fullmatch(r"[A-Za-z]+0?", where) else ""
    if not device or not pattern:
        raise NotUsableError(f"-ot names a place that is not simulated: {text[-40:]}")
    core = re.sub(r"^\^?(\.\*)+|(\.\*)+\$?$", "", pattern)
    if len(pattern) > _MOST or len(re.findall(r"[*+]|\{\d", core)) > _REPEATS or re.search(r"\)[*+{]|\\\d|\(\?P", core):
        raise NotUsableError(f"-ot: a pattern that could take too long: {pattern[:40]}")
    try:
        return re.compile(core), device
    except (re.error, OverflowError, RecursionError):
        raise NotUsableError(f"-ot: no regular expression: {pattern[:40]}") from None


def listed_layers(listed: Mapping[str, str], spec: ModelSpec) -> Iterator[int]:
    """Yield the blocks whose experts a log lists as moved to the CPU."""
    blocks: dict[int, set[str]] = {}
    for name, where in listed.items():
        found = re.fullmatch(r"blk\.(\d{1,4})\.ffn_(\w+?)_exps\.(?:weight|bias|scale)", name)
        if found is None or not re.fullmatch(r"CPU(_\w+)?|\w+_Host", where):
            raise NotUsableError(f"-ot moves more than experts to the CPU: {name} to {where}")
        blocks.setdefault(int(found[1]), set()).add(found[2])
    for block, parts in blocks.items():
        if block not in spec.positions or (len(parts) < spec.n_mats and "gate_up" not in parts):
            raise NotUsableError(f"-ot moves only a part of the experts' matrices: of layer {block}")
        yield block


_FOLLOWS: Final = "ti|super|xtx|xt|max|pro|ultra|laptop|mobile|gre|ada|blackwell"
_NAMED: Final = re.compile(rf"\b([a-z]{{0,6}}\d[a-z0-9]*?)(ti|super|xtx|xt)?((?: (?:{_FOLLOWS})\b)*)(?= |$)")
_NO_NAME: Final = re.compile(
    r"v?\d\d?|\d+[gm]i?b|\d+(?:th|nd|rd|st|ghz)|sxm\d*|[iex]\d|(?:lp)?ddr\d\w*|pcie\d*|gfx\w+|navi\d+|0x\w+"
)
_CPUS: Final = re.compile(r"ryzen|xeon|epyc|threadripper|core i\d|ultra \d|apple|grace|gb10|celeron|pentium|\bi\d \d{4}")
_GPUS: Final = re.compile(r"rtx|gtx|geforce|radeon|\brx \d|\barc\b|quadro|tesla|instinct|apple|gb10|\b[avhlb]\d{1,3}\b|\bmi\d+")


def part_names(text: str) -> set[tuple[str, frozenset[str]]]:
    """Return the numbers of parts in a text, with the words behind them that make another part.

    >>> sorted(name for name, _ in part_names("NVIDIA GeForce RTX 4080, AMD Ryzen 9 7950X 16-Core Processor"))
    ['4080', '7950x']
    """
    found = (
        (name, frozenset([*more.split(), *([ending] if ending else [])])) for name, ending, more in _NAMED.findall(_plain(text))
    )
    return {(name, more) for name, more in found if not _NO_NAME.fullmatch(name) and (len(name) > 2 or name[0].isalpha())}


def _plain(text: str) -> str:
    text = re.sub(r"\((?:r|tm|c)\)|\d+-core|@.*?ghz", " ", text.lower())
    return " ".join(re.sub(r"[^a-z0-9]+", " ", text).split())


def check_names(fields: Mapping[str, Any], profile: HardwareProfile) -> None:
    """Refuse a row whose GPU or CPU is another than a profile names."""
    about = _plain(" ".join((*(profile.machine.get(key, "") for key in ("gpu", "cpu")), profile.description, profile.name)))
    aside = {"laptop", "mobile"} if re.search("laptop|mobile", about) else set()
    theirs = {(name, more - aside) for name, more in part_names(about)}
    for text, words in ((next(pairs(str(fields.get("gpu_info") or "")), ""), _GPUS), (str(fields.get("cpu_info") or ""), _CPUS)):
        own = {(name, more - aside) for name, more in part_names(text)}
        if own and not own & theirs and words.search(about) and "eng sample" not in text.lower():
            raise NotUsableError(f"another machine: {text} (the profile is {profile.name}; --any-machine takes it)")
