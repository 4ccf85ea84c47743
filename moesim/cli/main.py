"""The command line. Each command is a thin layer over a function; errors are one line, and the exit code says which kind.

Exit codes: 0 done; 1 a run failed; 2 the input is wrong, and nothing was written.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import cache
from typing import Annotated, Any

import typer

from moesim import __version__
from moesim.cli import (
    assignments,
    bench,
    calibrate,
    check,
    diff,
    listing,
    papers,
    plot,
    profile,
    recommend,
    regret,
    replay,
    report,
    runs,
    schema,
    traces,
    validate,
    whatif,
)
from moesim.core.text import say
from moesim.errors import InputError, InterruptError, MoesimError

_app = typer.Typer(
    name="moesim",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Simulate offloaded inference of Mixture-of-Experts models: what a policy would cost on a machine.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"moesim {__version__}")
        raise typer.Exit


@_app.callback()
def _options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


for _function in (
    runs.run, runs.compare, whatif.whatif, recommend.recommend, calibrate.calibrate, diff.diff, plot.plot, report.report,
    replay.replay, validate.validate, check.check, listing.listing, schema.schema, papers.papers, regret.regret,
    assignments.assignments, bench.bench,
):  # fmt: skip
    _app.command("list" if _function is listing.listing else _function.__name__)(_function)
_app.add_typer(profile.app, name="profile")
_app.add_typer(traces.app, name="trace")


_LONGEST = 1500  # characters of a message
_INTERRUPTED = 130
# What makes a path that was given unreadable. A file that is not there is none of these: whoever opens it says what was expected.
_OF_PATHS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG, errno.EIO, errno.ESTALE)


@cache
def _command() -> Any:
    """Read the options of all commands, which takes longer than many a command."""
    return typer.main.get_command(_app)


def main(arguments: list[str] | None = None) -> int:
    """Run a command."""
    try:
        result = _command()(args=arguments, standalone_mode=False)
    except InputError as error:
        return _fail(str(error), 2)
    except InterruptError as error:
        return _fail(str(error), _INTERRUPTED)
    except MoesimError as error:
        return _fail(str(error), 1)
    except typer.Exit as stop:
        return stop.exit_code
    except KeyboardInterrupt:
        return _fail("interrupted", _INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno not in _OF_PATHS or not isinstance(error.filename, (str, bytes, os.PathLike)):
            raise
        path, reason = os.fsdecode(error.filename), error.strerror
        return _fail(f"{path}: expected to read it, got: {reason}; mend that, or choose another path", 2)
    except Exception as error:
        # Typer's own errors about options; anything else is a defect, and its traceback is what helps.
        if hasattr(error, "format_message"):
            if not error.format_message():  # no arguments: the help has been printed
                return 2
            return _fail(error.format_message(), 2)
        raise
    if result == _INTERRUPTED:  # Typer turns Ctrl-C into this exit code, and says nothing
        return _fail("interrupted", _INTERRUPTED)
    return result if isinstance(result, int) else 0


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    if len(line) > _LONGEST:  # it quotes what was given
        line = f"{line[: _LONGEST * 2 // 3]} ... {line[-_LONGEST // 3 :]}"
    say(f"moesim: {line}")
    return code


def app() -> None:
    """Run as the console script ``moesim``."""
    sys.exit(main())


if __name__ == "__main__":
    app()
