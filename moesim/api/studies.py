"""Studies of experiments from Python: what-if, difference of two runs, regret, capacity, league; the report of a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.api.arguments import checked, written
from moesim.api.outputs import check_out
from moesim.api.result import Answer
from moesim.api.run import parsed, read_experiment, served_question
from moesim.core.files import OutputFolder, check_own_folder
from moesim.core.own_code import reading_results
from moesim.core.table import Format
from moesim.errors import ConfigError, InputError
from moesim.experiment.config import parse_config
from moesim.experiment.report import describe_run
from moesim.experiment.resolve import Experiment
from moesim.experiment.sweep import quick as made_quick
from moesim.hardware import HardwareProfile
from moesim.model import ModelSpec, load_model

if TYPE_CHECKING:
    from moesim.studies.advice.question import Asked


@dataclass(frozen=True, repr=False, eq=False)
class Study(Answer):
    """The answer of a question over many runs, such as `moesim.whatif`.

    Attributes
    ----------
    found : list of Line or Variation, Diff, list of Regret, list of Capacity, or League
        Everything that was found.
    failures : list of str
        One line for each run that failed.
    notes : list of str
        What else a reader has to know.
    """

    found: Any
    failures: list[str]
    command: str
    rows: list[dict[str, Any]]
    _text: Callable[[Format], str]
    files: Callable[[], dict[str, bytes]]
    notes: Sequence[str] = ()

    def _rows(self) -> list[dict[str, Any]]:
        return self.rows

    def _save(self, folder: Path) -> None:
        OutputFolder(folder, self.command).replace(self.files())

    def __repr__(self) -> str:
        return f"<Study: {self.command}, {len(self.rows)} rows>"


@checked("whatif", context="count", jobs="count")
def whatif(
    experiment: str | Path | Mapping[str, Any] | None = None, vary: Sequence[str] = (), *,
    model: str | Path | Mapping[str, Any] | ModelSpec | None = None,
    hardware: str | Path | Mapping[str, Any] | HardwareProfile | None = None, context: int | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (), quick: bool = False, look: bool = True, jobs: int | None = None,
    progress: bool = True,
) -> Study:  # fmt: skip
    """Vary one thing of an experiment at a time, or of a machine with llama.cpp's best setting.

    Parameters
    ----------
    experiment, overrides, quick, jobs, progress
        As of `moesim.run`; the experiment has one setting.
    vary : sequence of str
        As ``moesim whatif --vary``, such as ``"link.bytes_per_s x0.5,x2"``. Default: half and twice the rates of link, CPU
        and GPU; of a machine: twice these, and other bits. ``"drafts 3"``, alone, answers whether 1 to 3 drafts pay.
    model, hardware
        As of `moesim.recommend`, instead of an experiment.
    context : int, optional
        With them: tokens of a request for which there must be room; default: 16384.
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
    from moesim.studies.advice import vary as machines
    from moesim.studies.advice.question import Asked
    from moesim.studies.whatif import show
    from moesim.studies.whatif.drafts import drafts, drafts_alone
    from moesim.studies.whatif.settings import parse_vary, single
    from moesim.studies.whatif.study import halved_and_doubled
    from moesim.studies.whatif.study import whatif as vary_experiment

    variations = [together for text in vary for together in parse_vary(text)]
    setting = drafts_alone(variations)
    if experiment is None or model is not None or hardware is not None:
        if experiment is not None or model is None or hardware is None:
            raise ConfigError(
                "whatif: expected an experiment, or model with hardware, got another; give one of them (moesim whatif --knobs "
                "lists what can be varied)"
            )
        asked = Asked(written(model, "whatif: model"), written(hardware, "whatif: hardware"), context=context)
        try:
            return _of_drafts(machines.drafts_of(asked, setting)) if setting is not None else _of_a_machine(asked, variations)
        except InputError as error:  # of the question, which both verbs ask
            raise type(error)(str(error).replace("recommend: ", "whatif: ", 1)) from None
    config, place, _ = read_experiment("whatif", experiment, overrides, quick=quick, batches=setting is None)
    base = single(config, place)
    if setting is not None:
        return _of_drafts(drafts(base, setting, jobs=jobs, progress=progress))
    lines = vary_experiment(base, variations or halved_and_doubled(base), look=look, jobs=jobs, progress=progress)
    failures = [f"{line.policy}, {line.name}: {line.shot.error}" for line in lines if line.shot.error is not None]
    return Study(
        lines, failures, "whatif", show.records_of(lines, quick), lambda form: show.table(lines, form, quick),
        lambda: show.files_of(lines, quick),
    )  # fmt: skip


def _of_a_machine(asked: Asked, variations: Sequence[Any]) -> Study:
    from moesim.studies.advice.vary import USUAL, records, table, vary
    from moesim.studies.whatif.settings import parse_vary

    found = vary(asked, variations or [together for text in USUAL for together in parse_vary(text)])
    return Study(
        found, [], "whatif", records(found), partial(table, found),
        lambda: {"whatif.csv": table(found, Format.CSV).encode()},
    )  # fmt: skip


def _of_drafts(lines: Sequence[Any]) -> Study:
    """Answer whether drafts pay."""
    from moesim.studies.whatif import drafts as study

    failures = [f"{line.policy}, drafts: {line.error}" for line in lines if line.error]
    files = partial(study.files_of, lines)
    return Study(list(lines), failures, "whatif", study.records(lines), partial(study.table, lines), files)


@checked("diff")
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


@checked("regret", jobs="count")
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


