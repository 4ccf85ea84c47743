"""Profiles of machines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from moesim.api.arguments import checked, written
from moesim.api.outputs import all_or_none, check_out, check_out_folder, note_written
from moesim.api.studies import Study
from moesim.core.files import write_bytes
from moesim.core.gate import TABLE, pasted, read_bytes, why_not
from moesim.core.table import Format, render, render_records
from moesim.core.text import note
from moesim.core.units import parse_bytes
from moesim.core.yaml_reader import read_yaml_value
from moesim.errors import ConfigError, HardwareError, unknown_name
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.load import parts_text, short_form, short_text
from moesim.hardware.pasted import Pasted, pasted_text, read_pasted
from moesim.hardware.problems import find_problems, parts_lines, reading_remarks
from moesim.hardware.short import expert_of
from moesim.hardware.types import TRANSFERS
from moesim.live.kernels import require_torch
from moesim.live.profiler import show as shows
from moesim.live.profiler.detect import detect as ask
from moesim.live.profiler.show import unit_of, value_text
from moesim.model import ModelSpec, builtin_models, load_model
from moesim.policies.registry import POLICIES, make_policy

__all__ = ["check", "compare", "detect", "measure", "new", "show"]

_MODEL: Final = "mixtral-8x7b"  # any: whose experts are copied does not decide how
_SOURCES: Final = ("published", "spec-sheet", "derived", "assumed")
FOLDER: Final = Path("hardware_profiles")
"""Where profiles are found by name."""


@dataclass(frozen=True)
class NewProfile:
    """A profile that `moesim.profile.new` or `moesim.profile.detect` has made.

    Attributes
    ----------
    path : Path or None
        The file that was written.
    notes : list of str
        Lines on the sources read, on derived and assumed numbers, and on missing ones.
    """

    path: Path | None
    notes: list[str]
    _yaml: str

    @property
    def hardware(self) -> HardwareProfile:
        """The machine."""
        return load_hardware(read_yaml_value(self._yaml, "profile"))

    def text(self) -> str:
        """Return the file as YAML."""
        return self._yaml


def _made(path: Path | None, yaml: str, notes: Sequence[str], command: str) -> NewProfile:
    """Write a profile, if it is to be written."""
    if path is not None:
        with all_or_none(path):
            write_bytes(path, yaml.encode())
            note_written([path], command)
    return NewProfile(path, list(notes), yaml)


def _check_name(name: str, place: str) -> None:
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"{place}: expected a name of letters, digits, dots and dashes, got '{name}'; choose another")


@checked("profile.new", from_="path")
def new(
    name: str, *, gpu: str | None = None, cpu: str | None = None, ram: str | None = None, pcie: str | None = None,
    disk: str | None = None, os: str | None = None, from_: str | Path | None = None, transfer: str | None = None,
    gpu_memory: str | None = None, vram: str | None = None, for_: str | Path | Mapping[str, Any] | ModelSpec | None = None,
    source: str = "assumed", ref: str | None = None, out: str | Path | None = None, overwrite: bool = False,
) -> NewProfile:  # fmt: skip
    """Write a profile from parts, from what tools printed, or from numbers that a paper prints.

    Parameters
    ----------
    name : str
        Of the profile.
    gpu, cpu, ram, pcie, disk, os : str, optional
        As of `Hardware.from_parts`; or, as numbers of a paper, as of `Hardware.from_numbers`.
    from_ : str or Path, optional
        File of outputs of nvidia-smi, lscpu, nvbandwidth, MLC and others, in any order; ``"-"``: standard input.
    transfer, gpu_memory, vram : str, optional
        Numbers, as of `Hardware.from_numbers`.
    for_ : str, Path, mapping or ModelSpec, optional
        Whose expert the times are of; default: mixtral-8x7b with 4 bits.
    source : {"assumed", "derived", "published", "spec-sheet"}
        Label of numbers.
    ref : str, optional
        Where they are from.
    out : str or Path, optional
        ``FILE.yaml``; default: ``hardware_profiles/NAME.yaml``, where it is found by its name.
    overwrite : bool
        Replace a profile that is there.

    Returns
    -------
    NewProfile
        ``hardware``, ``path``, ``notes``, and the file as ``text()``.

    Raises
    ------
    InputError
        If a part or a number is wrong or missing, or a file is at `out`.
    """
    _check_name(name, "profile new")
    if source not in _SOURCES:
        raise ConfigError(f"--source: {unknown_name('source', source, _SOURCES)}")
    path = FOLDER / f"{name}.yaml" if out is None else Path(out)
    parts = {"gpu": gpu, "cpu": cpu, "ram": ram, "pcie": pcie, "disk": disk, "os": os}
    of = None if for_ is None else written(for_, "--for")
    others = {"transfer": transfer, "gpu-memory": gpu_memory, "vram": vram, "for": None if of is None else str(of), "ref": ref}
    if _are_parts({**parts, "from": None if from_ is None else str(from_)}, others):
        given: dict[str, Any] = {key: text for key, text in parts.items() if text is not None}
        if from_ is None:
            form: dict[str, Any] = {"name": name, "parts": given}
            notes, yaml = [], parts_text(form)
        else:
            found = read_pasted(_pasted_in(from_), "standard input" if str(from_) == "-" else str(from_), given)
            form = {"name": name, **found.form}
            notes = [f"{one.what}: {one.value} (line {one.line}: {one.text})" for one in found.taken] + _of_pasted(found)
            yaml = pasted_text(name, found, str(from_))
        load_hardware(form, "profile new")
        check_out(path, suffix=".yaml", overwrite=overwrite)
        return _made(path, yaml, [*notes, *parts_lines(load_hardware(form, "profile new", "none"))], "profile new")
    numbers = {"pcie": pcie, "transfer": transfer, "cpu": cpu, "gpu": gpu, "gpu_memory": gpu_memory, "vram": vram, "ram": ram}
    form = short_form(name, numbers, of, source, ref)
    try:
        machine = load_hardware(form, "profile new")
    except HardwareError as error:
        raise _in_options(error, source) from None
    check_out(path, suffix=".yaml", overwrite=overwrite)
    notes = [f"times are of {expert_of(form)}" + ("; --for names another" if of is None else "")]
    if gpu_memory is None:
        rate = machine.devices["gpu0"].memory_bytes_per_s
        notes.append(f"attention reads at {rate / 1e9:.4g} GB/s, as an expert in {gpu}; --gpu-memory gives the GPU's own rate")
    return _made(path, short_text(form), [*notes, *reading_remarks(machine)], "profile new")


@checked("profile.detect")
def detect(*, out: str | Path | None = None, overwrite: bool = False) -> NewProfile:
    """Ask this machine for its parts, and make a profile of them. Nothing is measured.

    Parameters
    ----------
    out : str or Path, optional
        ``FILE.yaml`` to write, named like the machine.
    overwrite : bool
        Replace a profile that is there.

    Returns
    -------
    NewProfile
        ``hardware``, ``notes``, and the profile as ``text()``.

    Raises
    ------
    ConfigError
        If too little is known of the machine, or a file is at `out`.
    """
    path = None if out is None else Path(out)
    if path is not None:
        check_out(path, suffix=".yaml", overwrite=overwrite)
        _check_name(path.stem, f"--out {out}")
    name = "this-machine" if path is None else path.stem
    found = ask()
    notes = [
        *found.remarks, *_of_pasted(found.pasted),
        "moesim profile measure times this machine, and moesim calibrate corrects rates by observed speeds",
    ]  # fmt: skip
    return _made(path, pasted_text(name, found.pasted, "this machine's own answers"), notes, "profile detect")


def _of_pasted(found: Pasted) -> list[str]:
    """List from which outputs a machine was read, what contradicts, and what is missing."""
    read = [f"read {source.name}: written after {source.tried}" for source in found.sources]
    return [*read, *found.remarks, *(f"missing: {words}" for words in found.missing)]


@dataclass(frozen=True)
class CheckedProfile:
    """What `moesim.profile.check` has found.

    Attributes
    ----------
    problems : list of str
        The problems found; empty if the profile is complete.
    """

    problems: list[str]
    _lines: list[str]

    def text(self) -> str:
        """Write problems; or what is assumed, and which policies cannot copy."""
        return "\n".join(self._lines) + "\n"


@checked("profile.check")
def check(profile: str | Path) -> CheckedProfile:
    """Find all that is missing or wrong in a profile.

    Parameters
    ----------
    profile : str or Path
        A name of ``moesim list hardware``, or a path.

    Returns
    -------
    CheckedProfile
        ``problems``, and ``text()``, which has what is assumed if there are none.

    Raises
    ------
    HardwareError
        If there is no such profile.
    """
    problems = [" ".join(one.split()) for one in find_problems(str(profile), "profile check")]
    if problems:
        n = len(problems)
        lines = [f"{profile}: {n} problem{'s' if n > 1 else ''}", *(f"  {one}" for one in problems)]
        return CheckedProfile(problems, lines)
    found = load_hardware(str(profile), "profile check")
    return CheckedProfile([], [*_assumed(found), *reading_remarks(found), *_without_curve(found)])


@checked("profile.show")
def show(profile: str | Path | Mapping[str, Any] | HardwareProfile, *, model: Any = ()) -> Study:
    """Show the numbers of a profile and their sources.

    Parameters
    ----------
    profile : str, Path, mapping or HardwareProfile
        As of `moesim.load_hardware`.
    model : str, Path, mapping or ModelSpec, or sequence of them
        Whose experts are computed and sent.

    Returns
    -------
    Study
        ``table`` (a row a number, by its key, which has the unit), and ``text()``, the page of the command.

    Raises
    ------
    InputError
        If the profile or a model is wrong.
    """
    machine = profile if isinstance(profile, HardwareProfile) else load_hardware(profile, "profile show")
    models = [_model(one) for one in (model if isinstance(model, list | tuple) else [model])]
    rows = [{"key": key, "value": one.value, "source": one.source, "ref": one.ref} for key, one in machine.numbers.items()]

    def text(form: Format) -> str:
        return render_records(rows, form) if form.for_programs else shows.page(machine, models)

    facts = shows.facts(machine, models)
    return Study(facts, [], "profile show", rows, text, lambda: {"numbers.csv": text(Format.CSV).encode()})


@checked("profile.compare")
def compare(
    a: str | Path | Mapping[str, Any] | HardwareProfile, b: str | Path | Mapping[str, Any] | HardwareProfile, *,
    model: str | Path | Mapping[str, Any] | ModelSpec = "mixtral-8x7b",
) -> Study:  # fmt: skip
    """Put what two machines cost next to each other.

    Parameters
    ----------
    a, b : str, Path, mapping or HardwareProfile
        As of `moesim.load_hardware`.
    model : str, Path, mapping or ModelSpec
        Whose experts and dense part are costed.

    Returns
    -------
    Study
        ``table``, with a ``unit`` in each row, and ``text()``.

    Raises
    ------
    InputError
        If a profile or the model is wrong.
    """
    one, two = (each if isinstance(each, HardwareProfile) else load_hardware(each, "profile compare") for each in (a, b))
    found = shows.compare(one, two, _model(model))

    def text(form: Format) -> str:
        return shows.table(found, one.name, two.name, form)

    rows: list[dict[str, Any]] = [{**row._asdict(), "ratio": row.ratio} for row in found]
    return Study(found, [], "profile compare", rows, text, lambda: {"compare.csv": text(Format.CSV).encode()})


@dataclass(frozen=True)
class Measurement:
    """What `moesim.profile.measure` has written, or would measure.

    Attributes
    ----------
    paths : list of Path
        The profiles; none if nothing was measured.
    """

    paths: list[Path]
    _plan: str = ""

    def text(self) -> str:
        """Return the plan, or the paths, a line each."""
        return self._plan or "".join(f"{path}\n" for path in self.paths)


@checked("profile.measure", memory="size", repeats="count", seed="whole", gpu="whole")
def measure(
    name: str, *, model: Any = ("mixtral-8x7b", "deepseek-v2-lite"), bits: Sequence[float] = (), mode: str = "full",
    disk: str | Path | None = None, no_disk: bool = False, gpu: int | None = None, no_gpu: bool = False,
    memory: str | None = None, repeats: int | None = None, seed: int = 0, out: str | Path = FOLDER, resume: bool = True,
    overwrite: bool = False, dry_run: bool = False, progress: bool = True,
) -> Measurement:  # fmt: skip
    """Measure what experts, dense parts and copies cost on this machine, and write it as a profile.

    Parameters
    ----------
    name : str
        Of the profile.
    model : str, Path, mapping or ModelSpec, or sequence of them
        As of `moesim.load_model`; ``"all"``: every built-in one.
    bits : sequence of float
        Of the experts' weights; default: each model's own.
    mode : {"full", "quick"}
        Up to 4096 rows, or up to 64.
    disk, no_disk
        Folder on the disk to measure, or none; default: that of `out`, without a GPU.
    gpu, no_gpu
        Number of the GPU to measure, or none; default: the first, if any.
    memory : str, optional
        Host memory to use, such as ``"8GB"``; default: half of what is available.
    repeats : int, optional
        Of each probe, at least 5; default: 5, or 7 in full.
    seed : int
        Of the order and the random weights.
    out : str or Path
        Folder of profiles.
    resume : bool
        Go on with what was interrupted.
    overwrite : bool
        Replace a profile that is there.
    dry_run : bool
        Only plan.
    progress : bool
        Show a bar.

    Returns
    -------
    Measurement
        ``paths``; with `dry_run` the plan as ``text()``.

    Raises
    ------
    InputError
        If PyTorch is absent, the memory does not suffice, or a profile of the name is there.
    """
    for what, both in (("disk", disk is not None and no_disk), ("gpu", gpu is not None and no_gpu)):
        if both:
            raise ConfigError(f"--{what} and --no-{what}: expected one of them, got both; leave one out")
    named = model if isinstance(model, list | tuple) else [model]
    models = tuple(builtin_models().values()) if list(named) == ["all"] else tuple(_model(each) for each in named)
    budget = None if memory is None else parse_bytes(memory, "--memory")
    folder, place = Path(out), None if disk is None else Path(disk)
    if not dry_run:
        check_out_folder(folder, option="--out")
        require_torch()
    from moesim.live.kernels.host import has_torch
    from moesim.live.profiler.request import Request, describe_plan, find_gpu, prepare

    which = None if no_gpu else find_gpu(gpu)
    if place is None and which is None and not no_disk:
        if not dry_run:
            folder.mkdir(parents=True, exist_ok=True)
        place = folder if folder.is_dir() else Path()
    prepared = prepare(
        Request(name, models, tuple(bits), mode, budget, place, which, folder, seed, repeats, resume=resume, overwrite=overwrite)
    )
    if dry_run:
        if which is None and not no_gpu and not has_torch():
            note("PyTorch is not installed, so that no GPU was looked for")
        return Measurement([], describe_plan(prepared))
    from moesim.live.profiler.measure import measure as carry_out  # PyTorch takes seconds to import

    return Measurement(carry_out(prepared, progress=progress, warn=lambda text: note(f"moesim: warning: {text}")))


def _model(model: str | Path | Mapping[str, Any] | ModelSpec) -> ModelSpec:
    return model if isinstance(model, ModelSpec) else load_model(model, "--model")


def _assumed(profile: HardwareProfile) -> Iterator[str]:
    numbers = {key: number for key, number in profile.numbers.items() if number.source == "assumed"}
    yield f"{profile.name} is complete: {len(profile.numbers)} numbers, {len(numbers)} of them assumed"
    if numbers:
        rows = [[key, value_text(number.value, unit_of(key)), " ".join(number.ref.split())] for key, number in numbers.items()]
        yield render(["assumed", "value", "why"], rows, Format.TABLE, ["value"]).rstrip("\n")


def _without_curve(profile: HardwareProfile) -> Iterator[str]:
    """Name the policies that cannot copy experts for want of a link's curve."""
    model, own = load_model(_MODEL), dict[str, list[str]]()
    for name in POLICIES:
        transfer = getattr(make_policy(name), "transfer", None)
        chosen = transfer(model) if transfer is not None else None
        if chosen is not None:
            own.setdefault(chosen[0], []).append(name)
    ways = {link.name: link for backing in profile.backing for link in profile.path_between(backing, profile.compute)}
    for name, link in ways.items():
        for kind in TRANSFERS:
            if kind in link.curves:
                continue
            named = f", and so are the policies {', '.join(own[kind])}" if kind in own else ""
            yield f"links.{name}: no curve '{kind}': --transfer {kind} is refused{named}"


