"""Questions from Python: what suits a machine, and what a machine's constants are."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moesim.api.arguments import checked, written
from moesim.api.result import Answer
from moesim.core.files import check_own_folder, write_bytes
from moesim.core.progress import telling
from moesim.core.table import Format
from moesim.core.units import digits
from moesim.errors import ConfigError
from moesim.hardware import HardwareProfile, load_hardware
from moesim.hardware.parts import find_cpu
from moesim.model import ModelSpec
from moesim.studies.advice.question import ENGINE, Asked
from moesim.studies.advice.recommend import Recommendation
from moesim.studies.advice.screen import output, rows_of, write_folder

if TYPE_CHECKING:
    from moesim.api.identified import Identified


class Advice(Answer, Recommendation):
    """The best setting of an engine for a model on a machine."""

    _shown = ("options", "context_tokens", "tokens_per_s", "low_tokens_per_s", "high_tokens_per_s", "gpu_bytes", "fits")

    def _rows(self) -> list[dict[str, Any]]:
        return rows_of(self)

    def _text(self, form: Format) -> str:
        return output(self, form)

    def _save(self, folder: Path) -> None:
        write_folder(self, folder)

    def __repr__(self) -> str:
        where = f"{self.setting.model.name} on {self.setting.hardware.name}"
        speed = self.decode or self.begin
        said = "nothing fits" if speed is None else f"{self.what}, {digits(speed.value)} tokens/s"
        return f"<Advice: {self.engine.name}: {said} for {where}>"


@checked("recommend", vram="size", ram="size", batch="count", prompt="count", decode="count", context="count", jobs="count")
def recommend(
    model: str | Path | Mapping[str, Any] | ModelSpec | None = None,
    hardware: str | Path | Mapping[str, Any] | HardwareProfile | None = None, *,
    engine: str = ENGINE, vram: str | None = None, ram: str | None = None, bits: str = "", context: int | None = None,
    batch: int = 1, prompt: int = 512, decode: int = 128, calibrate: str | Path | None = None, all_engines: bool = False,
    quick: bool = False, trace: str | Path | None = None, hit_rate: str | None = None, jobs: int | None = None,
    progress: bool = True,
) -> Advice:  # fmt: skip
    """Find an engine's best setting for a model on a machine, what limits it, and what would help.

    Parameters
    ----------
    model : str, Path, mapping or ModelSpec, optional
        As of `moesim.load_model`; default: the one that the observed speeds name.
    hardware : str, Path, mapping or HardwareProfile, optional
        As of `moesim.load_hardware`, such as ``"RTX 3060 + Ryzen 5 5600 + 64GB DDR4-3200"``; default: the parts that the
        observed speeds name.
    engine : str
        Whose command is wanted, as ``moesim recommend --engine``; ``NAME@BUILD`` has the costs of a build.
    vram, ram : str, optional
        Memory of the GPU and of the host, such as ``"12GiB"``; default: the profile's.
    bits : str
        A quantisation such as ``"Q4_K_M"``, or bits per weight, ``"4.85/5.35"`` for experts and rest. Default: Q4_K_M for a
        model given with 8 bits or more, else the model's own. A GGUF file has its own.
    context : int, optional
        Tokens of a request for which there must be room; default: 16384.
    batch, prompt, decode : int
        Requests at once, and tokens of each.
    calibrate : str or Path, optional
        Observed speeds, as of `moesim.calibrate`: identifies the machine first.
    all_engines : bool
        Compare placements of all engines, too.
    quick : bool
        Leave out other engines and prompts of changed machines.
    trace : str or Path, optional
        Routing for the comparison of engines; default: a recording of the model, else routing with its statistics, else
        assumed routing.
    hit_rate : str, optional
        As of `moesim.compare`.
    jobs : int, optional
        Processes; default: all cores where that is faster.
    progress : bool
        Show a bar.

    Returns
    -------
    Advice
        ``command``, speeds in tokens/s with their interval of 90 % (``decode``, ``begin``, ``prompt``), ``limits``, ``gains``,
        ``quants``, ``other``; settings as ``table``; ``text()``, ``save(folder)``. Where nothing fits, ``command`` is None and
        ``misfit`` says why.

    Raises
    ------
    InputError
        If something that was asked for is wrong.
    """
    machine = None if hardware is None else written(hardware, "recommend: hardware")
    asked = Asked(
        None if model is None else written(model, "recommend: model"), machine, vram, ram, bits, batch, prompt, decode, context,
        None if trace is None else str(trace), hit_rate, engine,
    )  # fmt: skip
    from moesim.studies.advice.recommend import recommend as search  # SciPy takes most of a second to import

    file = None if calibrate is None else Path(calibrate)
    found = search(asked, calibrate=file, all_engines=all_engines, quick=quick, jobs=jobs, progress=progress)
    return Advice(**vars(found))


@checked("calibrate")
def calibrate(
    observations: str | Path, hardware: str | Path | Mapping[str, Any] | HardwareProfile | None = None, *,
    models: Sequence[str] = (), free: Sequence[str] = (), name: str | None = None, out: str | Path | None = None,
    any_machine: bool = False, contribute: str | Path | None = None, progress: bool = True,
) -> Identified:  # fmt: skip
    """Identify a machine's rates and fixed costs from a few observed speeds.

    Parameters
    ----------
    observations : str or Path
        A CSV table, or what llama-bench, llama-server, Ollama or another benchmark printed, with noise around it.
    hardware : str, Path, mapping or HardwareProfile, optional
        The profile to begin with; default: the parts that the file names.
    models : sequence of str
        Models of printed rows: a name, or ``"PART OF ITS TYPE=NAME"``; default: those that the rows name.
    free : sequence of str
        Constants to free; default: all.
    name : str, optional
        Of the identified profile; default: that of `out`, else ``identified``.
    out : str or Path, optional
        Folder for profile, page and figure. What the engine has simulated is kept there at once: after a stop the same call
        goes on.
    any_machine : bool
        Rows whose GPU or CPU is another than the profile names as well.
    contribute : str or Path, optional
        File to write: rows, parts of the machine and version as JSON, for the public rows.
    progress : bool
        Say on a terminal what is being done.

    Returns
    -------
    Identified
        Constants with intervals (``table``), ``bench`` with rows read, used and skipped and why, ``text()`` with rows and
        remarks, and ``raw``, the whole profile, for `moesim.load_hardware` and the ``hardware`` of a run.

    Raises
    ------
    InputError
        If the observations or the profile are wrong, or `out` holds something else.
    """
    from moesim.api.identified import Identified  # SciPy takes most of a second to import
    from moesim.studies.identify.bench import read_speeds
    from moesim.studies.identify.identify import identify
    from moesim.studies.identify.predictor import OWNER, memo_in
    from moesim.studies.identify.report import contribution

    folder = None if out is None else Path(out)
    if folder is not None:
        check_own_folder(folder, OWNER)
    name = name or ("identified" if folder is None else folder.resolve().name)
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(
            f"{folder or name}: expected a name of letters, digits, dots and dashes, as it names a profile, got '{name}'; "
            "choose another"
        )
    base = None if hardware is None else written(hardware, "calibrate: hardware")
    profile = None if base is None else load_hardware(base)
    bench = read_speeds(Path(observations), list(models), profile, any_machine=any_machine)
    if base is None and not bench.machine:
        raise ConfigError(f"{observations}: expected lines that name GPU or CPU, got none; name the machine with --hardware")
    if base is None:
        known = {key: part for key, part in bench.machine.items() if key == "gpu" or find_cpu(part) is not None}
        base = {"name": name, "parts": known or dict(bench.machine)}
    with telling(enabled=progress) as tell, memo_in(folder) as memo:
        found = Identified(**{**vars(identify(base, bench.rows, free=free, name=name, memo=memo, tell=tell)), "bench": bench})
        tell("what to measure next")
        _ = found.next_lines
        if folder is not None:
            tell("page and figure")
            found.save(folder)
    if contribute is not None:
        write_bytes(
            Path(contribute),
            (json.dumps(contribution(found, time.strftime("%Y-%m-%d", time.gmtime())), indent=1) + "\n").encode(),
        )
    return found
