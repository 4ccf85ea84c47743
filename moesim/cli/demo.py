"""``moesim demo``: the smallest thing worth seeing, in a few seconds."""

from __future__ import annotations

import sys

from moesim.api.run import compare
from moesim.cli.outputs import show
from moesim.cli.runs import Notes, report_failures
from moesim.core.table import Format
from moesim.experiment.report import By, result_table

POLICIES = ("on-demand", "lru", "belady", "llama-cpp", "fiddler", "dali", "hybrimoe-paper")


def demo(notes: Notes = False) -> int:
    """Compare seven policies in a few seconds. Nothing is written.

    Example: moesim demo
    """
    show(
        "Mixtral-8x7B with 4-bit experts on one RTX 3090, whose memory has room for a\n"
        "quarter of them. The others stay in the host's memory: a policy copies them\n"
        "over PCIe, or lets the CPU compute them. The routing is that of a small model\n"
        "of the same shape.\n\n"
    )
    found = compare(list(POLICIES), cache=0.25, prompt=32, decode=16, trace="mini-mixtral", jobs=1)
    sys.stdout.write(result_table(found.rows, Format.TABLE, by=By.SPEED, notes=notes))
    show(
        "\nbelady knows the future and is no system. Your own question, and every policy:\n"
        "  moesim compare --policies lru,dali --cache 0.25,0.5 --batch 1,8\n"
        "  moesim list policies\n"
    )
    return report_failures(found)
