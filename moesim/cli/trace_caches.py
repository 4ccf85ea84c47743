"""``moesim trace caches``: hit rates of policies' caches, without costs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moesim.cli.options import HitRate, Jobs, Printed, name_or_mapping, policy_list
from moesim.core.limits import COUNT, TOKENS
from moesim.core.table import Format, render, render_records
from moesim.core.text import say
from moesim.core.yaml_reader import read_yaml_value

_RATES = {"hit %": "hit_rate_decode", "warm %": "hit_rate_decode_warm"}


def trace_caches(
    trace: Annotated[str | None, typer.Argument(help="Name or path of a trace; default: routing for --model.")] = None,
    model: Annotated[str | None, typer.Option(help="As of moesim model.")] = None,
    hit_rate: HitRate = None,
    policies: Annotated[str, typer.Option(help="Names or name(option=value), separated by commas.")] = "lru,lfu,belady,static",
    slots: Annotated[str, typer.Option(help="Slots of a layer, or shares of its experts.")] = "12.5%,25%,37.5%,50%",
    batch: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Requests at once.")] = 1,
    requests: Annotated[
        int,
        typer.Option(min=1, max=COUNT.most, help="Batches, one after another, of the first requests; caches keep their content."),
    ] = 8,
    prompt: Annotated[int, typer.Option(min=0, max=TOKENS.most, help="Prompt tokens of each that is made up.")] = 0,
    decode: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Decode tokens of each that is made up.")] = 256,
    jobs: Jobs = None,
    form: Printed = Format.TABLE,
) -> None:
    """Count the hits of policies' caches: no machine, no costs. Hits are those of decoding.

    A policy whose cache depends on times has no rate here. For a model that nobody recorded, rates are those of the middle of
    three assumed lifts, with the range; --hit-rate narrows it.

    Example: moesim trace caches mini-mixtral --requests 2 --slots 25%,50% --policies lru,s3-fifo,belady
    """
    from moesim.experiment.report import at_lifts, range_of_lifts, uncertain_orders
    from moesim.model import load_model
    from moesim.studies.cache_rules import cache_rates

    place = "trace caches"
    found = cache_rates(
        policy_list(policies, f"{place}: --policies"),
        model=None if model is None else load_model(name_or_mapping(model, "--model"), f"{place}: --model"),
        trace=None if trace is None else name_or_mapping(trace, place), hit_rate=hit_rate,
        slots=read_yaml_value(f"[{slots}]", f"{place}: --slots"),
        batch=batch, requests=requests, prompt=prompt, decode=decode, jobs=jobs, progress=True,
    )  # fmt: skip
    say(found.routing)
    rows = []
    for row in found.rows:
        rates = {name: at_lifts(row, key, 100) for name, key in _RATES.items()}
        middle = {name: values[len(values) // 2] for name, values in rates.items()}
        size = {"policy": row["policy"], "slots": float(row["cache_slots"]) / found.n_layers}
        rows.append({**size, **middle, "over lifts": range_of_lifts(row, "hit_rate_decode_warm", 100)})
    if form.for_programs:
        sys.stdout.write(render_records(rows, form))
    else:
        names = [name for name in ("policy", "slots", *_RATES, "over lifts") if name != "over lifts" or found.assumed]
        cells = [
            [f"{row[name]:.1f}" if name in _RATES else f"{row[name]:g}" if name == "slots" else row[name] for name in names]
            for row in rows
        ]
        sys.stdout.write(render(names, cells, form, names[1:]))
    for line in [
        *uncertain_orders(found.rows, "hit_rate_decode_warm"),
        *(f"{name}: {why}" for name, why in found.refused.items()),
    ]:
        say(line)
