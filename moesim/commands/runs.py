"""``moesim run`` and ``moesim compare``: the same experiments, from a file or from options."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from moesim.errors import ConfigError
from moesim.experiment import Results, run_experiment
from moesim.experiment.config import Config, apply_override, load_config, parse_config
from moesim.experiment.output import Output
from moesim.experiment.quick import quick
from moesim.experiment.report import result_table
from moesim.experiment.resolve import Experiment
from moesim.table import Format
from moesim.yaml_reader import read_yaml_value

Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, such as cache.ratio=0.5; the value is YAML."),
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", min=1, help="Processes.")]
As = Annotated[Format, typer.Option("-o", "--output-format", help="How to print the results.")]


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE.yaml", help="The experiment.")],
    overrides: Set = [],  # noqa: B006  (typer copies it)
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; default: results/NAME.")] = None,
    small: Annotated[bool, typer.Option("--quick", help="First value of each sweep and at most 4 decode tokens.")] = False,
    jobs: Jobs = 1,
    form: As = Format.TABLE,
) -> int:
    """Run an experiment file, print a table and write the results into a folder."""
    config = load_config(file, overrides)
    if small:
        config = quick(config, str(file))
    folder = out or Path(config.output or f"results/{config.name or file.stem}")
    return _execute(config, str(file), folder, jobs, form)


def compare(
    policies: Annotated[str, typer.Option(help="Names, or {name: ..., option: ...}, separated by commas.")],
    model: Annotated[str, typer.Option(help="Name, or {base: NAME, field: value}.")] = "{base: mixtral-8x7b, expert_bits: 4.5}",
    hardware: Annotated[str, typer.Option(help="Name of a profile, or {base: NAME, key: value}.")] = "rtx3090-epyc7532",
    trace: Annotated[str, typer.Option(help="Name or path of a trace.")] = "mini-mixtral",
    cache: Annotated[str | None, typer.Option(help="Shares of all experts that a GPU caches. [default: 0.25,0.5]")] = None,
    budget: Annotated[str | None, typer.Option(help="Instead of --cache: memory of a GPU, such as '12 GiB'.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1",
    prompt: Annotated[str, typer.Option(help="Prompt tokens.")] = "64",
    decode: Annotated[str, typer.Option(help="Decode tokens.")] = "64",
    n_batches: Annotated[str, typer.Option(help="Batches, one after another.")] = "1",
    seed: Annotated[str, typer.Option(help="Seed of the choice of requests.")] = "0",
    transfer: Annotated[str, typer.Option(help="pinned, pageable or chunked.")] = "pinned",
    overrides: Set = [],  # noqa: B006
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write; default: nothing is written.")] = None,
    jobs: Jobs = 1,
    form: As = Format.TABLE,
) -> int:
    """Compare policies without a file; lists separated by commas are swept."""
    if cache is not None and budget is not None:
        raise ConfigError("compare: expected either --cache or --budget, got both")
    memory = {"budget": _values("budget", budget)} if budget else {"ratio": _values("cache", cache or "0.25,0.5")}
    workload = {
        "batch_size": batch,
        "prompt_tokens": prompt,
        "decode_tokens": decode,
        "n_batches": n_batches,
        "seed": seed,
    }
    raw: dict[str, Any] = {
        "model": _values("model", model),
        "hardware": _values("hardware", hardware),
        "trace": _values("trace", trace),
        "workload": {key: _values(key, text) for key, text in workload.items()},
        "cache": memory,
        "policies": read_yaml_value(f"[{policies}]", "compare: --policies"),
        "transfer": {"curve": _values("transfer", transfer)},
    }
    for override in overrides:
        apply_override(raw, override)
    return _execute(parse_config(raw, "compare"), "compare", out, jobs, form)


def _values(option: str, text: str) -> Any:
    """Read ``"a,b"`` as a list to sweep, and ``"a"`` as one value."""
    values = read_yaml_value(f"[{text}]", f"compare: --{option}")
    return values[0] if len(values) == 1 else values


def _execute(config: Config, place: str, folder: Path | None, jobs: int, form: Format) -> int:
    experiment = Experiment(config, place)
    output = Output(experiment, folder) if folder is not None else None
    results = run_experiment(
        experiment,
        jobs=jobs,
        keep=(lambda index: index in output.kept) if output else (lambda index: False),
        progress=True,
    )
    sys.stdout.write(result_table(results.rows, form))
    if output is not None:
        output.write(results)
        print(f"wrote {output.folder}", file=sys.stderr)
    return report_failures(results)


def report_failures(results: Results) -> int:
    """Print a line for each run that failed, and give the exit code."""
    for line in results.failures:
        print(f"moesim: {line}", file=sys.stderr)
    return 1 if results.failures else 0
