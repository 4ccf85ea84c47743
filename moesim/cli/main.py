"""The command line: each command is a thin layer over a function, and errors are one line.

Exit codes: 0 done; 1 a run failed; 2 the input is wrong, and nothing was written.
"""

from __future__ import annotations

import ast
import errno
import io
import logging
import os
import re
import sys
import tempfile
from collections.abc import Collection, Sequence
from enum import StrEnum
from functools import cache
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.completion import completion_init, get_completion_script  # type: ignore[attr-defined]

from moesim import __version__
from moesim.cli.help import Commands
from moesim.core.files import FULL, write_error
from moesim.core.text import LOG, PROGRESS, complain
from moesim.errors import ConfigError, InputError, InterruptError, MoesimError, unknown_name

VERBS = {
    "demo": "demo", "run": "runs", "compare": "runs",
    "capacity": "capacity", "whatif": "whatif", "recommend": "recommend", "calibrate": "calibrate", "diff": "diff",
    "plot": "plot", "report": "report", "explore": "explore", "replay": "replay", "validate": "validate", "check": "check",
    "list": "listing",
    "model": "listing", "schema": "schema", "papers": "papers", "league": "league", "regret": "regret",
    "bench": "bench", "profile": "profile", "trace": "traces",
}  # fmt: skip
"""Commands in the order of ``--help`` -> modules of this package. A module is imported if its command is asked for."""
_NAMES = {"list": "listing"}  # where the function has another name than the command
_COMPLETE = "_MOESIM_COMPLETE"  # what a shell sets that asks for completions
_GROUPS = ("profile", "trace")  # commands with commands of their own


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moesim {__version__}")
        raise typer.Exit


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def _print_completion(shell: Shell | None) -> None:
    if shell is not None:
        print(get_completion_script(prog_name="moesim", complete_var=_COMPLETE, shell=shell.value))
        raise typer.Exit


def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")] = False,
    completion: Annotated[
        Shell | None,
        typer.Option(callback=_print_completion, is_eager=True, help="Print what completes commands in a shell."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the answer and errors; before or after a command.")] = False,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Also which files were read and why; before or after a command.")
    ] = False,
) -> None:
    pass


def _made(verbs: Collection[str]) -> typer.Typer:
    """Make the command line with these commands; of others only the line of ``--help``."""
    made = Commands(
        name="moesim",
        add_completion=False,  # it would write into files of the shell
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Simulate offloaded inference of Mixture-of-Experts models: what a policy would cost on a machine.",
    )
    made.callback()(_options)
    for verb, module in VERBS.items():
        if verb not in verbs:
            made.command(verb, help=_summary(verb, module))(_options)
        elif verb in _GROUPS:
            made.add_typer(import_module(f"moesim.cli.{module}").app, name=verb)
        else:
            made.command(verb)(getattr(import_module(f"moesim.cli.{module}"), _NAMES.get(verb, verb)))
    return made


def _summary(verb: str, module: str) -> str:
    """Read the help of a command from its source: its docstring, or the help of its group."""
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if verb in _GROUPS and isinstance(node, ast.keyword) and node.arg == "help" and isinstance(node.value, ast.Constant):
            return str(node.value.value)
        if isinstance(node, ast.FunctionDef) and node.name == _NAMES.get(verb, verb):
            return str(ast.get_docstring(node))
    raise AssertionError(f"moesim {verb}: no summary in {module}.py")


def __getattr__(name: str) -> Any:
    """Make the whole command line when documentation or tests ask for it."""
    if name == "_app":
        return _whole()
    raise AttributeError(name)


@cache
def _whole() -> typer.Typer:
    return _made(VERBS)


_LONGEST = 1500  # characters of a message
_INTERRUPTED = 130
# What makes a path that was given unreadable. A file that is not there is none of these: whoever opens it says what was expected.
_OF_PATHS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE, errno.EOVERFLOW)


@cache
def _command(verb: str | None) -> Any:
    return typer.main.get_command(_made({verb} if verb in VERBS else ()))


def main(arguments: list[str] | None = None) -> int:
    """Run a command."""
    try:
        given = arguments = _heard(_as_meant(sys.argv[1:] if arguments is None else arguments))
    except InputError as error:
        return _fail(str(error), 2)
    verb = next((word for word in given if not word.startswith("-")), None)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a pipe of Windows may not have every character
        sys.stdout.reconfigure(errors="replace")
    if _COMPLETE in os.environ:
        completion_init()
    try:
        command = typer.main.get_command(_whole()) if _COMPLETE in os.environ else _command(verb)
        result = command(args=arguments, prog_name="moesim", standalone_mode=False)
    except InputError as error:
        return _fail(error.of_command or str(error), 2)
    except InterruptError as error:
        return _fail(str(error), _INTERRUPTED)
    except MoesimError as error:
        return _fail(error.of_command or str(error), 1)
    except typer.Exit as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno in FULL:  # of scratch files: whoever writes a result says which
            return _fail(str(write_error(Path(os.fsdecode(error.filename or tempfile.gettempdir())), error)), 1)
        if error.errno not in _OF_PATHS or not isinstance(error.filename, (str, bytes, os.PathLike)):
            raise
        path, reason = os.fsdecode(error.filename), error.strerror
        return _fail(f"{path}: expected to read it, got: {reason}; fix that, or choose another path", 2)
    except Exception as error:
        # Typer's own errors about options; anything else is a defect, and its traceback is what helps.
        if type(error).__name__ == "NoArgsIsHelpError":
            print(error.ctx.get_help())  # type: ignore[attr-defined]
            return 2
        if hasattr(error, "format_message"):
            command = getattr(getattr(error, "ctx", None), "command", None)
            known = {name for one in getattr(command, "params", ()) for name in one.opts}
            message = _with_words(_with_verbs(error), given, known)
            return _fail(message, 2)
        raise
    if result == _INTERRUPTED:  # Typer turns Ctrl-C into this exit code, and says nothing
        return _fail("interrupted", _INTERRUPTED)
    return result if isinstance(result, int) else 0


