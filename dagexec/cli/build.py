"""`dagexec build`: compile a model once, and keep what that decided in a file that opens at little cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from dagexec.cli.arguments import (
    ChoicesOption,
    IntraOpThreadsOption,
    NetTypeOption,
    NumWorkersOption,
    OptimizeOption,
    PassOption,
    SetOption,
    TuningSecondsOption,
    kept_choices,
    parse_arguments,
)
from dagexec.cli.feeds import AllowIoOption, ModelArgument, ShapeOption, parse_shapes, read_model
from dagexec.cli.progress import progress_line
from dagexec.errors import SettingError
from dagexec.executor.compile import build
from dagexec.executor.source.loading import PLAN_SUFFIX
from dagexec.options import CompileOptions


def build_command(
    model: ModelArgument,
    file: Annotated[Path, typer.Option("--output", "-o", metavar="FILE.dagexec", help="The file to write.")],
    shape: ShapeOption = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option("--dtype", help="The type that the net computes in.")
    ] = "float32",
    net_type: NetTypeOption = None,
    num_workers: NumWorkersOption = None,
    intra_op_threads: IntraOpThreadsOption = None,
    max_batch: Annotated[int, typer.Option("--max-batch", min=1, help="The most rows of requests in one run.")] = 1,
    optimize: OptimizeOption = True,
    own_passes: PassOption = None,
    tuning_seconds: TuningSecondsOption = None,
    settings: SetOption = None,
    choices: ChoicesOption = None,
    allow_io: AllowIoOption = False,
) -> None:
    """Compile MODEL for this machine, and save it as a plan, which `dagexec.open` and `dagexec serve` open at once."""
    if file.suffix != PLAN_SUFFIX:
        raise SettingError(f"{file}: the name of a plan ends with {PLAN_SUFFIX}")
    loaded = read_model(model, allow_io)
    with kept_choices(choices), progress_line(f"Compiling {loaded.name}") as line:
        options = CompileOptions(
            shapes=parse_shapes(shape or ())[0] or None,
            dtype=dtype,
            net_type=net_type,
            num_workers=num_workers,
            intra_op_threads=intra_op_threads,
            max_batch=max_batch,
            optimize=optimize,
            passes=own_passes or (),
            tuning_seconds=tuning_seconds,
            operator_arguments=parse_arguments(settings) or None,
            progress=line,
        )
        build(loaded, file, options).close()
    print(f"{loaded.name}: a plan of {file.stat().st_size:,} bytes written to {file}")
