"""A comparison of engines as text for people, and as plain values for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from moesim.core.table import Format, render
from moesim.core.units import digits
from moesim.experiment.report import split_notes
from moesim.metrics.naming import NOT_VARIED
from moesim.studies.advice.candidates import PREFILL, Candidate, gib
from moesim.studies.advice.comparison import SAME_LEVEL, Comparison, Judged
from moesim.studies.advice.engines import commands, describe, engines
from moesim.studies.advice.search import SCREEN_TOKENS, speed
from moesim.studies.identify.model_error import LEVEL


def comparison_document(found: Comparison) -> dict[str, Any]:
    """Return a comparison as plain values, complete."""
    searched, limits = found.found, found.found.limits[found.best.candidate]
    return {
        "routing": {
            "name": found.routing.label, "origin": found.routing.origin, "groups": len(found.routing.groups),
            "why": found.routing.why, "others": [one.label for one in found.others],
        },
        "best": flat(found, found.best),
        "placements": [flat(found, one) for one in found.judged],
        "limit": {"largest": limits.limit, "shares": dict(limits.shares)},
        "curve": [
            {
                "placement": one.title, "policy": dict(one.policy), "gpu_experts": one.gpu_experts,
                "decode_tokens_per_s": speed(row), "decode_tokens": row["decode_tokens"],
                "ttft_s": float(row["ttft_mean_ns"]) / 1e9,
            }
            for one, row in searched.screened.items()
        ],
        "engines": [
            {
                "name": one.name, "checked": one.checked, "date": one.date, "expresses": list(one.expresses),
                "cannot": one.cannot, "unknown": one.unknown,
            }
            for one in engines()
        ],
        "left_out": searched.no_fit,
        "failed": searched.failed,
        "n_simulations": searched.n_simulations,
        "warnings": found.warnings,
    }  # fmt: skip


def flat(advice: Comparison, one: Judged) -> dict[str, Any]:
    """Return a finalist as one line of a table."""
    candidate = one.candidate
    return {
        "placement": candidate.title, "what": describe(candidate, advice.setting),
        "policy": json.dumps(dict(candidate.policy), sort_keys=True), "gpu_experts": candidate.gpu_experts,
        "gpu_bytes": candidate.gpu_bytes, "host_bytes": candidate.host_bytes,
        "decode_tokens_per_s": one.speed.value, "low": one.low, "high": one.high, "costs": list(one.costs),
        "requests_factor": one.speed.factor,
        "groups": one.speed.n, "ratio_to_best": one.ratio, "indistinguishable": one.same, "ttft_s": one.ttft_s,
        "gpu_share": one.gpu_share,
        "other_routing_ratio": one.crossed, "label": one.label,
        "notes": one.notes, "commands": [str(c) for c in one.commands],
        "conditions": [c.condition for c in one.commands],
    }  # fmt: skip


def rows_of(advice: Comparison) -> list[Mapping[str, Any]]:
    """List the rows of all finalists' runs, for a result folder."""
    runs: Sequence[Mapping[str, Any]] = [row for rows in advice.found.final.values() for row in rows]
    return [{**row, "run": number} for number, row in enumerate(runs)]


def sooner(advice: Comparison, shown: Candidate) -> list[tuple[Candidate, str]]:
    """Return the placement with prompts on the GPU, if its first token is sooner."""
    screened = advice.found.screened
    told = []
    for one in screened:
        if one.family.endswith(PREFILL) and one.policy["name"] == shown.policy["name"] and shown in screened:
            first, other = (float(screened[which]["ttft_mean_ns"]) / 1e9 for which in (one, shown))
            if "prefill_threshold" not in shown.policy and first < other:
                speeds = [digits(speed(screened[which])) for which in (one, shown)]
                times = [digits(value, 2) for value in (first, other)]
                words = f"first token {' instead of '.join(times)} s, {' instead of '.join(speeds)} tokens/s on the first request"
                told.append((one, f"{one.title}, prompts on the GPU: {words}"))
    return told


_BAR: Final = 40  # characters of the longest bar
_HEADINGS: Final = ("placement", "experts on GPU", "GPU", "RAM", "first token s", "tok/s", "interval", "x best")


def comparison_text(advice: Comparison, form: Format) -> str:
    """Write a comparison as plain text, or as Markdown."""
    mark = "## " if form is Format.MD else ""
    sections = [
        ("All engines", _question(advice, form)),
        ("Placements", _placements(advice, form)),
        ("What to type", _typed(advice, form)),
        ("Speed against experts on the GPU", _fenced(plot(advice), form)),
        ("How sure", _sure(advice)),
    ]
    return "\n".join(f"{mark}{name}\n\n{body}" for name, body in sections if body)


