"""`dagexec operators`: the list of operators, and the help text of one."""

from __future__ import annotations

from typing import Annotated

import typer

import dagexec  # noqa: F401 - registers the operators
from dagexec.cli.completion import complete_operator
from dagexec.core.common_arguments import READ_BY_NETS, UNREAD
from dagexec.core.registry import registered_operators, schema_of


def operators_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[OPERATOR]", help="An operator type.", show_default=False, autocompletion=complete_operator
        ),
    ] = None,
) -> None:
    """List all operators, or show what one of them computes, its inputs, outputs and arguments."""
    if name is not None:
        print(schema_of(name).help())
        print(f"\nEvery operator accepts {', '.join(READ_BY_NETS)}, and ignores {', '.join(sorted(UNREAD))}.")
        return
    for operator_type in registered_operators():
        print(f"{operator_type:24} {schema_of(operator_type).doc.strip().splitlines()[0]}")