def _are_parts(parts: Mapping[str, str | None], others: Mapping[str, str | None]) -> bool:
    """Whether the options name parts; refuse parts next to a paper's numbers."""
    named = [key for key in ("gpu", "cpu") if (text := parts[key]) is not None and not _TIME.search(text)]
    named += [key for key in ("disk", "os", "from") if parts[key] is not None]
    numbers = [key for key in ("gpu", "cpu") if parts[key] is not None and key not in named]
    numbers += [key for key, text in others.items() if text is not None]
    if named and numbers:
        got = f"got --{named[0]} {parts[named[0]]} and --{numbers[0]} {({**parts, **others})[numbers[0]]}"
        raise ConfigError(f"profile new: expected parts or a paper's numbers, {got}; leave one kind out")
    return bool(named)


_TIME: Final = re.compile(r"\d\s*(?:[nuµμm]s|s\b)(?=\s*(?:$|[+/]))|/tok")


def _pasted_in(source: str | Path) -> str:
    """Read the file or standard input that holds what was pasted."""
    try:
        return pasted(sys.stdin.buffer.read(TABLE.most + 1) if str(source) == "-" else read_bytes(Path(source), TABLE))
    except OSError as wrong:
        raise ConfigError(f"--from {source}: expected outputs as text, got: {why_not(wrong)}; check the path") from None


def _in_options(error: HardwareError, source: str) -> ConfigError:
    options = [_as_option(problem, source) for problem in error.problems or (str(error),)]
    return ConfigError("profile new: " + " | ".join(dict.fromkeys(options)))


def _as_option(problem: str, source: str) -> str:
    key, colon, said = problem.partition(": ")
    if colon and said.endswith(f"next to source: {source}, got nothing; add it"):
        return f"--source {source}: expected --ref with what the numbers are from, got nothing; add it"
    key = key.removeprefix("numbers.").replace("_", "-")
    return f"--{key}: {said}" if colon and re.fullmatch(r"[a-z-]+", key) and key != "numbers" else problem