def _question(advice: Comparison, form: Format) -> str:
    setting, asked, routing = advice.setting, advice.setting.asked, advice.routing
    room = gib(setting.model.all_kv_bytes(setting.kv_tokens, setting.asked.batch))
    lines = [
        f"batch {asked.batch}, prompt {asked.prompt}, decode {asked.decode}; room for {setting.kv_tokens} tokens ({room})",
        f"routing: {routing.label}, {len(routing.groups)} x {asked.batch} requests"
        + (f" ({routing.why})" if routing.why else ""),
        f"{advice.found.n_simulations} simulations",
    ]
    if setting.vram_bytes > setting.profile_vram_bytes:
        lines.append(f"{setting.gpu} of the profile has {gib(setting.profile_vram_bytes)}: its speed with more is a what-if")
    return "".join(f"{_bullet(form)}{line}\n" for line in lines)


def _placements(advice: Comparison, form: Format) -> str:
    best = advice.best
    lines = [
        f"Best: {describe(best.candidate, advice.setting)}. Simulated: {digits(best.speed.value)} tokens/s while decoding. "
        f"Expect {digits(best.low)} to {digits(best.high)} ({100 * LEVEL:.0f} % interval, from earlier predictions that were "
        "measured)."
    ]
    if_so = {one.engine: f" (if {one.condition})" for one in best.commands if one.condition}
    able = [f"{one.name}{if_so.get(one.name, '')}" for one in engines() if best.candidate.family in one.expresses]
    lines.append(f"Engines that can place experts so: {', '.join(able)}.")
    limits = advice.found.limits[best.candidate]
    lines.append(f"Its time goes to: {limits.text(least=0.02, most=6)}.")
    lines.append("Ranked by the speed of decoding alone: the time to the first token may be many times as long as another's.")
    if same := [one.candidate.title for one in advice.judged if one.same]:
        lines.append(f"Not to be told from it (~) by these requests: {', '.join(same)}.")
    table = render(_HEADINGS, [_cells(one, advice) for one in advice.judged], form, _HEADINGS[1:])
    whys: dict[str, list[str]] = {}
    for name, why in advice.found.no_fit.items():
        whys.setdefault(why, []).append(name)
    left = [f"{', '.join(names)}: {why}" for why, names in whys.items()]
    slower, lost = _slower(advice), [f"left out: {'; '.join(left)}"] if left else []
    table += "\n" * (form is Format.MD) + "".join(f"{_bullet(form)}{line}\n" for line in [*slower, *lost])
    return "\n".join([*lines, "", table])


def _bullet(form: Format) -> str:
    """Mark a line, which would run into its neighbours in Markdown."""
    return "- " if form is Format.MD else ""


def _slower(advice: Comparison) -> list[str]:
    finalists, asked = {one.candidate.family for one in advice.judged}, advice.setting.asked.decode
    lines = []
    for caches, what in ((False, "fixed placements"), (True, "what fills the GPU by itself, caches from empty")):
        speeds = {
            one: speed(row)
            for one, row in advice.found.screened.items()
            if one.family not in finalists and (one.budget is not None) == caches
        }
        order = sorted(speeds, key=lambda one: (-speeds[one], one.title))
        best = {one.family: f"{one.title}: {digits(speeds[one])}" for one in reversed(order)}
        if told := ", ".join(best[name] for name in dict.fromkeys(one.family for one in order)):
            tokens = asked if caches else min(asked, SCREEN_TOKENS)
            lines.append(f"slower on {tokens} tokens of the first request, tokens/s ({what}): {told}")
    return lines


def _cells(one: Judged, advice: Comparison) -> list[str]:
    candidate, model = one.candidate, advice.setting.model
    share = candidate.gpu_experts / (model.n_layers * model.n_experts)
    begins_empty = candidate.slots and not candidate.gpu_experts
    held = f"0, cache of {candidate.slots}" if begins_empty else f"{candidate.gpu_experts} ({100 * share:.0f} %)"
    return [
        candidate.title, held, gib(candidate.gpu_bytes), gib(candidate.host_bytes),
        digits(one.ttft_s, 2), digits(one.speed.value), f"{digits(one.low)} to {digits(one.high)}",
        f"{one.ratio:.2f}" + ("~" if one.same else ""),
    ]  # fmt: skip


