"""The answer of a result: which policy is best where, and by how much, in one sentence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Any, Final

from moesim.core.units import NS_PER_S, digits
from moesim.experiment.report import Row, half_width, is_lossy, number, repeated
from moesim.metrics.naming import CACHE_SETTINGS, SETTINGS, setting_in_words

TIE: Final = 1.02
"""A lead below this is none where there are no random repetitions to judge it by."""
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
    Merit("hit_rate", "hit_rate", "finds most experts on the GPU", "finds", "% of experts on the GPU", "as many as", 100.0),
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

    @property
    def won(self) -> bool:
        return len(self.tied) == 1 < len(self.values)


@dataclass(frozen=True)
class Answer:
    """Who is best, where, and by how much; `best`: policy and setting -> whether it is best alone."""

    sentence: str
    below: str  # which policies were not ranked; may be empty
    merit: Merit | None
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
        return Answer("No run has a speed." if done else failed.rstrip(".") + ".", "", None, {})
    known = [row for row in done if number(row, merit.key) is not None]
    why = {"oracle": [row for row in known if row.get("source_label") == "oracle"], "not exact": [*filter(is_lossy, known)]}
    ranked = [row for row in known if not any(row in some for some in why.values())] or known
    apart = {str(row["policy"]): word for word, some in why.items() for row in some if row not in ranked}
    groups: dict[str, list[Row]] = {}
    several = repeated(rows)
    for row in ranked:
        groups.setdefault(str(setting_of(row, several=several)), []).append(row)
    cells = {key: _cell(group, merit, several=several) for key, group in groups.items()}
    best = {(name, key): cell.won for key, cell in cells.items() if len(cell.values) > 1 for name in cell.tied}
    below = f"Not ranked: {', '.join(f'{name} ({word})' for name, word in apart.items())}." if apart else ""
    return Answer(_sentence(list(cells.values()), merit, ranked), below, merit, best)


def _cell(rows: Sequence[Row], merit: Merit, *, several: bool) -> Cell:
    draws: dict[str, dict[Any, list[float]]] = {}  # policy -> requests that were drawn -> values
    for row in rows:
        drawn = (row.get("trace"), row.get("requests_drawn") or row.get("repeat"))
        draws.setdefault(str(row["policy"]), {}).setdefault(drawn, []).append(number(row, merit.key, merit.scale) or 0.0)
    means = {name: {draw: fmean(values) for draw, values in of.items()} for name, of in draws.items()}
    at = {name: fmean(of.values()) for name, of in means.items()}
    first, *others = sorted(at, key=lambda name: at[name] if merit.less else -at[name])
    leads = {name: _lead(*((means[name], means[first]) if merit.less else (means[first], means[name]))) for name in others}
    apart = [name for name in others if leads[name][1] > 1]
    tied = [first, *(name for name in others if name not in apart)]
    lead = leads[apart[0]] if apart else (1.0, 1.0, 1.0)
    setting = setting_of(rows[0], several=several)
    return Cell(setting, {name: at[name] for name in (first, *others)}, tied, lead, any(len(of) > 1 for of in means.values()))


def _lead(more: Mapping[Any, float], less: Mapping[Any, float]) -> tuple[float, float, float]:
    """Return a ratio with its interval over the draws in common; a lead that shows nothing has 1 in it."""
    ratios = [more[draw] / less[draw] if less[draw] else inf if more[draw] else 1.0 for draw in more if draw in less]
    ratio = fmean(ratios) if ratios else 1.0
    if inf in ratios:
        return (inf, inf, inf) if min(ratios) == inf else (inf, 1.0, inf)
    if max(len(more), len(less)) == 1:
        return ratio, ratio if ratio >= TIE else 1.0, ratio
    half = half_width(ratios)
    return (ratio, 1.0, ratio) if half is None else (ratio, ratio - half, ratio + half)


def _sentence(cells: Sequence[Cell], merit: Merit, rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(str(row["policy"]) for row in rows))
    if len(names) == 1:
        return _alone(names[0], cells, merit)
    if len(cells) > 1:
        return _over(cells, merit)
    (cell,) = cells
    if not cell.won:
        return f"No policy is clearly ahead: {_tied(cell, merit)}, {_why(cells)}."
    first, second, *_ = cell.values
    tokens = [value for row in rows if row["policy"] == first and (value := number(row, "ttft_p50_ns", 1 / NS_PER_S)) is not None]
    wait = f", with the first token after {digits(fmean(tokens), 3)} s (median)" if tokens and not merit.less else ""
    return f"{first} {merit.best}: {digits(cell.values[first])} {merit.unit}{wait}, {_times(cells, merit)} {second}."


def _alone(name: str, cells: Sequence[Cell], merit: Merit) -> str:
    if len(cells) == 1:
        return f"{name} {merit.does} {digits(cells[0].values[name])} {merit.unit}."
    ends = [pick(cells, key=lambda cell: cell.values[name]) for pick in (min, max)]
    low, high = (f"{digits(end.values[name])} ({_where([end], cells)})" for end in ends)
    return f"{name} {merit.does} from {low} to {high} {merit.unit}, over {len(cells)} settings."


def _over(cells: Sequence[Cell], merit: Merit) -> str:
    """Count the settings that each policy wins, and name them where that takes few words."""
    won: dict[str, list[Cell]] = {}
    for cell in cells:
        won.setdefault(cell.tied[0] if cell.won else "", []).append(cell)
    none = won.pop("", [])
    alone, tied = ([cell for cell in none if (len(cell.values) == 1) == one] for one in (True, False))
    parts = []
    for name, of in sorted(won.items(), key=lambda one: -len(one[1])):
        if len(parts) == _NAMED:
            parts.append(f"{len(won) - _NAMED} other{'s' if len(won) - _NAMED > 1 else ''} elsewhere")
            break
        many = f"all {len(cells)}" if len(of) == len(cells) else f"{len(of)} of {len(cells)}" if not parts else f"{len(of)}"
        seconds = {list(cell.values)[1] for cell in of}
        second = seconds.pop() if len(seconds) == 1 else "the second"
        words = "" if parts else f" {merit.best}"
        times = f"{_times(of, merit)} {second}" if not parts else _times(of)
        parts.append(f"{name}{words} in {many}{'' if parts else ' settings'} ({_place(of, cells)}{times})")
    if tied:
        where = _place(tied, cells, ", ").removesuffix(", ")
        where = f" ({where})" if where and parts else ""
        many = f"in {len(tied)}{where} no policy" if parts else f"No policy is clearly ahead in any of {len(tied)} settings"
        parts.append(f"{many}{' is clearly ahead' if parts else ''}, {_why(tied)}")
    parts += [f"in {len(alone)} only one policy ran"] if alone else []
    return f"{_and(parts)}."


def _times(cells: Sequence[Cell], merit: Merit | None = None) -> str:
    """Write how many times better winners are than the next one; of one cell with its interval."""
    ratios = [cell.lead[0] for cell in cells]
    low, high = (digits(ratio, 4 if 1 < ratio < TIE else 3) if ratio < inf else "more" for ratio in (min(ratios), max(ratios)))
    one = cells[0] if len(cells) == 1 and cells[0].drawn and merit else None
    ends = f" (95 % interval {digits(one.lead[1])} to {digits(one.lead[2])})" if one and one.lead[2] < inf else ""
    times = "infinitely many" if low == "more" else low if low == high else f"{low} to {high}"
    return f"{times} times{ends}{f' {merit.ratio}' if merit else ''}"


def _tied(cell: Cell, merit: Merit) -> str:
    shown = [f"{name} ({digits(cell.values[name])} {merit.unit})" for name in cell.tied[:_NAMED]]
    rest = len(cell.tied) - len(shown)
    return f"{_and([*shown, *([f'{rest} more'] if rest else [])])} cannot be told apart"


def _why(cells: Sequence[Cell]) -> str:
    drawn = any(cell.drawn for cell in cells)
    return "given the variation between random repetitions" if drawn else f"with less than {100 * (TIE - 1):.0f} % between them"


def _place(of: Sequence[Cell], cells: Sequence[Cell], end: str = ": ") -> str:
    where = _where(of, cells) if len(of) < len(cells) else ""
    return f"{where}{end}" if where else ""


def _where(of: Sequence[Cell], cells: Sequence[Cell]) -> str:
    """Name the settings by which some differ from all others: one that suffices, or of few all that vary."""
    varied = [name for name in cells[0].setting if len({str(cell.setting[name]) for cell in cells}) > 1]
    others = [cell for cell in cells if cell not in of]
    for name in varied:
        mine = list(dict.fromkeys(cell.setting[name] for cell in of))
        if len(mine) <= _NAMED and not any(cell.setting[name] in mine for cell in others):
            first, *rest = (setting_in_words(value, name) for value in mine)
            word = first.removesuffix(str(mine[0]))
            return _and([first, *(one.removeprefix(word) for one in rest)])
    if len(of) > _NAMED:
        return ""
    return "; ".join(", ".join(setting_in_words(cell.setting[name], name) for name in varied) for cell in of)


def _and(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
