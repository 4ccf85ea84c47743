"""Whether drafts pay: the speed of one setting without them, and with one draft more at a time."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from moesim.core.table import Format, render, render_records
from moesim.core.units import NS_PER_S, digits
from moesim.errors import ConfigError, WorkloadError
from moesim.experiment.config import parse_config
from moesim.experiment.report import cost_notes, split_notes
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import run_experiment
from moesim.metrics.frames import frame_bytes
from moesim.policies.registry import make_policy
from moesim.serving.drafts import MOST, Drafts, read_drafts
from moesim.trace.workload.spec import ANSWER, PROMPT

if TYPE_CHECKING:
    from moesim.studies.whatif.settings import Base, Setting

KNOB: Final = "drafts"
VALUES: Final = "3; 4 at 0.8; 2 at 0.7/0.43; 8 ngram at 0.6"
ACCEPT: Final = (0.70, 0.45, 0.33, 0.21)
"""Shares of windows by position if nobody says any: code, Qwen3.8-Flash-Next's head (ik_llama.cpp#2369); assumed of others."""
_USUAL: Final = 3  # drafts
_TOKENS: Final = 1_500  # of all answers, so that chance moves a ratio by about 2 %
_WRITTEN: Final = re.compile(r"(?:(\d{1,3})\s*)?(mtp|ngram)?\s*(?:at\s+([\d./]{1,400}))?")


@dataclass(frozen=True)
class Line:
    """One setting with so many drafts, under one policy; the numbers of several routings from low to high."""

    policy: str
    drafts: Drafts | None  # None: without
    ratios: tuple[float, ...]  # of its speed and that without drafts, by routing
    row: Mapping[str, Any]
    engine: str
    users: int
    error: str = ""

    @property
    def speed(self) -> float:
        """Tokens a second of each request that decodes."""
        return NS_PER_S / float(self.row["tpot_mean_ns"])

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def pays_from(self) -> float:
        """The share of drafts accepted if all before them are from which on they pay; inf: they never do."""
        assert self.drafts is not None
        proposed = self.drafts.proposed or (1.0,) * self.drafts.n
        cost = _tokens(self.drafts.accept, proposed) / self.ratio  # steps without drafts that a window takes

        def tokens(share: float) -> float:
            return _tokens([share ** (i + 1) for i in range(len(proposed))], proposed)

        if cost > tokens(1.0):
            return math.inf
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if tokens(middle) < cost else (low, middle)
        return high

    @property
    def chance(self) -> float:
        """Standard error of the ratio, as a share, from the windows in which drafts happen to be accepted."""
        assert self.drafts is not None
        reached = [a * p for a, p in zip(self.drafts.accept, self.drafts.proposed or (1.0,) * self.drafts.n, strict=True)]
        mean = sum(reached)
        spread = sum((2 * i + 1) * share for i, share in enumerate(reached)) - mean**2
        tokens = float(self.row["answer_tokens_per_s"]) * self.row["makespan_ns"] / NS_PER_S
        return math.sqrt(spread * (1 + mean) / tokens) / (1 + mean)

    @property
    def verdict(self) -> str:
        if min(self.ratios) > 1 + 2 * self.chance:
            return "yes"
        return "no" if max(self.ratios) < 1 - 2 * self.chance else "even"

    @property
    def typed(self) -> str:
        """What to give the engine, or here."""
        assert self.drafts is not None
        if self.engine == "llama.cpp" and self.drafts.by == "mtp":
            return f"--spec-type draft-mtp --spec-draft-n-max {self.drafts.n}"
        return "workload.drafts: " + _written(self.drafts)


def _tokens(accept: Sequence[float], proposed: Sequence[float]) -> float:
    """Tokens of a window on average."""
    return 1 + sum(a * p for a, p in zip(accept, proposed, strict=True))


def _written(drafts: Drafts) -> str:
    return json.dumps(mapping_of(drafts)).replace('"', "")


def mapping_of(drafts: Drafts) -> dict[str, Any]:
    """Write drafts as a workload has them."""
    found: dict[str, Any] = {"n": drafts.n, "by": drafts.by, "accept": [round(share, 4) for share in drafts.accept]}
    more = {"proposed": drafts.proposed and list(drafts.proposed), "draft_ms": drafts.draft_ms}
    return found | {key: value for key, value in more.items() if value is not None}


