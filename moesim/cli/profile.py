"""``moesim profile``: write, measure, check, show and compare profiles of machines."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from moesim.api.outputs import all_or_none, check_out, check_out_folder, note_written
from moesim.cli.help import Commands
from moesim.cli.options import Overwrite, Printed, name_or_mapping
from moesim.cli.outputs import show as print_table
from moesim.core.files import write_bytes
from moesim.core.gate import TABLE, pasted, read_bytes, why_not
from moesim.core.limits import BITS, COUNT, PROCESSES, REPEATS
from moesim.core.table import Format, render
from moesim.core.text import say, shown, shown_lines
from moesim.core.units import parse_bytes
from moesim.errors import ConfigError, HardwareError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.load import parts_text, short_form, short_text
from moesim.hardware.pasted import Pasted, pasted_text, read_pasted
from moesim.hardware.problems import find_problems, parts_lines, reading_remarks
from moesim.hardware.short import expert_of
from moesim.hardware.types import TRANSFERS
from moesim.live.kernels import require_torch
from moesim.live.profiler.detect import detect as ask
from moesim.live.profiler.show import compare as compare_profiles
from moesim.live.profiler.show import page, unit_of, value_text
from moesim.live.profiler.show import table as comparison_table
from moesim.model import ModelSpec, builtin_models, load_model
from moesim.policies.registry import POLICIES, make_policy

_MODEL = "mixtral-8x7b"  # any: whose experts are copied does not decide how


def check(profile: Annotated[str, typer.Argument(metavar="NAME|FILE.yaml", help="A profile.")]) -> int:
    """Print all that is missing or wrong in a profile, a line each.

    A complete profile: what is assumed, and which policies cannot copy.

    Exit code 0: complete; 2: something is missing or wrong.

    Example: moesim profile check rtx3090-epyc7532
    """
    problems = find_problems(profile, "profile check")
    if problems:
        n = len(problems)
        lines = [f"{profile}: {n} problem{'s' if n > 1 else ''}", *(f"  {' '.join(one.split())}" for one in problems)]
        print_table(shown_lines("\n".join(lines) + "\n"))
        return 2
    found = load_hardware(profile, "profile check")
    print_table(shown_lines("\n".join([*_assumed(found), *reading_remarks(found), *_without_curve(found)]) + "\n"))
    return 0


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


def detect(
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.yaml", help="Where to write it, named like the machine.", show_default="printed"),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a profile of this machine by its parts. Nothing is measured.

    Example: moesim profile detect --out mybox.yaml
    """
    name = "this-machine"
    if out is not None:
        check_out(out, suffix=".yaml", overwrite=overwrite)
        name = out.stem
        if not re.fullmatch(r"[\w.-]+", name):
            raise ConfigError(f"--out {out}: expected a name of letters, digits, dots and dashes, got '{name}'; choose another")
    found = ask()
    text = pasted_text(name, found.pasted, "this machine's own answers")
    if out is None:
        sys.stdout.write(shown_lines(text))
    else:
        with all_or_none(out):
            write_bytes(out, text.encode())
            note_written([out], "profile detect")
        say(f"wrote {out}")
    for remark in found.remarks:
        say(remark)
    _say_pasted(found.pasted)
    say("moesim profile measure times this machine, and moesim calibrate corrects rates by observed speeds")


def _say_pasted(found: Pasted) -> None:
    """Say from which outputs a machine was read, what contradicts, and what is missing."""
    for source in found.sources:
        say(f"read {source.name}: written after {source.tried}")
    for words in found.remarks:
        say(words)
    for words in found.missing:
        say(f"missing: {words}")


FOLDER = Path("hardware_profiles")
"""Where profiles are found by name."""


