"""``--help``: what fits a screen of 50 lines and 80 columns."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import groupby
from typing import Any

import typer
from typer.core import TyperCommand
from typer.models import CommandFunctionType

_COLUMN = 26  # of names; a longer name has a line of its own
_KINDS = {"<int range>": "N", "<int>": "N", "<float range>": "X", "<float>": "X", "<str>": "TEXT", "<path>": "PATH",
          "<list[str]>": "", "<list[Path]>": ""}  # fmt: skip
_LIMIT = re.compile(r"(?:\d+<=)?x<=\d{4,}(?:\.\d+)?(?:e\+?\d+)?")  # of sanity, which nobody meets


class Command(TyperCommand):
    """A command whose help is short: kinds of values in a word, no limit beyond 1,000, its example in one line."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        self.help = re.sub(r"(?<!\b)\n(?=Example: )", "\n\b\n", self.help or "")
        super().format_help_text(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        described = [(one.param_type_name, one.get_help_record(ctx)) for one in self.get_params(ctx)]
        for kind, group in groupby(described, key=lambda one: one[0]):
            with formatter.section(f"{kind.capitalize()}s"):
                formatter.write_dl([short(*record) for _, record in group if record], col_max=_COLUMN)


def short(name: str, text: str) -> tuple[str, str]:
    """Shorten what is said of an option.

    >>> short("--prompt <int range>", "Tokens.  [default: (512); 1<=x<=1000000000]")
    ('--prompt N', 'Tokens.  [default: 512]')
    """
    for kind, word in _KINDS.items():
        name = name.replace(kind, word)
    if len(name) > _COLUMN and (choices := re.search(r"<(.*\|.*)>", name)):
        name, text = name.replace(choices[0], "WORD"), text.replace(".", f": {choices[1].replace('|', ', ')}.", 1)
    text, _, notes = text.partition("  [")
    facts = [re.sub(r"^default: \((.*)\)$", r"default: \1", one) for one in notes[:-1].split("; ") if not _LIMIT.fullmatch(one)]
    return name.strip(), f"{text}  [{'; '.join(facts)}]" if any(facts) else text


class Commands(typer.Typer):
    """Commands with this help; a defect shows Python's own traceback."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[CommandFunctionType], CommandFunctionType]:
        """Register a command."""
        return super().command(name, cls=Command, **settings)
