"""The answer of a result: which policy is best where, and by how much, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, log
from statistics import fmean
from typing import Any, Final

from moesim.core.units import NS_PER_S, digits
from moesim.experiment.report import Row, half_width, is_lossy, number, repeated
from moesim.experiment.runner import LEAST, MOST
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS, setting_in_words

TIE: Final = 1.02
"""A lead below this is none where there are no random repetitions to judge it by."""
_MANY: Final = 24  # settings; more are no bars
_LINES: Final = {"batch_size": "throughput", "prompt_tokens": "speed_by_context"}
_NAMED: Final = 3
"""Winners, values or policies that the sentence names."""


@dataclass(frozen=True)
class Merit:
    """A number by which policies are ranked, and its words."""

    key: str
    figure: str  # the kind that shows it
    best: str  # of the winner
    does: str  # of a policy alone
    unit: str
    ratio: str  # after "1.2 times"
    scale: float = 1.0
    less: bool = False  # whether less is better


MERITS: Final = (
    Merit("goodput_per_s", "goodput", "serves the most requests within the limits", "serves", "good requests/s", "as many as"),
    Merit(
        "e2e_p50_ns", "latency_by_load", "completes answers soonest", "takes", "s from request to end of answer (median)",
        "as fast as", 1 / NS_PER_S, less=True,
    ),
    Merit("decode_tokens_per_s", "decode_speed", "decodes fastest", "decodes", "tokens/s", "as fast as"),
    Merit("prefill_tokens_per_s", "prefill_speed", "reads prompts fastest", "reads", "prompt tokens/s", "as fast as"),
    Merit("hit_rate", "hit_rate", "finds most experts on the GPU", "finds", "% of lookups", "as many as", 100.0),
)  # fmt: skip
"""The first that a run has ranks all."""


@dataclass(frozen=True)
class Cell:
    """One setting: the mean of each policy, from the best down."""

    setting: Mapping[str, Any]
    values: Mapping[str, float]
    tied: Sequence[str]  # the best, and those that cannot be told apart from it
    lead: tuple[float, float, float]  # of the best over the next that is not tied: ratio, and its 95 % interval
    drawn: bool  # whether there are random repetitions
    waits: Mapping[str, float]  # median seconds to the first token, of served workloads
    overlaps: bool  # whether the best and the next reach each other's speed within the intervals of the machine's numbers

    @property
    def won(self) -> bool:
        return len(self.tied) == 1 < len(self.values)

    def value(self, name: str, merit: Merit) -> str:
        wait = f", first token after {digits(self.waits[name])} s" if name in self.waits and not merit.less else ""
        return f"{digits(self.values[name])} {merit.unit}{wait}"


@dataclass(frozen=True)
class Answer:
    """Who is best, where, and by how much; `best`: policy and setting -> whether it is best alone."""

    sentence: str
    below: str  # which policies were not ranked; may be empty
    figure: str  # kind that shows it; empty if none does
    best: Mapping[tuple[str, str], bool]


def setting_of(row: Row, *, several: bool) -> dict[str, Any]:
    """Return what policies have in common at a setting, of which random repetitions may be several."""
    kept = {name: row.get(name) for name in (*SETTINGS, *CACHE_SETTINGS) if not (several and name == "seed")}
    trace = str(row.get("trace"))
    return kept | ({"trace": trace.rpartition("-seed")[0]} if several and trace.startswith("synthetic-") else {})


def answer_of(rows: Sequence[Row]) -> Answer:
    """Find who wins, where random repetitions set policies apart, or without any a lead of 2 %."""
    done = [row for row in rows if not row.get("error")]
    merit = next((one for one in MERITS if any(number(row, one.key) is not None for row in done)), None)
    if merit is None:
        first = next((str(row["error"]) for row in rows if row.get("error")), "")
        failed = f"The run failed: {first}" if len(rows) == 1 else f"All {len(rows)} runs failed, the first: {first}"
        return Answer("No run has a speed." if done else failed.rstrip(".") + ".", "", "", {})
    known = [row for row in done if number(row, merit.key) is not None]
    ranked = [row for row in known if not _why_not(row)] or known
    apart = {str(row["policy"]): why for row in known if len(ranked) < len(known) and (why := _why_not(row))}
    groups: dict[str, list[Row]] = {}
    several = repeated(rows)
    for row in ranked:
        groups.setdefault(str(setting_of(row, several=several)), []).append(row)
    cells = {key: _cell(group, merit, several=several) for key, group in groups.items()}
    best = {(name, key): cell.won for key, cell in cells.items() if len(cell.values) > 1 for name in cell.tied}
    lines = [kind for name, kind in _LINES.items() if len(cells) > _MANY and name in _varied([*cells.values()])]
    figure = lines[0] if lines and merit.figure == "decode_speed" else merit.figure
    below = f"Not ranked: {', '.join(f'{name} ({why})' for name, why in apart.items())}." if apart else ""
    if n := sum(cell.won and cell.overlaps for cell in cells.values()):
        where = "" if len(cells) == 1 else f" in {n} of {len(cells)} settings"
        below = f"{below} Within the intervals of the machine's numbers the next policy may be as fast{where}.".strip()
    return Answer(_sentence(list(cells.values()), merit, ranked), below, figure, best)


def _why_not(row: Row) -> str:
    return "an oracle" if row.get("source_label") == "oracle" else "not exact" if is_lossy(row) else ""


def _cell(rows: Sequence[Row], merit: Merit, *, several: bool) -> Cell:
    draws: dict[str, dict[Any, list[float]]] = {}  # policy -> requests that were drawn -> values
    waits: dict[str, list[float]] = {}
    for row in rows:
        drawn = (row.get("trace"), row.get("requests_drawn") or row.get("repeat"))
        draws.setdefault(str(row["policy"]), {}).setdefault(drawn, []).append(number(row, merit.key, merit.scale) or 0.0)
        if (wait := number(row, "ttft_p50_ns", 1 / NS_PER_S)) is not None:
            waits.setdefault(str(row["policy"]), []).append(wait)
    means = {name: {draw: fmean(values) for draw, values in of.items()} for name, of in draws.items()}
    at = {name: fmean(of.values()) for name, of in means.items()}
    first, *others = sorted(at, key=lambda name: at[name] if merit.less else -at[name])
    leads = {name: _lead(*((means[name], means[first]) if merit.less else (means[first], means[name]))) for name in others}
    apart = [name for name in others if leads[name][1] > 1]
    tied = [first, *(name for name in others if name not in apart)]
    lead = leads[apart[0]] if apart else (1.0, 1.0, 1.0)
    setting = setting_of(rows[0], several=several)
    return Cell(
        setting, {name: at[name] for name in (first, *others)}, tied, lead, any(len(of) > 1 for of in means.values()),
        {name: fmean(values) for name, values in waits.items()}, bool(others) and merit.figure == "decode_speed"
        and min(_ends(rows, first, LEAST), default=inf) <= max(_ends(rows, (apart or others)[0], MOST), default=0.0),
    )  # fmt: skip


def _ends(rows: Sequence[Row], policy: str, key: str) -> list[float]:
    return [end for row in rows if row["policy"] == policy and (end := number(row, key)) is not None]


def _lead(more: Mapping[Any, float], less: Mapping[Any, float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios with its interval over the draws in common; a lead that shows nothing has 1 in it."""
    ratios = [more[draw] / less[draw] if less[draw] else inf if more[draw] else 1.0 for draw in more if draw in less]
    if inf in ratios or 0 in ratios:
        return (inf, inf, inf) if ratios and min(ratios) == inf else (inf, 1.0, inf)
    logs = [log(ratio) for ratio in ratios]
    mean = fmean(logs) if logs else 0.0
    if max(len(more), len(less)) == 1:
        return exp(mean), exp(mean) if exp(mean) >= TIE else 1.0, exp(mean)
    half = half_width(logs)
    return (exp(mean), 1.0, exp(mean)) if half is None else (exp(mean), exp(mean - half), exp(mean + half))