def read(setting: Setting, known: Mapping[str, Any] | None = None) -> list[Drafts]:
    """Return 1 to so many drafts, as written behind the knob and, where that says nothing, in the workload."""
    match = _WRITTEN.fullmatch(setting.text)
    if match is None:
        raise ConfigError(f"--vary {setting}: expected number, drafter and acceptance ({VALUES}), got '{setting.text}'")
    given = dict(known or {})
    most = int(match[1] or given.get("n") or _USUAL)
    if not 1 <= most <= MOST:
        raise ConfigError(f"--vary {setting}: expected 1 to {MOST} drafts, got {most}")
    if match[2]:
        given = {"by": match[2]} | {key: given[key] for key in ("accept", "proposed") if key in given}
    if match[3]:
        try:
            shares = [float(one) for one in match[3].split("/")]
        except ValueError:
            raise ConfigError(f"--vary {setting}: expected shares such as 0.8 or 0.7/0.43, got '{match[3]}'") from None
        given["accept"] = shares[0] if len(shares) == 1 else shares
    if "accept" not in given:
        if most > len(ACCEPT) or given.get("by", "mtp") != "mtp":
            raise ConfigError(f"--vary {setting}: expected an acceptance, got none; write '{setting.text} at 0.7'")
        given["accept"] = list(ACCEPT)
    try:
        return [read_drafts(given | {"n": n}, f"--vary {setting}") for n in range(1, most + 1)]
    except WorkloadError as error:
        raise ConfigError(str(error)) from None


def drafts_alone(variations: Sequence[tuple[Setting, ...]]) -> Setting | None:
    """Return how drafts are varied, None if they are not; ConfigError if other things are, too."""
    found = [one for together in variations for one in together if one.knob == KNOB]
    if found and (len(variations) > 1 or len(variations[0]) > 1):
        raise ConfigError("--vary drafts: expected nothing else that is varied, since its table has other columns; ask twice")
    return found[0] if found else None


