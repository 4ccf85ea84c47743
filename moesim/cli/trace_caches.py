"""``moesim trace caches``: hit rates of policies' caches, without costs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moesim.cli.options import HitRate, Jobs, Printed, name_or_mapping, policy_list
from moesim.core.limits import COUNT, TOKENS
from moesim.core.table import Format
from moesim.core.text import say
from moesim.core.yaml_reader import read_yaml_value

_PLACE = "trace caches"


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
    from moesim.api.caches import caches

    found = caches(
        None if trace is None else name_or_mapping(trace, _PLACE),
        model=None if model is None else name_or_mapping(model, "--model"), hit_rate=hit_rate,
        policies=policy_list(policies, f"{_PLACE}: --policies"), slots=read_yaml_value(f"[{slots}]", f"{_PLACE}: --slots"),
        batch=batch, requests=requests, prompt=prompt, decode=decode, jobs=jobs,
    )  # fmt: skip
    sys.stdout.write(found.text(form))
    for line in found.notes:
        say(line)
