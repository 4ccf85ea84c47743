"""Compare policies, run an experiment file, load a result or a trace."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from moesim.api.arguments import checked, written
from moesim.api.result import Result
from moesim.core.text import note
from moesim.core.units import as_share
from moesim.engine.entry import played_by
from moesim.errors import ConfigError, InterruptError
from moesim.experiment import run_experiment
from moesim.experiment.config import Config, apply_override, load_config, merge, parse_config, refuse_served
from moesim.experiment.folder import Output
from moesim.experiment.resolve import Experiment
from moesim.experiment.routing import choose_traces, name_of_given, with_routing
from moesim.experiment.run import Results
from moesim.experiment.store import read_summary
from moesim.experiment.sweep import quick as made_quick
from moesim.experiment.workers import Workers
from moesim.hardware import HardwareProfile, load_hardware
from moesim.model import ModelSpec
from moesim.trace import Trace, find_trace

NAMES: WeakKeyDictionary[Trace, str] = WeakKeyDictionary()
"""Names by which traces were loaded here; one that was made of another has none."""


@checked("load_trace")
def load_trace(name_or_path: str | Path) -> Trace:
    """Read a trace.

    Parameters
    ----------
    name_or_path : str or Path
        A name of ``moesim list traces``, or a path.

    Returns
    -------
    Trace

    Raises
    ------
    TraceError
        If there is none, or it is damaged.
    """
    trace = Trace.read(find_trace(name_or_path))
    NAMES[trace] = str(name_or_path)
    return trace


MODEL = {"base": "mixtral-8x7b", "expert_bits": 4}


@checked("compare", repeat="count", jobs="count")
def compare(
    policies: Any, *, model: str | Mapping[str, Any] | ModelSpec | Sequence[Any] = MODEL,
    hardware: str | Path | Mapping[str, Any] | HardwareProfile | Sequence[Any] = "rtx3090-epyc7532",
    trace: str | Path | Mapping[str, Any] | Trace | Sequence[Any] | None = None, hit_rate: str | None = None,
    cache: float | str | Iterable[float | str] = (0.25, 0.5), batch: int | Sequence[int] = 1, prompt: int | Sequence[int] = 64,
    decode: int | Sequence[int] = 64, n_batches: int | Sequence[int] = 1, seed: int | Sequence[int] = 0,
    transfer: str | Sequence[str] = "own", engine: str | Sequence[str] = "own", repeat: int = 1,
    overrides: Mapping[str, Any] | Sequence[str] = (), quick: bool = False, out: str | Path | None = None,
    jobs: int | None = None, scheduler: str | None = None, fail_fast: bool = False, simulator: str | None = None,
    verify: float | None = None, progress: bool = True,
) -> Result:  # fmt: skip
    """Compare policies.

    Parameters
    ----------
    policies : str, mapping, class, policy, or a list of them
        ``"lru"``, ``{"name": "dali", "w_size": 2}``, a class, or an object such as ``Dali(w_size=2)``, which stands for its
        class and its options.
    model : str, mapping, ModelSpec, or a list of them
        As of `moesim.load_model`.
    hardware : str, Path, mapping, HardwareProfile, or a list of them
        As of `moesim.load_hardware`.
    trace : str, Path, mapping, Trace, or a list of them, optional
        Routing. Default: a recording of the model, else routing with its statistics, else assumed routing at three LRU lifts;
        the log says which.
    hit_rate : str, optional
        An LRU hit rate that an engine counted, with the slots of each layer, such as ``"61%@16"``: it fixes the lift of
        assumed routing.
    cache : float, str, or a list of them
        Shares of all experts that a GPU caches, such as 0.25, ``"1/3"`` or ``"25%"``, or sizes of its memory: ``"12GiB"``.
    batch, prompt, decode, n_batches, seed : int or list of int
        Requests at once, tokens of each, batches one after the other, and the seed of the choice of requests.
    transfer : {"own", "pinned", "pageable", "chunked"} or a list of them
        Curve of transfers; ``"own"``: of the policy, else pinned.
    engine : str or list of str
        Whose costs: ``"own"`` of each policy's engine, ``"machine"``, those of the profile, or an engine of ``moesim list
        engines`` for all policies.
    repeat : int
        Seeds, from `seed` on.
    overrides : mapping, or sequence of str
        Other keys of an experiment: ``{"predictors": ...}`` or ``["workload.refill=true"]``.
    quick : bool
        The first setting only, and at most 4 decode tokens.
    out : str or Path, optional
        Folder to write; runs that it holds are not repeated. Default: nothing is written.
    jobs : int, optional
        Processes; default: all cores where that is faster. The results do not depend on it.
    scheduler : str, optional
        ``tcp://HOST:PORT`` of a Dask scheduler, whose workers run instead.
    fail_fast : bool
        Stop at the first run that fails.
    simulator : {"simpy", "native"}, optional
        Which of the two simulators; default: native if it is built. Both give the same results.
    verify : float, optional
        Share of the runs to play on both; the first record that differs stops them.
    progress : bool
        Show a bar, on a terminal or in a notebook, once it has taken two seconds.

    Returns
    -------
    Result

    Raises
    ------
    InputError
        If what was asked for is wrong.

    Examples
    --------
    >>> import moesim
    >>> found = moesim.compare(["lru", "fiddler"], cache=0.25, prompt=8, decode=4, trace="mini-mixtral", progress=False)
    >>> [round(speed, 1) for speed in found.table["decode_tokens_per_s"]]
    [5.8, 13.7]
    """
    given: dict[str, Trace] = {}
    raw = comparison(
        policies, model=model, hardware=hardware, trace=trace, hit_rate=hit_rate, cache=cache, batch=batch, prompt=prompt,
        decode=decode, n_batches=n_batches, seed=seed, transfer=transfer, engine=engine, repeat=repeat, overrides=overrides,
        given=given,
    )  # fmt: skip
    config = parse_config(raw, "compare")
    config = made_quick(config, "compare") if quick else config
    return _carried_out(
        config, "compare", given, out=out, jobs=jobs, scheduler=scheduler, fail_fast=fail_fast, simulator=simulator,
        verify=verify, progress=progress,
    )  # fmt: skip


def comparison(
    policies: Any, *, model: Any, hardware: Any, trace: Any, cache: Any, batch: Any, prompt: Any, decode: Any,
    n_batches: Any, seed: Any, transfer: Any, repeat: int, overrides: Mapping[str, Any] | Sequence[str], engine: Any = "own",
    hit_rate: str | None = None, given: dict[str, Trace] | None = None, imports: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Write a comparison as an experiment file would; traces that are objects go into `given`."""
    place = "compare"
    workload = {"batch_size": batch, "prompt_tokens": prompt, "decode_tokens": decode, "n_batches": n_batches, "seed": seed}
    raw: dict[str, Any] = {
        "model": written(model, f"{place}: model"),
        "hardware": written(hardware, f"{place}: hardware"),
        "workload": {key: written(value, f"{place}: {key}") for key, value in workload.items()},
        "cache": _sizes(cache),
        "repeat": repeat,
        "policies": written(_listed(policies, f"{place}: policies"), f"{place}: policies"),
        "transfer": {"curve": written(transfer, f"{place}: transfer")},
        **({} if engine == "own" else {"engine": written(engine, f"{place}: engine")}),
    }
    if hit_rate is not None and trace is not None:
        raise ConfigError(f"{place}: expected trace or hit_rate, got both; a hit rate is for routing that nobody recorded")
    if trace is not None:
        raw["trace"] = routing_of(trace, {} if given is None else given, f"{place}: trace")
    _override(raw, overrides, place)
    if "trace" not in raw:
        for line in choose_traces(raw, place, hit_rate=hit_rate, imports=imports):
            note(line)
    return raw


