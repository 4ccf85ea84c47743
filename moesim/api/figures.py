"""Figures of the catalogue, from what commands and `save` have written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from moesim.api.arguments import checked
from moesim.api.outputs import check_out_folder
from moesim.core.files import OutputFolder
from moesim.core.own_code import reading_results
from moesim.errors import ConfigError, unknown_name


@checked("plot", label="mapping")
def plot(
    kinds: str | Sequence[str], results: str | Path | Sequence[str | Path], out: str | Path, *, policies: Sequence[str] = (),
    where: Mapping[str, Any] | None = None, label: Mapping[str, str] | None = None, medium: str = "screen",
    width: str | float | None = None, trust: bool = False, inputs: str | Path | None = None, **options: Any,
) -> list[Path]:  # fmt: skip
    """Draw figures of result folders, tables or a trace; `Result.plot` draws one of what is in memory.

    Parameters
    ----------
    kinds : str or sequence of str
        As ``moesim plot list`` names them, such as ``"speedup"``.
    results : str, Path, or sequence of them
        Input of the kinds: folders, files, or the name of a trace.
    out : str or Path
        Folder to write.
    policies, where, medium, width
        As of `Result.plot`.
    label : mapping, optional
        Policies -> their names in the figures.
    trust, inputs
        As of `moesim.load`.
    **options
        Of the kinds, such as ``baseline="lru"`` or ``layers=[15, 16]``.

    Returns
    -------
    list of Path
        Of each figure PDF, PNG, its data as CSV and its caption as text.
    """
    from moesim.experiment.folder import outcome_of
    from moesim.plots.catalogue import KINDS  # Matplotlib takes most of a second to import
    from moesim.plots.drawing import Request, draw
    from moesim.plots.style import MEDIA, parse_width

    if not isinstance(results, str | Path | list | tuple):
        raise ConfigError(f"plot: results: expected folders or files, got {type(results).__name__}; its own method plot draws it")
    named = [kinds] if isinstance(kinds, str) else list(kinds)
    wrong = next((name for name in named if name not in KINDS), None)
    if wrong is not None or not named:
        said = "expected a kind of figure, got nothing" if wrong is None else unknown_name("kind of figure", wrong, KINDS)
        raise ConfigError(f"plot: {said}; `moesim plot list` says what they need")
    if medium not in MEDIA:
        raise ConfigError(f"plot: medium: {unknown_name('medium', medium, MEDIA)}")
    check_out_folder(Path(out), option="plot: out:")
    request = Request(
        named, [str(one) for one in ([results] if isinstance(results, str | Path) else results)],
        {name: ",".join(map(str, one)) if isinstance(one, list | tuple) else str(one) for name, one in options.items()},
        list(policies), [(name, str(one)) for name, one in (where or {}).items()], dict(label or {}),
        "paper" if medium == "paper" else "screen", None if width is None else parse_width(width, "plot: width"),
    )  # fmt: skip
    with reading_results(trust=trust):
        files = draw(request, partial(outcome_of, trust=trust, inputs=None if inputs is None else Path(inputs)))
    return OutputFolder(Path(out), "plot", owned=False).put(files)