def _typed(advice: Comparison, form: Format) -> str:
    lines: list[str] = []
    setting = advice.setting
    for engine in engines():
        mine = [one for one in advice.judged if one.candidate.family in engine.expresses]
        head = f"{engine.name} ({engine.checked})"
        if mine:
            one, reached = mine[0].candidate, f"{digits(mine[0].speed.value)} tokens/s, x{mine[0].ratio:.2f} of that"
            everything = setting.model.n_layers * setting.model.n_experts
            best = mine[0] is advice.best or one.gpu_experts == advice.best.candidate.gpu_experts == everything
            place = "the best" if best else f"it cannot do the best ({engine.cannot}); its own best is {reached}"
        elif screened := [one for one in advice.found.screened if one.family in engine.expresses]:
            one = max(screened, key=lambda one: speed(advice.found.screened[one]))
            reached = digits(speed(advice.found.screened[one]))
            place = f"slower than the finalists; on the first request its best is {reached} tokens/s"
        else:
            missing = [advice.found.no_fit[name] for name in engine.expresses if name in advice.found.no_fit]
            lines.append(f"{head}: {'; '.join(dict.fromkeys([*missing, engine.cannot]))}")
            continue
        lines.append(f"{head}: {place}, {one.title}: {describe(one, setting)}")
        if engine.unknown:
            lines.append(f"  {engine.unknown}")
        for candidate, told in [(one, ""), *sooner(advice, one)]:
            lines += [f"  {told}"] if told else []
            for command in commands(candidate, setting):
                if command.engine == engine.name:
                    lines.append(_fenced(f"  {command}\n", form).rstrip("\n"))
                    lines += [f"  if {command.condition}"] if command.condition else []
                    lines += [f"  {command.remark}"] if command.remark else []
    separator = "\n\n" if form is Format.MD else "\n"
    return separator.join(lines) + "\n"


def plot(advice: Comparison) -> str:
    """Draw speed against experts on the GPU, of the best family and whole layers, in characters."""
    best = advice.best.candidate
    shown = dict.fromkeys([best.family, best.kind, "expert-layers"])
    screened = advice.found.screened
    chosen = [one for one in screened if one.family in shown and one.number is not None]
    if not chosen:
        return ""
    top = max(speed(screened[one]) for one in chosen)
    lines = []
    for family in shown:
        rows = sorted((one for one in chosen if one.family == family), key=lambda one: (one.gpu_experts, one.number))
        lines += [f"{family}"] if rows else []
        lines += [_bar(one, speed(screened[one]), top, one is best) for one in rows]
    tokens = screened[chosen[0]]["decode_tokens"]
    lines.append(f"tokens/s of the first request, {tokens} tokens decoded; < the best of all requests in full")
    return "\n".join(lines) + "\n"


def _bar(one: Candidate, value: float, top: float, best: bool) -> str:
    eighths = round(8 * _BAR * value / top)
    bar = "█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")
    return f"{one.gpu_experts:7d} {bar} {digits(value)}" + (" <" if best else "")


def _sure(advice: Comparison) -> str:
    best = advice.best
    low, high = best.costs
    lines = [
        f"expect the real speed of the best placement at {low:.2f} to {high:.2f} times the simulated one, with "
        f"{100 * LEVEL:.0f} % confidence: by how sure the profile's numbers are, and how far off public measurements were"
    ]
    if best.speed.n > 1:
        known = f"its mean speed is known to a factor of {best.speed.factor:.2f} (Student's t)"
        lines.append(f"requests differ: over {best.speed.n} groups {known}")
    if crossed := advice.found.crossed.get(best.candidate):
        each = ", ".join(f"x{ratio:.2f} ({one.label})" for ratio, one in zip(crossed, advice.others, strict=True))
        lines.append(f"on other routing the best placement is as fast times {each}")
    ratios = "x best: speed over the best one's; better known than speeds for placements that spend their time alike"
    lines.append(f"{ratios}; ~: differs from the best by no more than requests differ ({100 * SAME_LEVEL:.0f} %)")
    notes, of_costs = split_notes({"notes": best.notes})
    lines.append("; ".join([f"weakest source of its numbers: {best.label}", *notes]))
    lines += [_ranges(note) for note in of_costs]
    return "".join(f"- {line}\n" for line in [*lines, *advice.warnings])


def _ranges(note: str) -> str:
    """Explain which numbers are known within ranges only; other notes about costs stay."""
    if not note.startswith(NOT_VARIED):
        return note
    return (
        "the profile knows some numbers only within a range, and these speeds take one value of each: "
        f"{note.removeprefix(NOT_VARIED)}. How far each range moves the speed, 'moesim run DIR/best.yaml --set intervals=true' "
        "says, where DIR is the folder of --out"
    )


def _fenced(body: str, form: Format) -> str:
    return f"```\n{body}```\n" if form is Format.MD and body else body