def served_question(
    policies: Any, *, model: Any, hardware: Any, trace: Any, cache: Any, workload: Mapping[str, Any],
    overrides: Mapping[str, Any] | Sequence[str], given: dict[str, Trace],
) -> dict[str, Any]:  # fmt: skip
    """Write a question about one served workload as an experiment file would."""
    place = "capacity"
    raw: dict[str, Any] = {
        "model": written(model, f"{place}: model"), "hardware": written(hardware, f"{place}: hardware"),
        "policies": written(_listed(policies, f"{place}: policies"), f"{place}: policies"),
        "workload": written(workload, f"{place}: workload"),
    }  # fmt: skip
    if cache is None:
        devices = load_hardware(raw["hardware"], f"{place}: hardware").devices.values()
        raw["cache"] = {"budget": min((one.memory_bytes for one in devices if one.role == "accelerator"), default=0)}
    else:
        raw["cache"] = _sizes(cache)
    if trace is not None:
        raw["trace"] = routing_of(trace, given, f"{place}: trace")
    _override(raw, overrides, place)
    if "trace" not in raw:
        for line in choose_traces(raw, place, ends=False):
            note(line)
    return raw


@checked("run", jobs="count")
def run(
    experiment: str | Path | Mapping[str, Any], *, overrides: Mapping[str, Any] | Sequence[str] = (), quick: bool = False,
    out: str | Path | None = None, jobs: int | None = None, scheduler: str | None = None, fail_fast: bool = False,
    simulator: str | None = None, verify: float | None = None, progress: bool = True,
) -> Result:  # fmt: skip
    """Run an experiment.

    Parameters
    ----------
    experiment : str, Path or mapping
        The path of a YAML file, or what it would hold; models, machines, policies and traces may be objects.
    overrides : mapping, or sequence of str
        Keys to change: ``{"cache": {"ratio": 0.5}}`` or ``["cache.ratio=0.5"]``.
    quick : bool
        The first setting only, and at most 4 decode tokens.
    out : str or Path, optional
        Folder to write; runs that it holds are not repeated. Default: nothing is written.
    jobs, scheduler, fail_fast, simulator, verify, progress
        As of `compare`.

    Returns
    -------
    Result

    Raises
    ------
    InputError
        If the file cannot be read, or what it asks for is wrong.
    """
    config, place, given = read_experiment("run", experiment, overrides, quick=quick)
    return _carried_out(
        config, place, given, out=out, jobs=jobs, scheduler=scheduler, fail_fast=fail_fast, simulator=simulator,
        verify=verify, progress=progress,
    )  # fmt: skip


