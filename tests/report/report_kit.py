"""Result folders made by hand: rows, a timeline and a picture, without a simulation."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path
from typing import Any

import yaml

from moesim.metrics.frames import frame_bytes

SHA = "ab" * 32
POLICIES = ("lru", "dali", "daop")
STEP_US = 1000.0


def row(number: int, policy: str, **changes: Any) -> dict[str, Any]:
    """Give the row of a run that succeeded."""
    base: dict[str, Any] = {
        "run": number, "policy": policy, "policy_name": policy, "policy_options": "{}", "model": "mixtral-8x7b",
        "hardware": "rtx3090-epyc7532", "trace": "mini-mixtral", "cache_ratio": 0.25, "cache_budget_bytes": None, "batch_size": 1,
        "prompt_tokens": 64, "decode_tokens": 64, "n_batches": 1, "seed": 0, "cache_slots": 64, "cache_share": 0.25,
        "routing": "miniature", "source_label": "derived", "notes": "miniature", "error": None, "n_decode_tokens": 64,
        "n_generated_tokens": 65, "ttft_mean_ns": 250e6 + number, "tpot_mean_ns": 100e6, "prefill_tokens_per_s": 65.5,
        "decode_tokens_per_s": 10.0 + (7 * number) % 50, "hit_rate": 0.5, "hit_rate_decode": 0.25, "bytes_demand": 650_000_000,
        "bytes_prefetch_used": 0, "bytes_prefetch_wasted": 0, "bytes_update": 65_000_000, "bytes_write_back": 0,
        "bytes_message": 0, "bytes_activation": 0, "utilisation.gpu0": 0.5, "utilisation.cpu0": 0.25,
        "utilisation.cpu0->gpu0": 0.75, "pcie_share": 0.75, "fidelity_fresh": 1.0, "fidelity_fresh_decode": 1.0,
        "n_inexact_slots": 0, "energy_j_per_token": None,
    }  # fmt: skip
    return base | changes


def failed(number: int, policy: str, error: str, **changes: Any) -> dict[str, Any]:
    """Give the row of a run that failed: settings and the error, no metrics."""
    kept = list(row(0, "lru"))
    return {k: v for k, v in row(number, policy).items() if k in kept[: kept.index("source_label")]} | {"error": error} | changes


def rows_of(n: int) -> list[dict[str, Any]]:
    """Give rows of three policies at several batch sizes; those of the last policy are not exact."""
    rows = []
    for number in range(n):
        policy = POLICIES[number % 3]
        lossy = {"fidelity_fresh": 0.8, "fidelity_fresh_decode": 0.7519, "n_inexact_slots": 9} if policy == "daop" else {}
        rows.append(row(number, policy, batch_size=1 + number // 3, **lossy))
    return rows


def events_of(policies: tuple[str, ...] = POLICIES, n_steps: int = 3, per_step: int = 10) -> list[dict[str, Any]]:
    """Give trace events: of each policy steps, layers, a GPU and a link; a step takes a policy 1 ms times its number, from 1."""
    events: list[dict[str, Any]] = []
    for number, policy in enumerate(policies):
        pids = {name: 10 * number + i for i, name in enumerate(("devices", "links", "run"), start=1)}
        for name, pid in pids.items():
            shown = f"{policy}: {name}" if len(policies) > 1 else name
            events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": shown}})
        lanes = {"gpu0": ("devices", 1), "cpu0->gpu0": ("links", 2), "steps": ("run", 3), "layers": ("run", 4)}
        for name, (group, tid) in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pids[group], "tid": tid, "ts": 0, "args": {"name": name}})
        length = STEP_US * (number + 1)
        for step in range(n_steps):
            phase = "decode" if step else "prefill"
            args: dict[str, Any] = {"step": step, "phase": phase, "batch": 0, "tokens": 4, "sequences": 4}
            begin = step * length
            events.append(_slice(pids["run"], 3, begin, length, f"{phase} {step}", "step", args))
            for i in range(per_step):
                part = length / per_step
                at = begin + i * part
                args = {"step": step, "layer": i}
                events.append(_slice(pids["run"], 4, at, part, f"L{i}", "layer", args))
                args = {**args, "expert": i % 8, "cause": "demand", "bytes": 88_080_384, "submitted_us": at}
                events.append(
                    _slice(pids["links"], 2, at + 0.1 * part, 0.4 * part, f"demand L{i}/E{i % 8}", "exposed_demand", args)
                )
                args = {"step": step, "layer": i, "expert": i % 8, "rows": 3, "submitted_us": at}
                events.append(_slice(pids["devices"], 1, at + 0.5 * part, 0.4 * part, f"L{i}/E{i % 8}", "gpu_experts", args))
                arrow = {"name": "fetch", "cat": "fetch", "id": 10**6 * number + 1000 * step + i}
                events.append({"ph": "s", **arrow, "pid": pids["links"], "tid": 2, "ts": round(at + 0.5 * part - 0.001, 3)})
                events.append({"ph": "f", **arrow, "pid": pids["devices"], "tid": 1, "ts": round(at + 0.5 * part, 3), "bp": "e"})
    return events


def _slice(pid: int, tid: int, ts: float, dur: float, name: str, cat: str, args: dict[str, Any]) -> dict[str, Any]:
    place = {"pid": pid, "tid": tid, "ts": round(ts, 3), "dur": round(dur, 3)}
    return {"ph": "X", "name": name, "cat": cat, **place, "args": args}


def png(width: int = 4, height: int = 2) -> bytes:
    """Give a black picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\0" * width) * height)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def resolved(**changes: Any) -> dict[str, Any]:
    """Give a ``config.resolved.yaml``."""
    base: dict[str, Any] = {
        "moesim": "0.1.0",
        "key": "cd" * 32,
        "experiment": {"name": "made-by-hand", "description": "Three policies.", "timeline": {"policies": None, "steps": 3}},
        "inputs": {
            "models": {"mixtral-8x7b": {"sha256": SHA, "source": "made up"}},
            "hardware": {"rtx3090-epyc7532": {"sha256": "12" * 32, "labels": ["published", "derived"]}},
            "traces": {"mini-mixtral": {"sha256": "34" * 32, "label": "measured"}},
        },
        "versions": {"python": "3.11.0", "numpy": "2.0.0"},
    }
    return base | changes


def write_folder(
    path: Path,
    rows: list[dict[str, Any]],
    events: list[Any] | None = None,
    *,
    config: dict[str, Any] | None = None,
    pictures: tuple[str, ...] = ("decode_speed",),
) -> Path:
    """Write a result folder; with no pictures the report draws its own."""
    path.mkdir(parents=True)
    (path / "summary.json").write_text(json.dumps({"moesim": "0.1.0", "key": "cd" * 32, "runs": rows}))
    (path / "runs.parquet").write_bytes(frame_bytes(rows))
    (path / "config.resolved.yaml").write_text(yaml.safe_dump(config or resolved(), sort_keys=False))
    if events is not None:
        (path / "timeline.json").write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}))
    for name in pictures:
        (path / "plots").mkdir(exist_ok=True)
        (path / "plots" / f"{name}.png").write_bytes(png())
        (path / "plots" / f"{name}.csv").write_text("policy,decode_tokens_per_s\nlru,10.0\n")
        (path / "plots" / f"{name}.txt").write_text("Decode speed\nof all < three & policies.\n")
    return path
