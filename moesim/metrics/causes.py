"""The causes to which time is charged: one list for tables, plots and timelines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from moesim.records import TaskRecord, TransferRecord

CAUSES: Final = (
    "dense",
    "gpu_experts",
    "cpu_experts",
    "exposed_demand",
    "exposed_prefetch",
    "exposed_other_transfer",
    "decision",
    "activation",
    "predict",
    "idle",
)
"""All causes, in the order of every table and of the stacked bars."""

INDEX: Final = {name: i for i, name in enumerate(CAUSES)}
"""Column of each cause."""

_TRANSFER_CAUSE: Final = {"demand": "exposed_demand", "prefetch": "exposed_prefetch", "activation": "activation"}


def task_cause(task: TaskRecord, kinds: Mapping[str, str]) -> str:
    """Name the cause to which the time of a task is charged."""
    if task.kind == "predict":
        return "predict"
    if task.expert >= 0:
        return "gpu_experts" if kinds[task.device] == "gpu" else "cpu_experts"
    return "dense"


def transfer_cause(transfer: TransferRecord) -> str:
    """Name the cause to which waiting for a transfer is charged."""
    return exposed(transfer.cause)


def exposed(cause: str) -> str:
    """Name the cause to which waiting for transfers of a cause is charged."""
    return _TRANSFER_CAUSE.get(cause, "exposed_other_transfer")
