"""``moesim run`` and ``moesim compare``: the same experiments, from a file or from options."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.api.result import Result
from moesim.api.run import comparison, executed, real_speeds
from moesim.cli.options import Engine, HitRate, Jobs, Set, Simulator, Verify, policy_list
from moesim.core.limits import REPEATS
from moesim.core.processes import usable_cores
from moesim.core.table import Format
from moesim.core.text import complain, say, shown_lines
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, InputError
from moesim.experiment import Results
from moesim.experiment.config import Config, load_config, parse_config
from moesim.experiment.folder import Output
from moesim.experiment.report import By, failure_lines, result_table
from moesim.experiment.resolve import Experiment
from moesim.experiment.run import describe_grid
from moesim.experiment.sweep import quick

Scheduler = Annotated[
    str | None, typer.Option("--scheduler", metavar="tcp://HOST:PORT", help="Run on the workers of a Dask scheduler.")
]
FailFast = Annotated[bool, typer.Option("--fail-fast", help="Stop at the first run that fails.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the grid, sizes and estimated time only.")]
As = Annotated[Format, typer.Option("-o", "--output-format", help="How to print the results.")]
Notes = Annotated[bool, typer.Option("--notes", help="All notes, not only the first five.")]
Wide = Annotated[bool, typer.Option("--wide", help="All columns, also beyond the terminal's width.")]


def _sort_key(text: str) -> By:
    """Read a column by its name, in words and any case."""
    known = {word.lower(): one for one in By for word in (one.value, one.name)}
    if text.lower() in known:
        return known[text.lower()]
    near = sorted(known, key=lambda word: -SequenceMatcher(None, text.lower(), word).ratio())
    columns = ", ".join(dict.fromkeys(known[word].value for word in near))
    raise ConfigError(f"--sort: expected a column to sort by, {columns}, got '{text}'; choose one of these")


Sort = Annotated[
    By | None,
    typer.Option("--sort", parser=_sort_key, metavar="|".join(By), help="Sort the rows, best first; speed is tok/s."),
]


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The experiment, or the name of a shipped one.")],
    overrides: Set = [],  # noqa: B006  (typer copies it)
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; default: results/NAME.")] = None,
    small: Annotated[bool, typer.Option("--quick", help="First setting of the sweep, at most 4 decode tokens.")] = False,
    dry: DryRun = False,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    fail_fast: FailFast = False,
    engine: Engine = None,
    simulator: Simulator = None,
    verify: Verify = None,
    form: As = Format.TABLE,
    wide: Wide = False,
    notes: Notes = False,
    sort: Sort = None,
) -> int:
    """Run an experiment file. Print a table and write a folder.

    Runs that the folder holds are not repeated: an interrupted or extended sweep goes on where it was.

    Example: moesim run experiments/quickstart.yaml --quick --out results/quick
    """
    costed = [] if engine is None else [f"engine={json.dumps(_engine(engine))}"]
    config = load_config(file, [*overrides, *costed])
    if small:
        config = quick(config, str(file), imports=not dry)
    folder = out or Path(config.output or f"results/{config.name or file.stem}")
    show = partial(result_table, form=form, wide=wide, by=sort, notes=notes)
    return _execute(config, str(file), folder, jobs, show, dry=dry, scheduler=scheduler, fail_fast=fail_fast or bool(verify))


def _engine(text: str | None) -> Any:
    """Read the option as a key of an experiment; a build such as 2025-03 is no number."""
    names = "own" if text is None else text.split(",")
    return names[0] if isinstance(names, list) and len(names) == 1 else names


def compare(
    policies: Annotated[str, typer.Option(help="NAME,NAME(option=value).")],
    model: Annotated[str, typer.Option(help="Name, or {base: NAME, field: value}.")] = "{base: mixtral-8x7b, expert_bits: 4}",
    hardware: Annotated[str, typer.Option(help="Name of a profile, or {base: NAME, key: value}.")] = "rtx3090-epyc7532",
    trace: Annotated[
        str | None,
        typer.Option(help="Name or path; default: the model's, or assumed."),
    ] = None,
    hit_rate: HitRate = None,
    cache: Annotated[str, typer.Option(help="Shares of experts on a GPU, or sizes: 0.1,25%,4GiB.")] = "0.25,0.5",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1",
    prompt: Annotated[str, typer.Option(help="Prompt tokens.")] = "64",
    decode: Annotated[str, typer.Option(help="Decode tokens.")] = "64",
    n_batches: Annotated[str, typer.Option(help="Batches, one after another.")] = "1",
    seed: Annotated[str, typer.Option(help="Seed of the choice of requests.")] = "0",
    transfer: Annotated[str, typer.Option(help="own (the policy's), pinned, pageable or chunked.")] = "own",
    overrides: Set = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; default: none.")] = None,
    repeat: Annotated[int, typer.Option(min=1, max=REPEATS.most, help="Seeds; the table has means and 95 % intervals.")] = 1,
    small: Annotated[bool, typer.Option("--quick", help="First setting of the sweep, at most 4 decode tokens.")] = False,
    dry: DryRun = False,
    jobs: Jobs = None,
    scheduler: Scheduler = None,
    fail_fast: FailFast = False,
    engine: Engine = None,
    simulator: Simulator = None,
    verify: Verify = None,
    form: As = Format.TABLE,
    wide: Wide = False,
    notes: Notes = False,
    sort: Sort = None,
) -> int:
    """Compare policies without a file. Values separated by commas are swept.

    Example: moesim compare --policies lru,dali,hybrimoe-paper --cache 0.125,0.25,12GiB --batch 1,8
    """
    with _options_named(overrides):
        raw = comparison(
            policy_list(policies, "compare: --policies"), model=_values("model", model),
            hardware=_values("hardware", hardware), trace=None if trace is None else _values("trace", trace), hit_rate=hit_rate,
            cache=read_yaml_value(f"[{cache}]", "compare: --cache"), batch=_values("batch_size", batch),
            prompt=_values("prompt_tokens", prompt), decode=_values("decode_tokens", decode),
            n_batches=_values("n_batches", n_batches), seed=_values("seed", seed),
            transfer=_values("transfer", transfer), engine=_engine(engine), repeat=repeat, overrides=overrides, imports=not dry,
        )  # fmt: skip
        config = parse_config(raw, "compare")
        if small:
            config = quick(config, "compare", imports=not dry)
        show = partial(result_table, form=form, wide=wide, by=sort, notes=notes)
        return _execute(config, "compare", out, jobs, show, dry=dry, scheduler=scheduler, fail_fast=fail_fast or bool(verify))


_OPTIONS = {
    "workload.batch_size": "batch", "workload.prompt_tokens": "prompt", "workload.decode_tokens": "decode",
    "workload.n_batches": "n-batches", "workload.seed": "seed", "cache.ratio": "cache", "cache.budget": "cache", "cache": "cache",
    "transfer.curve": "transfer", "engine": "engine",
} | {name: name for name in ("model", "hardware", "trace", "policies")}  # fmt: skip
"""Keys of an experiment, and the options of ``compare`` that say the same."""


@contextmanager
def _options_named(overrides: list[str]) -> Iterator[None]:
    """Name the option in an error about a key, unless ``--set`` gave the key."""
    try:
        yield
    except InputError as error:
        found = re.match(r"compare: ([a-z_.]+)(?:\[\d+\])*: ", str(error))
        option = _OPTIONS.get(found[1]) if found else None
        if found is None or option is None or any(one.partition("=")[0].startswith(found[1]) for one in overrides):
            raise
        raise type(error)(f"compare: --{option}: {str(error)[found.end() :]}") from None


def _values(option: str, text: str) -> Any:
    """Read ``"a,b"`` as a list to sweep, and ``"a"`` as one value."""
    values = read_yaml_value(f"[{text}]", f"compare: --{option}")
    return values[0] if len(values) == 1 else values


_Show = partial[str]


def _execute(
    config: Config, place: str, folder: Path | None, jobs: int | None, show: _Show, *, dry: bool, scheduler: str | None,
    fail_fast: bool,
) -> int:  # fmt: skip
    experiment = Experiment(config, place, imports=not dry)
    if dry:
        if folder is not None:
            Output(experiment, folder)  # what is wrong with the folder is said here, too
        sys.stdout.write(shown_lines(describe_grid(experiment, folder, jobs, usable_cores())))
        return 0

    def print_results(results: Results) -> None:
        sys.stdout.write(show(results.rows))
        if (show.keywords["wide"] or show.keywords["notes"]) and (ends := real_speeds(results.rows, experiment)):
            say(f"expect real decode speeds at {ends[0]:.2f} to {ends[1]:.2f} times these, with 90 % confidence")
        if results.n_found:
            say(f"{results.n_found} of {len(results.outcomes)} runs were in {folder} already")
        if not results.complete:
            say(f"stopped at the first failure: {len(results.outcomes)} of {len(experiment.specs)} runs done")

    results = executed(experiment, folder, jobs=jobs, scheduler=scheduler, fail_fast=fail_fast, show=print_results)
    if folder is not None and results.complete:
        say(f"wrote {folder}")
    return report_failures(results)


def report_failures(results: Results | Result) -> int:
    """Print a line for each failed run; return the exit code."""
    lines = failure_lines(results.rows)
    for line in lines:
        complain(f"moesim: {line}")
    return 1 if lines else 0