def served(workload: Mapping[str, Any], scheduler: str = "llama-server") -> dict[str, Any]:
    """Ask for the requests of a workload as users who ask again; one that is served already stays as it is."""
    if workload.get("closed") or workload.get("arrivals"):
        return dict(workload)
    users, decode = workload["batch_size"], workload.get("decode_tokens")
    answer = ANSWER if decode is None else decode + 1
    return {
        "closed": users, "n_requests": max(2 * users, -(-_TOKENS // answer)) if users > 1 else -(-_TOKENS // answer),
        "prompt_tokens": workload.get("prompt_tokens") or PROMPT, "answer_tokens": answer, "seed": workload.get("seed", 0),
        "scheduler": {"name": scheduler, "parallel": users},
    }  # fmt: skip


def drafts(base: Base, setting: Setting, *, jobs: int | None = 1, progress: bool = False) -> list[Line]:
    """Run an experiment without drafts and with 1 to so many; one that fails with drafts is a line with an error."""
    workload = base.raw["workload"]
    known = workload.get("drafts")
    asked = read(setting, json.loads(known) if isinstance(known, str) else known)
    of_strata = all(one["name"] == "strata" for one in base.raw["policies"])
    own = served(workload, "strata" if of_strata else "llama-server")
    made_here = not (workload.get("closed") or workload.get("arrivals"))
    if of_strata and made_here and own["closed"] > 1:  # each slot has one draft
        own["scheduler"] |= {"batch_mtp": True}
        asked = asked[:1]
    raw = {**base.raw, "workload": own | {"drafts": [None, *(mapping_of(one) for one in asked)]}}
    experiment = Experiment(parse_config(raw, base.place), base.place)
    done = run_experiment(experiment, jobs=jobs, progress=progress, may_fail=True)
    rows: dict[tuple[str, str], list[Any]] = {}
    engines = {}
    for spec, outcome in zip(experiment.specs, done.outcomes, strict=True):
        engines[spec.policy_name] = getattr(make_policy(spec.point.policy), "engine", "")
        rows.setdefault((spec.policy_name, str(spec.workload.drafts)), []).append(outcome)
    lines: list[Line] = []
    for name, engine in engines.items():
        own_rows = [found for (policy, _), found in rows.items() if policy == name]
        plain = own_rows[0]
        for one, found in zip([None, *asked], own_rows, strict=True):
            failure = next((outcome.failure for outcome in found if outcome.failure is not None), None)
            if failure is not None and one is None:
                raise type(failure)(f"{base.place}: {name}: {failure}")
            if failure is not None:
                lines.append(Line(name, one, (), found[0].row, engine, own.get("closed") or 0, str(failure)))
                continue
            if not plain[0].row["tpot_mean_ns"]:
                raise ConfigError(
                    f"{base.place}: --vary drafts: expected answers of 2 tokens or more, got fewer; make them longer"
                )
            ratios = tuple(a.row["tpot_mean_ns"] / b.row["tpot_mean_ns"] for a, b in zip(plain, found, strict=True))
            lines.append(Line(name, one, ratios, found[0].row, engine, own.get("closed") or 0))
    return lines


def records(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Return one row for each number of drafts and policy."""
    found = []
    for one in lines:
        row: dict[str, Any] = {"policy": one.policy, "drafts": 0 if one.drafts is None else one.drafts.n}
        if not one.error:
            row |= {"tokens_per_s": one.speed, "ratio": one.ratio, "ratio_low": min(one.ratios), "ratio_high": max(one.ratios)}
        if one.drafts is not None:
            accept = " ".join(f"{share:g}" for share in mapping_of(one.drafts)["accept"])
            row |= {"by": one.drafts.by, "accept": accept, "typed": one.typed}
            if not one.error:
                row |= {"chance": one.chance, "pays": one.verdict, "pays_from": one.pays_from}
        found.append(row | {"source_label": one.row.get("source_label"), "error": one.error or None})
    return found


def table(lines: Sequence[Line], form: Format) -> str:
    """Write speeds and ratios, and what to type."""
    if form.for_programs:
        return render_records(records(lines), form)
    head = ["policy", "drafts", "tok/s", "ratio", "pays", "pays from", "label", "to type"]
    cells = [_cells(one) for one in lines]
    text = render(head, cells, form, [*head[1:4], head[5]])
    return text + "\n" + ("\n\n" if form is Format.MD else "\n").join(_notes(lines)) + "\n"


def _cells(one: Line) -> list[str]:
    n = "none" if one.drafts is None else str(one.drafts.n)
    if one.error:
        return [one.policy, n, "failed", "-", "-", "-", "-", "-"]
    label = str(one.row.get("source_label"))
    if one.drafts is None:
        return [one.policy, n, digits(one.speed), "", "", "", label, ""]
    low, high = min(one.ratios), max(one.ratios)
    spread = f" ({low:.2f} to {high:.2f})" if high - low >= 0.01 else ""
    least = "never" if one.pays_from == math.inf else f"{one.pays_from:.2f}"
    return [one.policy, n, digits(one.speed), f"x{one.ratio:.2f}{spread}", one.verdict, least, label, one.typed]


def _notes(lines: Sequence[Line]) -> list[str]:
    first, more = lines[0], [one for one in lines if one.drafts is not None]
    given = max((one.drafts for one in more if one.drafts is not None), key=lambda one: one.n)
    chance = max((2 * one.chance for one in more if not one.error), default=0.0)
    done = [one.row for one in lines if not one.error]
    kind = {"mtp": "a head of the model (it must have one)", "ngram": "copies of the text", "model": "a model of its own"}
    users = f"{first.users} user{'s' if first.users > 1 else ''}" if first.users else "requests that arrive"
    prompt, answer = (first.row.get(name) or "as asked" for name in ("prompt_tokens", "answer_tokens"))
    notes = [
        f"{first.row.get('model')} on {first.row.get('hardware')}, {users}, prompt {prompt}, answer {answer}; "
        "tok/s: of each while it decodes; simulated",
        f"drafts by {kind[given.by]}, windows that accept up to each position: {', '.join(f'{a:.2g}' for a in given.accept)}"
        + (" (assumed: published for one model)" if given.accept == ACCEPT[: given.n] else ""),
        f"pays: even if the ratio is within what chance of acceptance does (up to {100 * chance:.0f} %), or routing, of 1",
        "pays from: the share of drafts that must be accepted, if all before are; compare with what a server's log prints",
    ]
    if done:
        shared = dict.fromkeys(note for row in done for note in split_notes(row)[0])
        notes += [f"notes: {', '.join(shared)}"] * bool(shared) + cost_notes(done)
    return notes + [f"failed: {one.policy}, {_cells(one)[1]} drafts: {one.error}" for one in lines if one.error]


def files_of(lines: Sequence[Line]) -> dict[str, bytes]:
    """Return ``whatif.parquet`` and ``.csv``."""
    rows = records(lines)
    return {"whatif.parquet": frame_bytes(rows), "whatif.csv": render_records(rows, Format.CSV).encode()}
