"""The command line: `dagexec run`, `train`, `compare`, `inspect`, `check`, `explore`, `export`, `serve`, `stress`,
`tune` and `operators`, with one module per command.

Exit status: 0 if the answer is right, 1 if results differ or a check finds a defect, 2 for wrong input or usage. A
DagexecError is printed as one message, without a traceback.
"""

from __future__ import annotations

import gc
import sys
from typing import Annotated

import typer
from rich.console import Console

import dagexec
from dagexec.cli.check import check_command
from dagexec.cli.compare import compare_command
from dagexec.cli.explore import explore_command
from dagexec.cli.export import export_command
from dagexec.cli.inspect import inspect_command
from dagexec.cli.operators import operators_command
from dagexec.cli.run import run_command
from dagexec.cli.serve import serve_command
from dagexec.cli.stress import stress_command
from dagexec.cli.train import train_command
from dagexec.cli.tune import tune_command
from dagexec.errors import DagexecError

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
app.command("compare")(compare_command)
app.command("inspect")(inspect_command)
app.command("check")(check_command)
app.command("explore")(explore_command)
app.command("export")(export_command)
app.command("operators")(operators_command)
app.command("serve")(serve_command)
app.command("stress")(stress_command)
app.command("train")(train_command)
app.command("tune")(tune_command)


def main() -> None:
    """Entry point of the `dagexec` script."""
    try:
        app(prog_name="dagexec")
    except DagexecError as error:
        message = f"dagexec: {type(error).__name__}: {error}"
        Console(stderr=True).print(message, style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except OSError as error:  # standard output on a full disk
        Console(stderr=True).print(f"dagexec: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)
    except KeyboardInterrupt:
        gc.freeze()  # saves the interpreter a last pass over all objects at exit: a quarter of a second
        sys.exit(130)