def read_experiment(
    verb: str,
    experiment: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | Sequence[str],
    *,
    quick: bool,
    batches: bool = False,
) -> tuple[Config, str, dict[str, Trace]]:
    """Read an experiment for a verb, with its routing: configuration, name in messages, traces that are objects."""
    config, place, given = parsed(verb, experiment, overrides)
    if batches:
        refuse_served(config, place, verb)
    if config.trace is None:
        config = with_routing(config, place, ends=verb == "run")
    return made_quick(config, place) if quick else config, place, given


def parsed(
    verb: str, experiment: str | Path | Mapping[str, Any], overrides: Mapping[str, Any] | Sequence[str]
) -> tuple[Config, str, dict[str, Trace]]:
    """Read an experiment as it is written."""
    given: dict[str, Trace] = {}
    if isinstance(experiment, Mapping):
        place = verb
        raw = written({key: value for key, value in experiment.items() if key != "trace"}, place)
        if "trace" in experiment:
            raw["trace"] = routing_of(experiment["trace"], given, f"{place}: trace")
        _override(raw, overrides, place)
        config = parse_config(raw, place)
    else:
        place = str(experiment)
        config = load_config(Path(experiment), [] if isinstance(overrides, Mapping) else list(overrides))
        if isinstance(overrides, Mapping) and overrides:
            raw = config.model_dump(mode="json", exclude_unset=True)
            _override(raw, overrides, place)
            config = parse_config(raw, place)
    return config, place, given