def _as_meant(given: list[str]) -> list[str]:
    """Read what other programs take for ``--version`` and ``--help``.

    >>> _as_meant(["version"]), _as_meant(["help", "run"]), _as_meant(["run", "-v"])
    (['--version'], ['run', '--help'], ['run', '-v'])
    """
    if given in (["version"], ["-v"], ["-V"]):
        return ["--version"]
    return [*given[1:], "--help"] if given[:1] == ["help"] else given


_LEVELS = {"--quiet": logging.ERROR, "-q": logging.ERROR, "--verbose": logging.DEBUG}


def _heard(given: list[str]) -> list[str]:
    """Set what is printed besides the answer by ``--quiet`` and ``--verbose``, wherever they stand; return the other words."""
    end = given.index("--") if "--" in given else len(given)
    asked = {_LEVELS[word] for word in given[:end] if word in _LEVELS}
    if len(asked) > 1:
        raise ConfigError("--quiet, --verbose: expected one of them, got both; leave one out")
    level = asked.pop() if asked else logging.WARNING
    LOG.setLevel(level)
    for handler in LOG.handlers:
        getattr(handler, "printed", set()).clear()  # of an earlier command in this process
    PROGRESS.setLevel(logging.ERROR if level == logging.ERROR else logging.INFO)
    return [word for i, word in enumerate(given) if i >= end or word not in _LEVELS]


def _with_verbs(error: Any) -> str:
    """Return the message of Typer's error; of an unknown command with those known."""
    message = str(error.format_message())
    if error.ctx is None:
        return message
    if missing := re.match(r"Missing argument '(\w+)", message):
        example = re.search(r"Example: (.*)", error.ctx.command.help or "")
        path = " ".join(error.ctx.command_path.split()[1:])
        return f"{path}: expected {missing[1].upper()}, got nothing" + (f"; for example: {example[1]}" if example else "")
    wrong = re.match(r"No such command '(.*)'\.", message)
    if wrong is None:
        return message
    group = error.ctx
    where = " ".join(group.command_path.split()[1:])
    known = list(group.command.list_commands(group))
    if not where and wrong[1].endswith((".yaml", ".yml")):
        return f"unknown command '{wrong[1]}'; for an experiment: moesim run {wrong[1]}"
    if not where and wrong[1] in import_module("moesim.model.load").model_names():
        return f"unknown command '{wrong[1]}'; for a model: moesim recommend --model {wrong[1]}"
    return f"{where + ': ' if where else ''}{unknown_name('command', wrong[1], known)}"


def _with_words(message: str, given: Sequence[str], known: Collection[str]) -> str:
    """Add to the message of Typer's error the value that an option got, or the option that takes none."""
    after = dict(pairwise(given))
    if wrong := re.match(r"Invalid value for '(-[\w-]+)': Input should be a valid (number|integer), unable to parse", message):
        kind = "a number" if wrong[2] == "number" else "an integer"
        return f"{wrong[1]}: expected {kind}, got {after.get(wrong[1])!r}; write no unit"
    if (wrong := re.match(r"Invalid value for '(-[\w-]+)'", message)) and (value := after.get(wrong[1])) not in (None, ""):
        return message if str(value) in message else f"{message}, got {value!r}"
    if wrong := re.match(r"Invalid value for '(\w+)': (?:Value error, )?'(.*)' is not one of (.*)\.$", message):
        return unknown_name(wrong[1], wrong[2], re.findall(r"'([^']*)'", wrong[3]))
    if message == "Missing option '--policies'.":
        named = [word.strip(",") for before, word in pairwise(given) if not before.startswith("-") and not word.startswith("-")]
        return f"{given[0]}: expected --policies NAME,NAME, got none; write --policies {','.join(named) or 'lru,dali'}"
    if extra := re.match(r"Got unexpected extra arguments?(?:\(s\))? \((\S+)", message):
        option = next((one for one, value in after.items() if value == extra[1].rstrip(")") and one.startswith("--")), None)
        if option is not None:
            return f"{message}; {option} takes no value"
        if given[1:2] == [extra[1].rstrip(")")] and "--model" in known:
            return f"{given[0]}: expected options, got {given[1]}; write --model {given[1]}"
        word = extra[1].rstrip(")")
        option, value = given[max(0, given.index(word) - 2) :][:2] if word in given else ("", "")
        return f'{message}; quote what has spaces: {option} "{value} {word} ..."' if option in known else message
    if (wrong := re.match(r"No such option: (--?[\w-]+)", message)) and (same := _OPTIONS_OF_ENGINES.get(wrong[1], "")) in known:
        return f"{given[0]}: no such option: {wrong[1]}; here it is {same}"
    return message


_OPTIONS_OF_ENGINES: Final = {
    "--ctx-size": "--context", "-c": "--context", "--ctx": "--context", "-m": "--model", "--ubatch-size": "--ubatch",
}  # fmt: skip
"""llama.cpp's options -> those of this program, where a verb has them."""


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    if len(line) > _LONGEST:  # it quotes what was given
        line = f"{line[: _LONGEST * 2 // 3]} ... {line[-_LONGEST // 3 :]}"
    complain(f"moesim: {line}")
    return code


def app() -> None:
    """Run as the console script ``moesim``."""
    sys.exit(main())


if __name__ == "__main__":
    app()
