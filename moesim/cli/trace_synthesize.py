"""``moesim trace synthesize`` and ``fit``: synthetic traces, and their parameters."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moesim.api.outputs import all_or_none, check_out, note_written
from moesim.cli.options import Overwrite
from moesim.core.files import scratch_beside
from moesim.core.limits import COUNT, REPEATS, TOKENS
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.core.text import say
from moesim.errors import ConfigError
from moesim.trace import SUFFIX, Trace, find_trace
from moesim.trace.derived import subset

if TYPE_CHECKING:
    from moesim.trace.synthesis.figures import Targets
    from moesim.trace.synthesis.fit import Match
    from moesim.trace.synthesis.parameter_set import ParameterSet

_DEFAULT_BASE = "mixtral-8x7b"
_TWO_HALVES = 4  # requests, at least
_FRESH = 1000  # fresh seeds count from here, unless a fit used them


def synthesize(
    parameters: Annotated[
        str, typer.Option("--parameters", help="Parameter file: a path, or a shipped name such as mixtral-8x7b.")
    ],
    out: Annotated[Path, typer.Option(metavar="PATH", help="Where to write the trace.")],
    requests: Annotated[int, typer.Option(min=1, max=TOKENS.most, help="Requests.")] = 64,
    prompt: Annotated[int, typer.Option(min=0, max=TOKENS.most, help="Prompt tokens of each.")] = 64,
    decode: Annotated[int, typer.Option(min=0, max=TOKENS.most, help="Decoded tokens of each.")] = 128,
    seed: Annotated[int, typer.Option(min=0, max=COUNT.most, help="Of routers, topics and requests.")] = 0,
    signals: Annotated[
        int | None, typer.Option(min=0, max=TOKENS.most, help="Requests that carry signals; default: all.")
    ] = None,
    inputs: Annotated[int, typer.Option(min=0, max=TOKENS.most, help="Requests that carry the gate inputs.")] = 0,
    scores: Annotated[bool, typer.Option("--scores", help="Keep the softmax over all experts.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Make a synthetic trace from fitted parameters. It is labelled synthetic, and so is every result on it.

    Example: moesim trace synthesize --parameters mixtral-8x7b --requests 2 --prompt 8 --decode 8 --out synthetic.safetensors
    """
    from moesim.trace.synthesis import read_parameters  # SciPy takes most of a second to import
    from moesim.trace.synthesis import synthesize as make

    check_out(out, suffix=SUFFIX, overwrite=overwrite)
    for option, count in (("--signals", signals), ("--inputs", inputs)):
        if count is not None and count > requests:
            raise ConfigError(f"{option} {count}: expected at most the {requests} of --requests, got {count}; lower it")
    found = read_parameters(parameters)
    rows = requests * (prompt + decode)
    with scratch_beside(out) as folder, Progress(rows) as bar:
        bar.describe(f"synthesizing {found.model}")
        trace = make(
            found, n_requests=requests, n_prompt=prompt, n_decode=decode, seed=seed, n_signal_requests=signals,
            n_input_requests=inputs, scores=scores, folder=folder, progress=bar.advance,
        )  # fmt: skip
        trace.write(out)
    say(f"wrote {out}: {rows} tokens of {requests} synthetic requests of {found.model}")


