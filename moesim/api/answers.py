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
from moesim.studies.advice import recommend as advice
from moesim.studies.advice.question import Asked
from moesim.studies.advice.show import flat, output, write_folder

if TYPE_CHECKING:
    from moesim.api.identified import Identified


class Advice(Answer, advice.Advice):
    """The best placement of a model's experts on a machine, with runners-up."""

    _shown = ("placement", "runnable", "decode_tokens_per_s", "low", "high", "ttft_s", "ratio_to_best", "label")

    def _rows(self) -> list[dict[str, Any]]:
        return [flat(self, one) for one in (*self.runnable, *self.papers)]

    def _text(self, form: Format) -> str:
        return output(self, form)

    def _save(self, folder: Path) -> None:
        write_folder(self, folder)

    def __repr__(self) -> str:
        setting, best = self.setting, self.best
        where = f"{setting.model.name} on {setting.hardware.name}"
        return f"<Advice: {best.candidate.title} for {where}, {digits(best.speed.value)} tokens/s>"


@checked(
    "recommend", vram="size", ram="size", bits="number", batch="count", prompt="count", decode="count", context="count",
    trace="path", calibrate="path", lossy="flag", jobs="count", progress="flag",
)  # fmt: skip
def recommend(
    model: str | Path | Mapping[str, Any] | ModelSpec, hardware: str | Path | Mapping[str, Any] | HardwareProfile, *,
    vram: str | None = None, ram: str | None = None, bits: float | None = None, batch: int = 1, prompt: int = 512,
    decode: int = 128, context: int | None = None, trace: str | Path | None = None, hit_rate: str | None = None,
    calibrate: str | Path | None = None, lossy: bool = False, jobs: int | None = None, progress: bool = True,
) -> Advice:  # fmt: skip
    """Find the best placement of a model's experts on a machine.

    Parameters
    ----------
    model : str, Path, mapping or ModelSpec
        As of `moesim.load_model`.
    hardware : str, Path, mapping or HardwareProfile
        As of `moesim.load_hardware`.
    vram, ram : str, optional
        Memory of the GPU and of the host, such as ``"12GiB"``; default: the profile's.
    bits : float, optional
        Bits per weight; default: 4.5 for models given with 16, else the model's. A GGUF file has its own.
    batch, prompt, decode : int
        Requests at once, and tokens of each.
    context : int, optional
        Tokens of a request in the KV cache; default: prompt and decode.
    trace : str or Path, optional
        Routing; default: a recording of the model, else routing with its statistics, else assumed routing.
    hit_rate : str, optional
        As of `moesim.compare`.
    calibrate : str or Path, optional
        Observed speeds, as of `moesim.calibrate`: identifies the machine first, and adds llama.cpp's settings.
    lossy : bool
        Policies that change what the model computes as well.
    jobs : int, optional
        Processes; default: all cores where that is faster.
    progress : bool
        Show a bar.

    Returns
    -------
    Advice
        ``best`` placement, runners-up with intervals (``table``), ``text()`` with commands to type, ``save(folder)``.

    Raises
    ------
    InputError
        If something that was asked for is wrong, or nothing fits.
    """
    asked = Asked(
        written(model, "recommend: model"), written(hardware, "recommend: hardware"), vram, ram, bits,
        batch, prompt, decode, context, None if trace is None else str(trace), hit_rate, lossy,
    )  # fmt: skip
    from moesim.studies.advice.recommend import recommend as search  # SciPy takes most of a second to import
    from moesim.studies.advice.recommend import recommend_observed

    if calibrate is None:
        return Advice(**vars(search(asked, jobs=jobs, progress=progress)))
    return Advice(**vars(recommend_observed(asked, Path(calibrate), jobs=jobs, progress=progress)))


@checked(
    "calibrate", observations="path", models="names", free="names", name="text", out="path", contribute="path",
    any_machine="flag", progress="flag",
)  # fmt: skip
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