def new(
    name: Annotated[str, typer.Argument(help="Of the profile, such as mybox.")],
    pcie: Annotated[
        str | None, typer.Option(metavar="LINK|RATE", help="Of each GPU: 4x16, B450, OCuLink; or its rate, such as 25GB/s.")
    ] = None,
    transfer: Annotated[
        str | None, typer.Option(metavar="TIME", help="Of an expert's copy to the GPU, such as 14.2ms; instead of --pcie.")
    ] = None,
    cpu: Annotated[
        str | None,
        typer.Option(metavar="CPU|TIME", help="'ryzen 5 5600', 60GB/s; or the time of an expert: '1.5ms + 400us/token'."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="GPU|TIME", help="'rtx 3060', '2x rtx 3090'; or the time of an expert: 200us.")
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Of the GPU's memory, such as 936GB/s.", show_default="that of --gpu's experts"),
    ] = None,
    vram: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory of the GPU, such as 12GiB.")] = None,
    ram: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of the host, such as '2x32 ddr4-3200' or 64GiB.")
    ] = None,
    disk: Annotated[str | None, typer.Option(metavar="KIND", help="Of the drive: nvme5, nvme4, nvme3, sata, hdd.")] = None,
    system: Annotated[
        str | None, typer.Option("--os", metavar="NAME", help="windows, linux, macos, wsl2.", show_default="linux")
    ] = None,
    paste: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FILE|-",
            help="Outputs of nvidia-smi, lscpu, nvbandwidth, MLC and others, in any order; options win.",
        ),
    ] = None,
    of: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="MODEL",
            help="Whose expert the times are of: a name, or {base: NAME, expert_bits: 4}.",
            show_default="{base: mixtral-8x7b, expert_bits: 4}",
        ),
    ] = None,
    source: Annotated[
        Literal["published", "spec-sheet", "derived", "assumed"], typer.Option(help="Label of all these numbers.")
    ] = "assumed",
    ref: Annotated[
        str | None, typer.Option(help="Where they are from, such as 'Paper, Table 3'.", show_default="typed in")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Where to write it.", show_default="hardware_profiles/NAME.yaml")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Write a profile from parts, or numbers that a paper prints. It names what is assumed.

    Example: moesim profile new mybox --gpu "rtx 3060" --cpu "ryzen 5 5600" --ram "2x32 ddr4-3200" --pcie 4x16
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(f"profile new: expected a name of letters, digits, dots and dashes, got '{name}'; choose another")
    path = out or FOLDER / f"{name}.yaml"
    parts = {"gpu": gpu, "cpu": cpu, "ram": ram, "pcie": pcie, "disk": disk, "os": system}
    numbers = {"pcie": pcie, "transfer": transfer, "cpu": cpu, "gpu": gpu, "gpu_memory": gpu_memory, "vram": vram, "ram": ram}
    others = {"transfer": transfer, "gpu-memory": gpu_memory, "vram": vram, "for": of, "ref": ref}
    if _are_parts({**parts, "from": paste}, others):
        given = {key: text for key, text in parts.items() if text is not None}
        if paste is None:
            _write_parts({"name": name, "parts": given}, path, overwrite)
            return
        found = read_pasted(_pasted_in(paste), "standard input" if paste == "-" else paste, given)
        for one in found.taken:
            say(f"{one.what}: {one.value} (line {one.line}: {one.text})")
        _say_pasted(found)
        _write_parts({"name": name, **found.form}, path, overwrite, pasted_text(name, found, paste))
        return
    form = short_form(name, numbers, None if of is None else name_or_mapping(of, "--for"), source, ref)
    try:
        machine = load_hardware(form, "profile new")
    except HardwareError as error:
        raise _in_options(error, source) from None
    check_out(path, suffix=".yaml", overwrite=overwrite)
    with all_or_none(path):
        write_bytes(path, short_text(form).encode())
        note_written([path], "profile new")
    say(f"times are of {expert_of(form)}" + ("; --for names another" if of is None else ""))
    if gpu_memory is None:
        rate = machine.devices["gpu0"].memory_bytes_per_s
        say(f"attention reads at {rate / 1e9:.4g} GB/s, as an expert in {gpu}; --gpu-memory gives the GPU's own rate")
    for remark in reading_remarks(machine):
        say(remark)
    say(f"wrote {path}")


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


def _pasted_in(source: str) -> str:
    """Read the file or standard input that holds what was pasted."""
    try:
        return pasted(sys.stdin.buffer.read(TABLE.most + 1) if source == "-" else read_bytes(Path(source), TABLE))
    except OSError as wrong:
        raise ConfigError(f"--from {source}: expected outputs as text, got: {why_not(wrong)}; check the path") from None


def _write_parts(form: Mapping[str, Any], path: Path, overwrite: bool, text: str = "") -> None:
    """Write a profile of parts; say what follows and what is assumed."""
    load_hardware(form, "profile new")
    check_out(path, suffix=".yaml", overwrite=overwrite)
    with all_or_none(path):
        write_bytes(path, (text or parts_text(form)).encode())
        note_written([path], "profile new")
    for line in parts_lines(load_hardware(form, "profile new", "none")):
        say(line)
    say(f"wrote {path}")


def _in_options(error: HardwareError, source: str) -> ConfigError:
    options = [_as_option(problem, source) for problem in error.problems or (str(error),)]
    return ConfigError("profile new: " + " | ".join(dict.fromkeys(options)))


def _as_option(problem: str, source: str) -> str:
    key, colon, said = problem.partition(": ")
    if colon and said.endswith(f"next to source: {source}, got nothing; add it"):
        return f"--source {source}: expected --ref with what the numbers are from, got nothing; add it"
    key = key.removeprefix("numbers.").replace("_", "-")
    return f"--{key}: {said}" if colon and re.fullmatch(r"[a-z-]+", key) and key != "numbers" else problem


app = Commands(help="Write, measure, show and compare profiles of machines.")


def _model(text: str) -> ModelSpec:
    return load_model(name_or_mapping(text, "--model"), "--model")


app.command("new")(new)
app.command("check")(check)
app.command("detect")(detect)

_ALL = "all"


def _option(*names: str, help: str, least: int | None = None, most: float | None = None, default: bool | str = True) -> Any:
    return typer.Option(*names, help=help, min=least, max=most, show_default=default)


@app.command("measure")
def measure(
    name: Annotated[str, typer.Argument(help="Of the profile, such as my-machine.")],
    model: Annotated[
        list[str] | None,
        _option(
            help="Built-in name, config.json or YAML of a model; several times; 'all': every built-in one.",
            default="mixtral-8x7b, deepseek-v2-lite",
        ),
    ] = None,
    bits: Annotated[
        list[float] | None,
        _option(help="Of the experts' weights; several times.", least=0, most=BITS.most, default="each model's own"),
    ] = None,
    mode: Annotated[str, _option(help="quick: up to 64 rows; full: up to 4096.")] = "full",
    disk: Annotated[Path | None, _option(help="Folder on the disk to measure.", default="that of --out, without a GPU")] = None,
    no_disk: Annotated[bool, _option("--no-disk", help="Measure no disk.")] = False,
    gpu: Annotated[int | None, _option(help="Which GPU.", least=0, most=PROCESSES.most, default="the first, if any")] = None,
    no_gpu: Annotated[bool, _option("--no-gpu", help="Measure cores, memory and disk only.")] = False,
    memory: Annotated[str | None, _option(help="Host memory to use, such as 8GB.", default="half of what is available")] = None,
    repeats: Annotated[
        int | None, _option(help="Of each probe, at least 5.", least=1, most=REPEATS.most, default="quick 5, full 7")
    ] = None,
    seed: Annotated[int, _option(help="Of the order and the random weights.", least=0, most=COUNT.most)] = 0,
    out: Annotated[Path, _option("--out", help="Folder of profiles.")] = Path("hardware_profiles"),
    resume: Annotated[bool, _option("--resume/--no-resume", help="Go on with what was interrupted.")] = True,
    overwrite: Annotated[bool, _option("--overwrite", help="Replace a profile that is there.")] = False,
    dry_run: Annotated[bool, _option("--dry-run", help="Print the plan; measure nothing.")] = False,
    progress: Annotated[bool, _option("--progress/--no-progress", help="Show a bar on a terminal.")] = True,
) -> None:
    """Measure this machine and write it as a profile.

    It has the costs of experts, dense parts and copies.

    Random weights take as long as trained ones. No setting of the machine is changed. After a kill, the same command goes
    on where it was.

    Example: moesim profile measure my-machine --mode quick --memory 2GB --dry-run
    """
    for what, both in (("disk", disk is not None and no_disk), ("gpu", gpu is not None and no_gpu)):
        if both:
            raise ConfigError(f"--{what} and --no-{what}: expected one of them, got both")
    named = model or ["mixtral-8x7b", "deepseek-v2-lite"]
    models = tuple(builtin_models().values()) if named == [_ALL] else tuple(_model(each) for each in named)
    budget = None if memory is None else parse_bytes(memory, "--memory")
    if not dry_run:
        check_out_folder(out, option="--out")
        require_torch()
    from moesim.live.kernels.host import has_torch
    from moesim.live.profiler.request import Request, describe_plan, find_gpu, prepare

    which = None if no_gpu else find_gpu(gpu)
    if disk is None and which is None and not no_disk:
        if not dry_run:
            out.mkdir(parents=True, exist_ok=True)
        disk = out if out.is_dir() else Path()
    request = Request(
        name, models, tuple(bits or ()), mode, budget, disk, which, out, seed, repeats, resume=resume, overwrite=overwrite
    )
    prepared = prepare(request)
    if dry_run:
        sys.stdout.write(describe_plan(prepared))
        if which is None and not no_gpu and not has_torch():
            say("PyTorch is not installed, so that no GPU was looked for")
        return
    from moesim.live.profiler.measure import measure as carry_out  # PyTorch takes seconds to import

    paths = carry_out(prepared, progress=progress, warn=lambda text: say(f"moesim: warning: {text}"))
    for path in paths:
        print(shown(str(path)))


@app.command("show")
def show(
    profile: Annotated[str, typer.Argument(metavar="NAME|FILE.yaml", help="A profile.")],
    model: Annotated[
        list[str] | None,
        typer.Option(help="Whose experts are computed and sent; a name, or {base: NAME, expert_bits: 4}; several times."),
    ] = None,
) -> None:
    """Print a profile: its numbers and their sources.

    Example: moesim profile show rtx3090-epyc7532
    """
    models = [_model(each) for each in model or ()]
    print_table(page(load_hardware(profile, "profile show"), models))


@app.command("compare")
def compare(
    a: Annotated[str, typer.Argument(metavar="A", help="A profile.")],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.")],
    model: Annotated[str, typer.Option(help="Whose experts and dense part are costed.")] = "mixtral-8x7b",
    form: Printed = Format.TABLE,
) -> None:
    """Print two profiles side by side.

    Example: moesim profile compare rtx3090-epyc7532 zen4-2core
    """
    one, two = load_hardware(a, "profile compare"), load_hardware(b, "profile compare")
    rows = compare_profiles(one, two, _model(model))
    sys.stdout.write(comparison_table(rows, one.name, two.name, form))