@checked("capacity", prompt="count", answer="count", seeds="count", requests="count", jobs="count")
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


@checked("league", jobs="count")
def league(
    experiment: str | Path | Mapping[str, Any] | None = None, *,
    hardware: str | Path | Mapping[str, Any] | HardwareProfile | None = None,
    model: str | Path | Mapping[str, Any] | ModelSpec | None = None, overrides: Mapping[str, Any] | Sequence[str] = (),
    quick: bool = False, out: str | Path | None = None, jobs: int | None = None, progress: bool = True,
) -> Study:  # fmt: skip
    """Find the fastest engine of every setting, and the rule that would be: by how much, and whether that is certain.

    Parameters
    ----------
    experiment, overrides, quick, progress
        As of `moesim.run`; default: the experiment ``league``. Points that differ in trace or seed are draws of a setting.
    hardware, model
        Others than the experiment's; a model's name stands for the bits that people use.
    out : str or Path, optional
        Folder to write; runs that it holds are not repeated. Default: nothing is written.
    jobs : int, optional
        Processes; default: one more than cores.

    Returns
    -------
    Study
        ``table`` (a row a setting and phase), ``text()`` and ``save(folder)``.

    Raises
    ------
    InputError
        If what was asked for is wrong, or no two systems meet.
    """
    from moesim.studies.advice.question import usual_bits
    from moesim.studies.identify.observations import read_bits
    from moesim.studies.league import league as meet
    from moesim.studies.league import record
    from moesim.studies.league_table import files_of, table

    folder = None if out is None else Path(out)
    if folder is not None:
        check_own_folder(folder, "league")
    chosen = {} if hardware is None else {"hardware": written(hardware, "league: hardware")}
    if isinstance(model, str):
        plain = load_model(model, "league: model")
        bits = read_bits(usual_bits(plain), "league: model", plain)[0]
        chosen["model"] = {"base": model, **bits}
    elif model is not None:
        chosen["model"] = written(model, "league: model")
    config, place, given = parsed("league", "league" if experiment is None else experiment, overrides)
    if given:
        raise ConfigError("league: trace: expected a name or a path, got an object; write it to a file first")
    if chosen:
        chosen |= {} if experiment is not None else {"exclude": []}
        config = parse_config(config.model_dump(mode="json", exclude_unset=True) | chosen, place)
    found = meet(
        made_quick(config, place) if quick else config, place, folder=None if folder is None else folder / "runs", jobs=jobs,
        progress=progress, begin=None if folder is None else OutputFolder(folder, "league").mark,  # one that stops is known
    )  # fmt: skip
    rows = [record(one) for one in found.cells]
    study = Study(found, [], "league", rows, partial(table, found), partial(files_of, found))
    if folder is not None:
        study.save(folder)
    return study


@checked("papers", jobs="count")
def papers(
    figures: Sequence[str] = (), *, quick: bool = False, out: str | Path | None = None, jobs: int | None = None,
    progress: bool = True,
) -> Study:  # fmt: skip
    """Run the experiments of the papers, and put each published figure next to the simulated one.

    Parameters
    ----------
    figures : sequence of str
        Papers, or figures as ``"hybrimoe/fig9"``; default: all. ``moesim papers --list`` has their names.
    quick, jobs, progress
        As of `moesim.run`.
    out : str or Path, optional
        Folder for a result folder of each experiment; runs that it holds are not repeated.

    Returns
    -------
    Study
        ``table`` (printed figures, then orders), ``text()`` and ``save(folder)``; ``failures`` names runs that failed.
    """
    from moesim.studies.papers.run import Chosen, run_papers

    found = run_papers(Chosen(figures, quick), out=None if out is None else Path(out), jobs=jobs, progress=progress)
    return Study(found, found.failures, "papers", found.records(), found.text, found.files)


@dataclass(frozen=True)
class WrittenReport:
    """A page that `moesim.report` has written.

    Attributes
    ----------
    path : Path
        The page.
    answer : str
        Who wins where, and by how much: the sentence with which it begins.
    """

    path: Path
    answer: str

    def text(self) -> str:
        """Write the answer, and where the page is."""
        return f"{self.answer}\nwrote {self.path}\n"


@checked("report")
def report(folder: str | Path, *, out: str | Path | None = None, trust: bool = False, progress: bool = True) -> WrittenReport:
    """Write a result folder as one HTML page: what was run, results, figures, notes and a timeline to zoom into.

    Parameters
    ----------
    folder : str or Path
        As of ``moesim run --out`` or `Result.save`.
    out : str or Path, optional
        ``FILE.html``; default: ``report.html`` in the folder. An earlier page is replaced.
    trust : bool
        As of `moesim.load`.
    progress : bool
        Show a bar while figures are drawn.

    Returns
    -------
    WrittenReport
        ``path``, ``answer`` and ``text()``. The page loads nothing from anywhere; the same folder gives the same bytes.

    Raises
    ------
    ConfigError
        If there is no such folder, it is not a result, or something else is at `out`.
    """
    from moesim.reporting import read_folder, report_page
    from moesim.reporting.answer import answer_of

    result = read_folder(Path(folder))
    page = Path(folder) / "report.html" if out is None else Path(out)
    check_out(page, suffix=".html", overwrite=True)
    with reading_results(trust=trust):
        text = report_page(result, progress=progress)
    OutputFolder(page.parent, "report", owned=False).put({page.name: text.encode()})
    return WrittenReport(page, answer_of(result.rows).sentence)