def _sentence(cells: Sequence[Cell], merit: Merit, rows: Sequence[Row]) -> str:
    first, *others = cells[0].values
    if len({str(row["policy"]) for row in rows}) == 1:
        if len(cells) == 1:
            return f"{first} {merit.does} {cells[0].value(first, merit)}."
        ends = [pick(cells, key=lambda cell: cell.values[first]) for pick in (min, max)]
        low, high = (f"{digits(end.values[first])} ({_where([end], cells)})" for end in ends)
        return f"{first} {merit.does} from {low} to {high} {merit.unit}."
    if len(cells) > 1:
        return f"{_and(_over(cells, merit))}."
    if cells[0].won:
        return f"{first} {merit.best}: {cells[0].value(first, merit)}, {_times(cells, merit, others[0])}."
    tied = [f"{name} ({cells[0].value(name, merit)})" for name in cells[0].tied]
    more = [f"{len(tied) - _NAMED} more"] if len(tied) > _NAMED else []
    return f"No policy is clearly ahead: {_and([*tied[:_NAMED], *more])} cannot be told apart, {_why(cells)}."


def _over(cells: Sequence[Cell], merit: Merit) -> list[str]:
    """Count the settings that each policy wins, and name them where that takes few words."""
    won: dict[str, list[Cell]] = {}
    for cell in cells:
        won.setdefault(cell.tied[0] if cell.won else "", []).append(cell)
    rest = won.pop("", [])
    parts: list[str] = []
    for name, of in sorted(won.items(), key=lambda one: -len(one[1]))[:_NAMED]:
        many = (
            f"all {len(cells)} settings" if len(of) == len(cells) else f"{len(of)}{'' if parts else f' of {len(cells)} settings'}"
        )
        seconds = {list(cell.values)[1] for cell in of}
        times = _times(of, merit, seconds.pop() if len(seconds) == 1 else "the second", short=bool(parts))
        about = ": ".join(word for word in (_where(of, cells), times) if word)
        parts.append(f"{name}{'' if parts else f' {merit.best}'} in {many} ({about})")
    parts += [f"{len(won) - _NAMED} more elsewhere"] if len(won) > _NAMED else []
    if tied := [cell for cell in rest if len(cell.values) > 1]:
        where = f" ({found})" if (found := _where(tied, cells)) and parts else ""
        among = (
            f"in {len(tied)}{where} no policy is clearly ahead"
            if parts
            else f"No policy is clearly ahead in {len(tied)} settings"
        )
        parts.append(f"{among}, {_why(tied)}")
    alone = len(rest) - len(tied)
    return [*parts, *([f"in {alone} only one policy ran"] if alone else [])]


