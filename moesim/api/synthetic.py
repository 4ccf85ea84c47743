"""Synthetic traces from Python, and their parameters."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.api.arguments import checked
from moesim.api.outputs import all_or_none, check_out, note_written
from moesim.api.result import Answer
from moesim.api.traces import WrittenTrace, read_named
from moesim.core.files import OutputFolder, scratch_beside
from moesim.core.progress import Progress
from moesim.core.table import Format, render, render_records
from moesim.core.text import note
from moesim.errors import ConfigError
from moesim.trace import SUFFIX, Trace
from moesim.trace.derived import subset

if TYPE_CHECKING:
    from moesim.trace.synthesis.figures import Targets
    from moesim.trace.synthesis.fit import Match
    from moesim.trace.synthesis.parameter_set import ParameterSet

_DEFAULT_BASE = "mixtral-8x7b"
_TWO_HALVES = 4  # requests, at least
_FRESH = 1000  # fresh seeds count from here, unless a fit used them


@checked(
    "trace.synthesize", parameters="path", requests="count", prompt="whole", decode="whole", seed="whole", signals="whole",
    inputs="whole",
)  # fmt: skip
def synthesize(
    parameters: str | Path, out: str | Path, *, requests: int = 64, prompt: int = 64, decode: int = 128, seed: int = 0,
    signals: int | None = None, inputs: int = 0, scores: bool = False, overwrite: bool = False, progress: bool = True,
) -> WrittenTrace:  # fmt: skip
    """Make a synthetic trace from fitted parameters. It is labelled synthetic, and so is every result on it.

    Parameters
    ----------
    parameters : str or Path
        A shipped file by name, such as ``"mixtral-8x7b"``, or a path.
    out : str or Path
        The trace to write, ``NAME.safetensors``.
    requests : int
        Requests.
    prompt, decode : int
        Tokens of each.
    seed : int
        Of routers, topics and requests.
    signals : int, optional
        Requests that carry signals; default: all.
    inputs : int
        Requests that carry the gate inputs.
    scores : bool
        Keep the softmax over all experts.
    overwrite : bool
        Replace a trace that is there.
    progress : bool
        Show a bar.

    Returns
    -------
    WrittenTrace
        ``trace``, ``paths`` and ``text()``.

    Raises
    ------
    InputError
        If the parameters are wrong, or a file is at `out`.
    """
    from moesim.trace.synthesis import read_parameters  # SciPy takes most of a second to import
    from moesim.trace.synthesis import synthesize as make

    path = Path(out)
    check_out(path, suffix=SUFFIX, overwrite=overwrite)
    for option, count in (("--signals", signals), ("--inputs", inputs)):
        if count is not None and count > requests:
            raise ConfigError(f"{option} {count}: expected at most the {requests} of --requests, got {count}; lower it")
    found = read_parameters(str(parameters))
    rows = requests * (prompt + decode)
    with scratch_beside(path) as folder, Progress(rows, enabled=progress) as bar:
        bar.describe(f"synthesizing {found.model}")
        trace = make(
            found, n_requests=requests, n_prompt=prompt, n_decode=decode, seed=seed, n_signal_requests=signals,
            n_input_requests=inputs, scores=scores, folder=folder, progress=bar.advance,
        )  # fmt: skip
        trace.write(path)
    return WrittenTrace([path], f": {rows} tokens of {requests} synthetic requests of {found.model}")


@dataclass(frozen=True, repr=False, eq=False)
class Fit(Answer):
    """Parameters of synthetic traces, and how well they meet a model's figures, in each figure's own unit.

    Attributes
    ----------
    parameters : ParameterSet
        Parameters; ``to_yaml()``, ``write(path)``.
    matches : list of Match
        A figure each, with target, values by seed and tolerance.
    path : Path or None
        The parameter file that was written.
    """

    parameters: ParameterSet
    matches: list[Match]
    path: Path | None = None

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"figure": m.figure.name, "source": m.figure.source, "ref": m.figure.ref, "target": m.figure.value, "fit": m.mean,
             "worst_error": m.worst, "tolerance": m.figure.tolerance, "fitted": m.figure.fitted, "met": m.met,
             "found": list(m.found), "sample": m.sample} | ({} if m.held_out is None else {"held_out": m.held_out})
            for m in self.matches
        ]  # fmt: skip

    def _text(self, form: Format) -> str:
        from moesim.trace.synthesis.fit import COLUMNS, HELD_OUT, RIGHT, SAMPLE, cells

        if form in (Format.JSON, Format.JSONL):
            return render_records(self._rows(), form)
        several, halved = any(m.sample for m in self.matches), any(m.held_out is not None for m in self.matches)
        columns = (SAMPLE if several else ()) + COLUMNS + (HELD_OUT if halved else ())
        return render(columns, cells(self.matches), form, RIGHT)

    def _save(self, folder: Path) -> None:
        files = {"parameters.yaml": self.parameters.to_yaml().encode(), "fit.csv": self._text(Format.CSV).encode()}
        OutputFolder(folder, "trace fit").replace(files)

    def __repr__(self) -> str:
        return f"<Fit: {self.parameters.model}, {sum(m.met for m in self.matches)} of {len(self.matches)} figures met>"


@checked("trace.fit", targets="path", seeds="count", fresh="whole")
def fit(
    targets: str | Path | None = None, *, trace: str | Path | Trace | None = None, hold_out: bool = False,
    out: str | Path | None = None, from_: str | Path | None = None, seeds: int = 2, fresh: int = 5, overwrite: bool = False,
    only_report: bool = False, progress: bool = True,
) -> Fit:  # fmt: skip
    """Fit parameters of synthetic traces to a model's figures.

    Parameters
    ----------
    targets : str or Path, optional
        File of target figures, shipped (a name) or a path.
    trace : str, Path or Trace, optional
        Take the target figures from this trace instead.
    hold_out : bool
        With `trace`: fit to every second request, and report on the others too.
    out : str or Path, optional
        The parameter file to write, ``NAME.yaml``.
    from_ : str or Path, optional
        Parameter file to start from; what is not fitted stays.
    seeds, fresh : int
        Seeds to fit on, and others to report on; without these there are no ``matches``.
    overwrite : bool
        Replace a file that is there.
    only_report : bool
        Only report on the parameters of `from_`.
    progress : bool
        Show a bar.

    Returns
    -------
    Fit
        ``parameters``, ``table`` (a figure a row), ``text()`` and ``save(folder)``.

    Raises
    ------
    InputError
        If what was asked for is wrong, or a file is at `out`.
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
    path = None if out is None else Path(out)
    if path is not None:
        check_out(path, suffix=".yaml", overwrite=overwrite)
    wanted, others = (read_targets(str(targets)), None) if trace is None else _targets_of(trace, hold_out)
    found = read_parameters(str(from_ or wanted.base or _DEFAULT_BASE))
    if only_report:
        _check_shape(found, wanted)
    else:
        note(f"fitting {', '.join(free_parameters(wanted))}")
        with Progress(most_traces(wanted, seeds), text="fitting", enabled=progress) as bar:
            found = fit_parameters(found, wanted, range(1, seeds + 1), lambda tries, error: _tell(bar, tries, error))
    if path is not None:
        with all_or_none(path):
            found.write(path)
            note_written([path], "trace fit")
    return Fit(found, report(found, wanted, range(_FRESH + 1, _FRESH + fresh + 1), others) if fresh else [], path)


def _targets_of(asked: str | Path | Trace, hold_out: bool) -> tuple[Targets, dict[str, float] | None]:
    """Measure targets on a trace, or on its even requests, with the odd ones' figures."""
    from moesim.trace.synthesis.figures import measure, targets_of

    trace, name = read_named(asked)
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
