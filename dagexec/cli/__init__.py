"""The command line: `dagexec run`, `build`, `train`, `compare`, `inspect`, `check`, `explore`, `export`, `lab`,
`serve`, `stress`, `tune`, `operators` and `plugins`, with one module per command.

Exit status: 0 if the answer is right, 1 if results differ or a check finds a defect, 2 for wrong input or usage, and
for what cannot be written. A DagexecError is printed as one message, without a traceback. As in a shell, it is 128 and
the signal's number after Ctrl-C (130), and where nobody reads the output any more (141), as in `dagexec run | head`.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from typing import Annotated

import typer
from rich.console import Console

import dagexec
from dagexec.cli.build import build_command
from dagexec.cli.check import check_command
from dagexec.cli.compare import compare_command
from dagexec.cli.explore import explore_command
from dagexec.cli.export import export_command
from dagexec.cli.inspect import inspect_command
from dagexec.cli.lab import lab
from dagexec.cli.operators import operators_command
from dagexec.cli.plugins import plugins_command
from dagexec.cli.run import run_command
from dagexec.cli.serve import serve_command
from dagexec.cli.stress import stress_command
from dagexec.cli.train import train_command
from dagexec.cli.tune import tune_command
from dagexec.errors import DagexecError
from dagexec.platform.files import reason

app = typer.Typer(
    name="dagexec",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"dagexec {dagexec.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version, and exit.")
    ] = False,
) -> None:
    """Run neural-network operator graphs, compare runtimes on them, and look inside them."""


app.command("run")(run_command)
app.command("build")(build_command)
app.command("compare")(compare_command)
app.command("inspect")(inspect_command)
app.command("check")(check_command)
app.command("explore")(explore_command)
app.command("export")(export_command)
app.add_typer(lab, name="lab")
app.command("operators")(operators_command)
app.command("plugins")(plugins_command)
app.command("serve")(serve_command)
app.command("stress")(stress_command)
app.command("train")(train_command)
app.command("tune")(tune_command)


def main() -> None:
    """Entry point of the `dagexec` script."""
    atexit.register(gc.freeze)  # saves the interpreter three passes over all objects at the end: a quarter of a second
    status: str | int | None
    try:
        try:
            status = _status()
        except SystemExit as ended:
            if isinstance(ended.__context__, BrokenPipeError):  # typer and rich make it 1, which says that bytes differ
                raise ended.__context__ from None
            status = ended.code
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where it is noticed when that fails
    except BrokenPipeError:
        _write_nothing_more()
        status = 128 + 13
    except OSError as error:
        _write_nothing_more()
        _tell(f"dagexec: standard output cannot be written: {reason(error)}")
        status = 2
    sys.exit(status)


def _status() -> int:
    """The exit status of the command. Raises SystemExit with it, or OSError for what it could not print."""
    try:
        app(prog_name="dagexec")
    except DagexecError as error:
        _tell(f"dagexec: {type(error).__name__}: {error}")
        return 2
    except MemoryError as error:
        _tell(f"dagexec: ResourceError: the system is out of memory: {error}")
        return 2
    except RuntimeError as error:
        if str(error) != "can't start new thread":
            raise
        _tell(f"dagexec: ResourceError: the system has no more threads, or no memory for them: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _tell(message: str) -> None:
    Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)


def _write_nothing_more() -> None:
    """What is still to be written to standard output goes nowhere: the interpreter would fail with it at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
