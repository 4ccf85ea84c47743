"""``moesim plot``: figures of the catalogue, from what other commands have written."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from moesim.api.figures import plot as draw
from moesim.api.outputs import check_out_folder
from moesim.cli.options import Inputs, Trust
from moesim.core.table import Format, render
from moesim.core.text import say
from moesim.errors import ConfigError, unknown_name


def plot(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="KIND... RESULT...", help="Kinds of figures, then folders, files or a trace; or `list`."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FOLDER", help="Where to write; required unless kinds are listed.")
    ] = None,
    baseline: Annotated[str | None, typer.Option(help="Policy that speed-ups are over; default: the first.")] = None,
    policies: Annotated[str, typer.Option(help="Names in their order, separated by commas; default: all.")] = "",
    x: Annotated[
        str | None, typer.Option("--x", metavar="NAME", help="Setting on the x axis, in a heat map also an option.")
    ] = None,
    y: Annotated[str | None, typer.Option("--y", metavar="NAME", help="Setting or option on the y axis of a heat map.")] = None,
    panel: Annotated[str | None, typer.Option(metavar="NAME", help="Setting of which each value has a panel.")] = None,
    metric: Annotated[str | None, typer.Option(help="A number of the rows, as docs/reference/metrics.md names it.")] = None,
    where: Annotated[
        list[str], typer.Option("--where", metavar="KEY=VALUE", help="Only rows with this value, such as batch_size=4.")
    ] = [],  # noqa: B006  (typer copies it)
    label: Annotated[
        list[str], typer.Option("--label", metavar="POLICY=NAME", help="Name of a policy in the figures, such as dali=Ours.")
    ] = [],  # noqa: B006
    more: Annotated[
        list[str], typer.Option("--option", metavar="KEY=VALUE", help="What else a kind takes, such as layers=15,16; see --list.")
    ] = [],  # noqa: B006
    medium: Annotated[str, typer.Option("--for", help="screen, or paper: no title and no provenance in the picture.")] = "screen",
    width: Annotated[
        str | None, typer.Option(metavar="WIDTH", help="column, page, slide, or inches; default: as wide as a kind needs.")
    ] = None,
    trust: Trust = False,
    inputs: Inputs = None,
    listed: Annotated[bool, typer.Option("--list", help="List the kinds and what they need.")] = False,
) -> None:
    """Draw figures of results. Each is a PDF and a PNG, with its data as CSV and its caption as text.

    Settings that a figure does not show are never averaged away: there is one figure for each combination.
    Figures of records that are not in the folder simulate their runs again; that needs the trace, and policies that are not
    moesim's own need --trust.

    Example: moesim plot decode_speed hit_rate results/quickstart --out figures --for paper
    """
    from moesim.plots.catalogue import KINDS  # Matplotlib takes most of a second to import
    from moesim.plots.drawing import OPTIONS
    from moesim.plots.style import MEDIA, parse_width

    words = list(arguments or [])
    if listed or words == ["list"]:
        sys.stdout.write(_listing())
        return
    n_kinds = next((i for i, word in enumerate(words) if word not in KINDS), len(words))
    if words and n_kinds == 0:
        raise ConfigError(f"plot: {unknown_name('kind of figure', words[0], KINDS)}; `moesim plot list` says what they need")
    if medium not in MEDIA:
        raise ConfigError(f"plot: --for: {unknown_name('medium', medium, MEDIA)}")
    if out is None:
        raise ConfigError("plot: expected --out FOLDER, got nothing; name a folder for the figures")
    check_out_folder(out, option="--out")
    inches = None if width is None else parse_width(width, "plot: --width")
    given = dict(zip(OPTIONS, (baseline, x, y, panel, metric), strict=True)) | dict(_pair(text, "--option") for text in more)
    written = draw(
        words[:n_kinds], words[n_kinds:], out, policies=split_names(policies), width=inches, medium=medium, trust=trust,
        where=dict(_pair(text, "--where") for text in where), label=dict(_label(text) for text in label), inputs=inputs,
        **{name: value for name, value in given.items() if value is not None},
    )  # fmt: skip
    for path in written:
        say(f"wrote {path}")


def split_names(text: str) -> list[str]:
    """Split names at commas, but not within brackets, where they separate options.

    >>> split_names("lru, dali(prefetch_size=0,u_size=0)")
    ['lru', 'dali(prefetch_size=0,u_size=0)']
    """
    names, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            names.append("")
        else:
            names[-1] += character
    return [name.strip() for name in names if name.strip()]


def _pair(text: str, option: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (separator and key and value):
        raise ConfigError(f"plot: {option}: expected KEY=VALUE, got '{text}'")
    return key.strip(), value.strip()


def _label(text: str) -> tuple[str, str]:
    """Read a policy and its name; options of the policy have equals signs of their own.

    >>> _label("dali(w_size=2)=Ours")
    ('dali(w_size=2)', 'Ours')
    """
    name, separator, label = text.rpartition("=")
    if not (separator and name.strip() and label.strip()):
        raise ConfigError(f"plot: --label: expected POLICY=NAME, got '{text}'")
    return name.strip(), label.strip()


def _listing() -> str:
    from moesim.plots.catalogue import KINDS, SOURCES, options_of
    from moesim.plots.drawing import OPTIONS

    def options(name: str) -> str:
        return " ".join(f"--{one}" if one in OPTIONS else f"{one}=" for one in options_of(KINDS[name])) or "-"

    rows: Sequence[Sequence[str]] = [[name, kind.title, options(name), SOURCES[kind.source]] for name, kind in KINDS.items()]
    return render(["kind", "what it shows", "options", "what it needs"], rows, Format.TABLE)