@checked("load")
def load(folder: str | Path, *, trust: bool = False, inputs: str | Path | None = None) -> Result:
    """Load the result that a command, or `Result.save`, has written.

    Parameters
    ----------
    folder : str or Path
        As of ``moesim run --out``.
    trust : bool
        Whether code of policies and schedulers that the result names, and that are not moesim's own, may be imported.
    inputs : str or Path, optional
        A folder with traces of the experiment, and with modules of such policies.

    Returns
    -------
    Result
        Its table at once; records and figures of them are read or simulated again when they are asked for.

    Raises
    ------
    ConfigError
        If there is no such folder, it is not a result, or a file of it cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        got = "a file" if path.exists() else "nothing there"
        raise ConfigError(f"{path}: expected the folder of a result, got {got}; make one with moesim run --out")
    return Result(read_summary(path)["runs"], None, path, trust=trust, inputs=None if inputs is None else Path(inputs))


def _carried_out(
    config: Config, place: str, given: dict[str, Trace], *, out: str | Path | None, jobs: int | None, scheduler: str | None,
    fail_fast: bool, simulator: str | None, verify: float | None, progress: bool,
) -> Result:  # fmt: skip
    experiment = Experiment(config, place, known=given)
    typed = any("__main__:" in str(spec.point.policy) for spec in experiment.specs)  # which no other process can import
    folder, n = None if out is None else Path(out), 1 if typed else jobs
    with played_by(simulator, verify):
        results = executed(
            experiment, folder, jobs=n, scheduler=scheduler, progress=progress, fail_fast=fail_fast or bool(verify)
        )
    served = {i: one.records for i, one in enumerate(results.outcomes) if one.records is not None and one.records.served}
    return Result(results.rows, experiment, folder, requests=served)


def _listed(policies: Any, place: str) -> list[Any]:
    if isinstance(policies, str) and "," in policies and "(" not in policies:
        names = [name.strip() for name in policies.split(",")]
        raise ConfigError(f"{place}: expected a name or a list of names, got '{policies}'; write {names}")
    return list(policies) if isinstance(policies, list | tuple) else [policies]


def real_speeds(rows: Sequence[Mapping[str, Any]], experiment: Experiment) -> tuple[float, float] | None:
    """Return the factors between which real decode speeds lie of those simulated, the widest of all runs; None if all failed."""
    from moesim.studies.identify.model_error import shipped, time_shares

    machines = {spec.index: spec.hardware for spec in experiment.specs}
    done = [(machines[int(row["run"])], row) for row in rows if not row.get("error")]
    ends = [shipped().factors(machine, time_shares(row, machine)) for machine, row in done]
    return (min(low for low, _ in ends), max(high for _, high in ends)) if ends else None


def executed(
    experiment: Experiment, folder: Path | None, *, jobs: int | None, scheduler: str | None = None, progress: bool = True,
    fail_fast: bool = False, show: Callable[[Results], None] = lambda results: None,
) -> Results:  # fmt: skip
    """Run an experiment, show its results and write its folder; interrupts keep finished runs."""
    output = None if folder is None else Output(experiment, folder)
    with Workers(jobs, scheduler) as workers:
        try:
            results = run_experiment(
                experiment, keep=output.kept.get if output else lambda index: None, progress=progress, folder=folder,
                workers=workers, fail_fast=fail_fast,
            )  # fmt: skip
        except KeyboardInterrupt:
            kept = f"finished runs are kept in {folder}; the same command goes on" if folder else "nothing is kept without --out"
            raise InterruptError(f"interrupted; {kept}") from None
        show(results)
        if output is not None and results.complete:
            output.write(results, workers, progress=progress)
    return results


def routing_of(trace: Any, given: dict[str, Trace], place: str) -> Any:
    """Write traces; objects get a name by their content, by which the experiment finds them."""
    if isinstance(trace, list | tuple):
        return [routing_of(one, given, place) for one in trace]
    if not isinstance(trace, Trace):
        return written(trace, place)
    name = NAMES.get(trace) or name_of_given(trace)
    given[json.dumps(name)] = trace  # as `Experiment` remembers what it has read
    return name


def _sizes(cache: Any) -> dict[str, Any]:
    values = written(list(cache) if isinstance(cache, Iterable) and not isinstance(cache, str) else [cache], "compare: cache")
    values = [as_share(value) for value in values]
    shares = [value for value in values if not isinstance(value, str)]
    sizes = [value for value in values if isinstance(value, str)]
    for size in sizes:
        if not size[:1].isdigit() or "/" in size or size.endswith("%"):
            raise ConfigError(
                f"compare: cache: expected shares such as 0.25, 1/4 or 25%, or sizes such as 8GiB, got '{size}'; correct it"
            )
    return {**({"ratio": shares} if shares else {}), **({"budget": sizes} if sizes else {})}


def _override(raw: dict[str, Any], overrides: Mapping[str, Any] | Sequence[str], place: str) -> None:
    if isinstance(overrides, str):
        raise ConfigError(f"{place}: overrides: expected a mapping or a list of key=value, got a text; put it into a list")
    if isinstance(overrides, Mapping):
        raw |= merge(raw, written(overrides, f"{place}: overrides"))
    else:
        for one in overrides:
            apply_override(raw, one)
