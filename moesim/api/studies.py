"""Studies of experiments from Python: what-if, difference of two runs, regret, capacity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from moesim.api.arguments import checked
from moesim.api.result import Answer
from moesim.api.run import read_experiment, served_question
from moesim.core.files import OutputFolder
from moesim.core.table import Format
from moesim.errors import ConfigError
from moesim.experiment.config import parse_config
from moesim.experiment.report import describe_run
from moesim.experiment.resolve import Experiment


@dataclass(frozen=True, repr=False, eq=False)
class Study(Answer):
    """The answer of `moesim.whatif`, `moesim.diff`, `moesim.regret` or `moesim.capacity`.

    Attributes
    ----------
    found : list of Line, Diff, list of Regret, or list of Capacity
        Everything that was found.
    failures : list of str
        One line for each run that failed.
    """

    found: Any
    failures: list[str]
    command: str
    rows: list[dict[str, Any]]
    _text: Callable[[Format], str]
    files: Callable[[], dict[str, bytes]]

    def _rows(self) -> list[dict[str, Any]]:
        return self.rows

    def _save(self, folder: Path) -> None:
        OutputFolder(folder, self.command).replace(self.files())

    def __repr__(self) -> str:
        return f"<Study: {self.command}, {len(self.rows)} rows>"


@checked(
    "whatif", experiment="experiment", vary="names", overrides="overrides", quick="flag", look="flag", jobs="count",
    progress="flag",
)  # fmt: skip
def whatif(
    experiment: str | Path | Mapping[str, Any], vary: Sequence[str] = (), *,
    overrides: Mapping[str, Any] | Sequence[str] = (), quick: bool = False, look: bool = True, jobs: int | None = None,
    progress: bool = True,
) -> Study:  # fmt: skip
    """Vary one thing of an experiment at a time.

    Parameters
    ----------
    experiment, overrides, quick, jobs, progress
        As of `moesim.run`; the experiment has one setting.
    vary : sequence of str
        As ``moesim whatif --vary``, such as ``"link.bytes_per_s x0.5,x2"``. Default: half and twice the rates of link, CPU
        and GPU. ``"drafts 3"``, alone, answers whether 1 to 3 drafts pay.
    look : bool
        Look where along each knob the limit changes.

    Returns
    -------
    Study
        ``table``, ``text()`` and ``save(folder)``; ``failures`` names variations that cannot run.

    Raises
    ------
    InputError
        If a knob or a value is unknown, or the machine's profile cannot express it.
    """
    from moesim.studies.whatif import show
    from moesim.studies.whatif.drafts import drafts, drafts_alone
    from moesim.studies.whatif.settings import parse_vary, single
    from moesim.studies.whatif.study import halved_and_doubled
    from moesim.studies.whatif.study import whatif as vary_experiment

    variations = [together for text in vary for together in parse_vary(text)]
    setting = drafts_alone(variations)
    config, place, _ = read_experiment("whatif", experiment, overrides, quick=quick, batches=setting is None)
    base = single(config, place)
    if setting is not None:
        return of_drafts(drafts(base, setting, jobs=jobs, progress=progress))
    lines = vary_experiment(base, variations or halved_and_doubled(base), look=look, jobs=jobs, progress=progress)
    failures = [f"{line.policy}, {line.name}: {line.shot.error}" for line in lines if line.shot.error is not None]
    return Study(
        lines, failures, "whatif", show.records_of(lines, quick), lambda form: show.table(lines, form, quick),
        lambda: show.files_of(lines, quick),
    )  # fmt: skip


def of_drafts(lines: Sequence[Any]) -> Study:
    """Answer whether drafts pay."""
    from moesim.studies.whatif import drafts as study

    failures = [f"{line.policy}, drafts: {line.error}" for line in lines if line.error]
    return Study(
        list(lines),
        failures,
        "whatif",
        study.records(lines),
        lambda form: study.table(lines, form),
        lambda: study.files_of(lines),
    )


@checked("diff", run_a="path", run_b="path", trust="flag", inputs="path")
def diff(run_a: str | Path, run_b: str | Path, *, trust: bool = False, inputs: str | Path | None = None) -> Study:
    """Compare two runs of result folders.

    Parameters
    ----------
    run_a, run_b : str or Path
        A folder with one run, or ``"FOLDER:NUMBER"``, or ``"FOLDER:POLICY"``.
    trust, inputs
        As of `moesim.load`.

    Returns
    -------
    Study
        ``table``, ``text()`` and ``save(folder)``; differences are B less A.

    Raises
    ------
    ConfigError
        If there is no such run, or it cannot be simulated again where the folder has no records of it.
    """
    from moesim.experiment.folder import outcome_of
    from moesim.studies.diff import Diff, find_run, text_of

    read = partial(outcome_of, trust=trust, inputs=None if inputs is None else Path(inputs))
    a, b = str(run_a), str(run_b)
    found = Diff.of(find_run(a, read), find_run(b, read))
    return Study(
        found, [], "diff", [entry.record() for entry in found.entries()],
        partial(text_of, found, a, b), lambda: {"diff.csv": text_of(found, a, b, Format.CSV).encode()},
    )  # fmt: skip


@checked(
    "regret", experiment="experiment", policies="names", overrides="overrides", quick="flag", jobs="count", progress="flag"
)  # fmt: skip
def regret(
    experiment: str | Path | Mapping[str, Any], policies: Sequence[str] = (), *,
    overrides: Mapping[str, Any] | Sequence[str] = (), quick: bool = False, jobs: int | None = None, progress: bool = True,
) -> Study:  # fmt: skip
    """Find what each decision of a policy would be worth if an oracle made it.

    Parameters
    ----------
    experiment, overrides, quick, jobs, progress
        As of `moesim.run`.
    policies : sequence of str
        Names, with or without options; default: all of the experiment.

    Returns
    -------
    Study
        ``table``, ``text()`` and ``save(folder)``; ``failures`` names runs that failed.
    """
    from moesim.studies.regret import files_of, regrets, table

    config, place, given = read_experiment("regret", experiment, overrides, quick=quick, batches=True)
    found = regrets(Experiment(config, place, known=given), policies, jobs=jobs, progress=progress)
    return Study(
        found, [f"{describe_run(one.row)}: {error}" for one in found for error in one.errors], "regret",
        [record for one in found for record in one.records()], partial(table, found), partial(files_of, found),
    )  # fmt: skip


@checked(
    "capacity", prompt="count", answer="count", ttft="number", tpot="number", e2e="number", users="flag",
    think="number", share="number", seeds="count", requests="count", overrides="overrides", jobs="count", progress="flag",
)  # fmt: skip
def capacity(
    policies: Any, *, model: Any, hardware: Any, scheduler: str | Mapping[str, Any] = "llama-server", prompt: int = 512,
    answer: int = 128, ttft: float = 10.0, tpot: float = 0.5, e2e: float | None = None, users: bool = False,
    think: float = 0.0, share: float = 0.9, seeds: int = 5, requests: int = 100, cache: float | str | None = None,
    trace: Any = None, overrides: Mapping[str, Any] | Sequence[str] = (), jobs: int | None = None, progress: bool = True,
) -> Study:  # fmt: skip
    """Search the largest load at which a share of all requests keeps within limits.

    Parameters
    ----------
    policies, model, hardware, trace
        As of `moesim.compare`; one model and one machine.
    scheduler : str or mapping
        A name, or that under ``name`` with its options, such as ``{"name": "vllm", "max_num_seqs": 8}``.
    prompt, answer : int
        Tokens of each request.
    ttft, tpot, e2e : float, s
        Limits: time to the first token, time per output token after it, time of the whole request (default: none).
    users : bool
        Search for a number of users, each of whom asks again `think` seconds after an answer, instead of a rate of requests
        that arrive at random.
    share : float
        Of the requests that must keep within all limits.
    seeds, requests : int
        Runs of each load, over which there is a 95 % interval, and requests of a run.
    cache : float or str, optional
        Share of all experts that a GPU caches, or a size of its memory; default: all of its memory.
    overrides : mapping, or sequence of str
        Other keys of an experiment.
    jobs, progress
        As of `moesim.compare`.

    Returns
    -------
    Study
        ``table``, ``text()`` and ``save(folder)``; a row a policy, with the waiting times at its largest load.

    Raises
    ------
    InputError
        If what was asked for is wrong.
    """
    from moesim.studies import capacity as study

    limits = {f"{name}_s": float(value) for name, value in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e)) if value is not None}
    if not 0 < share <= 1:
        raise ConfigError(f"capacity: share: expected above 0 and at most 1, got {share:g}; 0.9 is usual")
    for name, value in limits.items():
        if not value > 0:
            raise ConfigError(f"capacity: {name.removesuffix('_s')}: expected seconds above 0, got {value:g}; raise it")
    if think and not users:
        raise ConfigError(f"capacity: think: expected it with users, got {think:g} s and a rate; ask for users, or leave it out")
    asked = study.Asked(users, share, seeds, requests)
    given: dict[str, Any] = {}
    raw = served_question(
        policies, model=model, hardware=hardware, trace=trace, cache=cache, overrides=overrides, given=given,
        workload={
            "closed": 1, "n_requests": requests, "prompt_tokens": prompt, "answer_tokens": answer, "scheduler": scheduler,
            "limits": limits, **({"think_s": think} if think else {}),
        },
    )  # fmt: skip
    experiment = Experiment(parse_config(raw, "capacity"), "capacity", known=given)
    found = study.capacities(experiment, asked, jobs=jobs, progress=progress)
    return Study(
        found, [f"{one.policy}: {one.error}" for one in found if one.error], "capacity", study.records(found, asked),
        partial(study.table, found, asked), partial(study.files_of, found, asked),
    )  # fmt: skip
