"""The table of docs/guide/synthesis.md: what was measured on each model, and what its synthetic traces have.

``python -m tests.docs.synthesis_kit`` writes it anew, from the reports of ``moesim trace fit --targets NAME --only-report``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from moesim.trace.synthesis import read_parameters
from moesim.trace.synthesis.figures import read_targets
from moesim.trace.synthesis.fit import Match, report

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "synthesis.md"
MODELS = {
    "mixtral-8x7b": "Mixtral-8x7B (8, 2)", "qwen2-57b-a14b": "Qwen2-57B-A14B (64, 8)",
    "deepseek-v2-lite": "DeepSeek-V2-Lite (64, 6)", "olmoe-1b-7b": "OLMoE-1B-7B (64, 8)",
    "gpt-oss-20b": "gpt-oss-20b (32, 4)", "qwen3-30b-a3b": "Qwen3-30B-A3B (128, 8)",
}  # fmt: skip
STUDY = "over four kinds of text"  # what the source of the samples of the study of caches says
SEEDS = (1001, 1002)
_EIGHTHS = {name: (25, 37.5, 50) if name == "mixtral-8x7b" else (12.5, 25, 37.5) for name in MODELS}
#: Question -> figures, and whether they are of the study of caches. SHARE stands for each of three shares of the experts.
QUESTIONS: dict[str, tuple[list[str], bool]] = {
    "LRU hits, three sizes": (["lru@SHARE"], True),
    "Belady hits, three sizes": (["belady@SHARE"], True),
    "experts of a batch of 2, 4, 8, 16": ([f"distinct@{n}" for n in (2, 4, 8, 16)], False),
    "static set, three sizes": (["static@SHARE"], True),
    "set changes in 1,000 tokens": (["drift1000@SHARE"], True),
}


def reports(name: str) -> list[tuple[bool, Match]]:
    """Compare a shipped set with its targets on fresh seeds; whether each figure is of the study of caches."""
    targets = read_targets(name)
    of_study = {sample.name: STUDY in sample.source for sample in targets.samples}
    return [(of_study[match.sample], match) for match in report(read_parameters(name), targets, SEEDS)]


def cell(name: str, figures: Iterable[str], study: bool, found: list[tuple[bool, Match]]) -> str:
    """Write the measured values and the made ones; those out of tolerance are bold."""
    wanted = [f.replace("SHARE", f"{share:g}") for f in figures for share in (_EIGHTHS[name] if "SHARE" in f else (0,))]
    chosen = [match for of_study, match in found if of_study == study]
    by_name = {match.figure.name: match for match in sorted(chosen, key=lambda match: match.figure.fitted)}  # fitted ones win
    matches = [by_name[figure] for figure in wanted if figure in by_name]
    if not matches:
        return ""
    measured = "/".join(_number(match, match.figure.value) for match in matches)
    made = "/".join(f"**{_number(m, m.mean)}**" if abs(m.error) > m.figure.tolerance else _number(m, m.mean) for m in matches)
    return f"{measured} → {made}"


def _number(match: Match, value: float) -> str:
    if match.figure.name.startswith(("window", "distinct")):
        return f"{value:.1f}"
    return f"{100 * value:.1f}" if match.figure.name.endswith(":requests") else f"{100 * value:.0f}"


def table(found: dict[str, list[tuple[bool, Match]]]) -> str:
    """Make the table of all shipped sets from their reports."""
    lines = ["| | " + " | ".join(MODELS.values()) + " |", "|---" * (1 + len(MODELS)) + "|"]
    for question, (figures, study) in QUESTIONS.items():
        lines.append("| " + " | ".join([question, *(cell(name, figures, study, found[name]) for name in MODELS)]) + " |")
    return "\n".join(lines)


def with_table(page: str, made: str) -> str:
    """Put the table into the page."""
    new, n = re.subn(r"(?m)^\| \| Mixtral-8x7B .*\n(\|.*\n)+", made.replace("\\", r"\\") + "\n", page)
    assert n == 1, "no table in the page"
    return new


if __name__ == "__main__":
    PAGE.write_text(
        with_table(PAGE.read_text(encoding="utf-8"), table({name: reports(name) for name in MODELS})), encoding="utf-8"
    )