def _times(cells: Sequence[Cell], merit: Merit, second: str, *, short: bool = False) -> str:
    """Write how many times better winners are than the next one; of one cell with its interval."""
    ratios = [cell.lead[0] for cell in cells if cell.lead[0] < inf]
    if not ratios:
        return f"{second} none"
    low, high = (digits(ratio, 4 if ratio < TIE else 3) for ratio in (min(ratios), max(ratios)))
    interval = f" (95 % interval {digits(cells[0].lead[1])} to {digits(cells[0].lead[2])})"
    shown = interval if len(cells) == 1 and cells[0].drawn and not short else ""
    return f"{low if low == high else f'{low} to {high}'} times{shown}{'' if short else f' {merit.ratio} {second}'}"


def _why(cells: Sequence[Cell]) -> str:
    drawn = any(cell.drawn for cell in cells)
    return "given the variation between random repetitions" if drawn else f"with less than {100 * (TIE - 1):.0f} % between them"


def _where(of: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Name the settings by which some differ from all others: one that suffices, or of few all that vary."""
    varied, differ = _varied(cells), _varied(of)
    for name in varied:
        mine = list(dict.fromkeys(cell.setting[name] for cell in of))
        if len(mine) <= _NAMED and not any(cell.setting[name] in mine for cell in cells if cell not in of):
            return _values(mine, name) if len(of) < len(cells) else ""
    if len(of) > _NAMED:
        return ""
    if len(differ) < 2:
        same = [setting_in_words(of[0].setting[name], name) for name in varied if name not in differ]
        return " with ".join([_values([cell.setting[name] for cell in of], name) for name in differ] + [_and(same)])
    return "; ".join(", ".join(setting_in_words(cell.setting[name], name) for name in varied) for cell in of)


def _varied(cells: Sequence[Cell]) -> list[str]:
    return [name for name in cells[0].setting if len({str(cell.setting[name]) for cell in cells}) > 1]


def _values(values: Sequence[Any], name: str) -> str:
    first, *rest = (setting_in_words(value, name) for value in values)
    word = first.removesuffix(str(values[0]))
    return _and([first, *(one.removeprefix(word) for one in rest)])


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