def fit(
    targets: Annotated[str | None, typer.Option("--targets", help="File of target figures: a path, or a shipped name.")] = None,
    trace: Annotated[str | None, typer.Option("--trace", help="Trace to take the target figures from.")] = None,
    hold_out: Annotated[
        bool, typer.Option("--hold-out", help="With --trace: fit to every second request, and report on the others too.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Where to write the parameter file; default: printed, without a report.")
    ] = None,
    base: Annotated[str | None, typer.Option("--from", help="Parameter file to start from; what is not fitted stays.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=REPEATS.most, help="Seeds to fit on: 1, 2, ...")] = 2,
    fresh: Annotated[int, typer.Option(min=1, max=REPEATS.most, help="Other seeds, to report on.")] = 5,
    overwrite: Overwrite = False,
    only_report: Annotated[bool, typer.Option("--only-report", help="Only report on the parameters of --from.")] = False,
    form: Annotated[Format, typer.Option("-o", "--output-format", help="How to print the report.")] = Format.TABLE,
) -> None:
    """Fit parameters of synthetic traces to a model's figures. Report target, fit and error of each.

    Example: moesim trace fit --targets mixtral-8x7b --from mixtral-8x7b --only-report --fresh 1
    """
    from moesim.trace.synthesis import read_parameters  # SciPy takes most of a second to import
    from moesim.trace.synthesis.figures import read_targets
    from moesim.trace.synthesis.fit import fit as fit_parameters
    from moesim.trace.synthesis.fit import free_parameters, most_traces, report

    if (targets is None) == (trace is None):
        raise ConfigError("trace fit: expected either --targets or --trace, got both or neither; give one")
    if out is not None and only_report:
        raise ConfigError("trace fit: expected --out or --only-report, got both; leave one out")
    if hold_out and trace is None:
        raise ConfigError("trace fit: --hold-out: expected --trace, whose requests are divided, got --targets; leave it out")
    if out is not None:
        check_out(out, suffix=".yaml", overwrite=overwrite)
    wanted, others = (read_targets(targets), None) if targets is not None else _targets_of(str(trace), hold_out)
    start = read_parameters(base or wanted.base or _DEFAULT_BASE)
    if only_report:
        _check_shape(start, wanted)
        found = start
    else:
        say(f"fitting {', '.join(free_parameters(wanted))}")
        with Progress(most_traces(wanted, seeds), text="fitting") as bar:
            found = fit_parameters(start, wanted, range(1, seeds + 1), lambda tries, error: _tell(bar, tries, error))
        if out is None:
            sys.stdout.write(found.to_yaml())
            return
        with all_or_none(out):
            found.write(out)
            note_written([out], "trace fit")
        say(f"wrote {out}")
    _print(report(found, wanted, range(_FRESH + 1, _FRESH + fresh + 1), others), form)


def _targets_of(name: str, hold_out: bool) -> tuple[Targets, dict[str, float] | None]:
    """Measure targets on a trace, or on its even requests, with the odd ones' figures."""
    from moesim.trace.synthesis.figures import measure, targets_of

    trace = Trace.read(find_trace(name))
    if not hold_out:
        return targets_of(trace, name), None
    n = len(trace.requests.n_decode)
    if n < _TWO_HALVES:
        raise ConfigError(f"trace fit: --hold-out: expected at least {_TWO_HALVES} requests in {name}, got {n}; leave it out")
    wanted = targets_of(subset(trace, range(0, n, 2)), f"every second request of {name}")
    others = subset(trace, range(1, n, 2))
    return wanted, measure(others, [figure.name for figure in wanted.figures], separate=wanted.separate)


def _check_shape(parameters: ParameterSet, targets: Targets) -> None:
    for name in ("n_layers", "n_experts"):
        got, expected = getattr(parameters, name), targets.shape[name]
        if got != expected:
            raise ConfigError(f"--from {parameters.model}: expected {name} {expected} of the targets, got {got}; choose another")


def _tell(bar: Progress, tries: int, error: float) -> None:
    """Show how far a fit is; its end is the most that it may take."""
    bar.describe(f"{tries} synthetic traces, error {error:.2f} tolerances (root mean square)")
    bar.advance(tries - bar.done)


def _print(matches: Sequence[Match], form: Format) -> None:
    from moesim.trace.synthesis.fit import COLUMNS, HELD_OUT, RIGHT, SAMPLE, cells

    if form in (Format.JSON, Format.JSONL):
        records = [
            {"figure": m.figure.name, "source": m.figure.source, "ref": m.figure.ref, "target": m.figure.value, "fit": m.mean,
             "worst_error": m.worst, "tolerance": m.figure.tolerance, "fitted": m.figure.fitted, "met": m.met,
             "found": list(m.found), "sample": m.sample} | ({} if m.held_out is None else {"held_out": m.held_out})
            for m in matches
        ]  # fmt: skip
        sys.stdout.write(render_records(records, form))
    else:
        several, halved = any(m.sample for m in matches), any(m.held_out is not None for m in matches)
        columns = (SAMPLE if several else ()) + COLUMNS + (HELD_OUT if halved else ())
        sys.stdout.write(render(columns, cells(matches), form, RIGHT))
