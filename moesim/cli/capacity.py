"""``moesim capacity``: how many users, or requests a second, each policy serves within limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moesim.cli.options import Jobs, Printed, Set, name_or_mapping, policy_list
from moesim.cli.outputs import print_answer
from moesim.core.files import check_own_folder
from moesim.core.limits import REPEATS, RUN_NS, TOKENS
from moesim.core.table import Format
from moesim.core.units import NS_PER_S
from moesim.core.yaml_reader import read_yaml_value

SECONDS = RUN_NS / NS_PER_S


def capacity(
    policies: Annotated[str, typer.Option(help="NAME,NAME(option=value).")],
    model: Annotated[str, typer.Option(help="Name, or {base: NAME, field: value}.")],
    hardware: Annotated[str, typer.Option(help="Profile, or parts joined by +.")],
    scheduler: Annotated[str, typer.Option(help="Name, or {name: vllm, max_num_seqs: 8}.")] = "llama-server",
    prompt: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Tokens of each prompt.")] = 512,
    answer: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Tokens of each answer.")] = 128,
    ttft: Annotated[float, typer.Option(min=0, max=SECONDS, metavar="S", help="Most seconds to the first token.")] = 10.0,
    tpot: Annotated[
        float, typer.Option(min=0, max=SECONDS, metavar="S", help="Most seconds per token after it, on average.")
    ] = 0.5,
    e2e: Annotated[
        float | None,
        typer.Option(min=0, max=SECONDS, metavar="S", help="Most seconds of the whole request.", show_default="none"),
    ] = None,
    users: Annotated[bool, typer.Option("--users/--rate", help="Search for users, or for requests a second.")] = False,
    think: Annotated[
        float, typer.Option(min=0, max=SECONDS, metavar="S", help="Seconds that a user thinks before asking again.")
    ] = 0.0,
    share: Annotated[float, typer.Option(min=0, max=1, help="Share of all requests that must keep within all limits.")] = 0.9,
    seeds: Annotated[int, typer.Option(min=1, max=REPEATS.most, help="Runs of each load, for the 90 % interval.")] = 5,
    requests: Annotated[int, typer.Option(min=1, max=REPEATS.most, help="Requests of a run, at least.")] = 100,
    cache: Annotated[
        str | None,
        typer.Option(help="Share of experts cached on a GPU, or a size.", show_default="all of it"),
    ] = None,
    trace: Annotated[str | None, typer.Option(help="Name or path; default: the model's, or assumed.")] = None,
    overrides: Set = [],  # noqa: B006  (typer copies it)
    jobs: Jobs = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Folder for a CSV and the figure.")] = None,
    form: Printed = Format.TABLE,
) -> int:
    """Search the largest load that keeps within limits of time. Each policy is searched by itself.

    Load is requests a second that arrive at random, or users, each of whom asks again once the answer is there. Next to it stands
    how long requests wait at that load.

    Example: moesim capacity --model qwen3-30b-a3b --hardware rtx3090-epyc7532 --policies lru --users --answer 8 --seeds 2
    """
    if out is not None:
        check_own_folder(out, "capacity")
    from moesim.api.studies import capacity as search

    size = None if cache is None else read_yaml_value(cache, "capacity: --cache")
    found = search(
        policy_list(policies, "capacity: --policies"), model=name_or_mapping(model, "capacity: --model"),
        hardware=name_or_mapping(hardware, "capacity: --hardware"), scheduler=name_or_mapping(scheduler, "capacity: --scheduler"),
        prompt=prompt, answer=answer, ttft=ttft, tpot=tpot, e2e=e2e, users=users, think=think, share=share, seeds=seeds,
        requests=requests, cache=size, trace=trace, overrides=overrides, jobs=jobs,
    )  # fmt: skip
    return print_answer(found, form, out, "capacity")
