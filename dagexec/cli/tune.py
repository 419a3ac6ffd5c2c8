"""`dagexec tune`: measure layouts and kernels for a model once, and keep the best for later compilations."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from dagexec.analysis.comparison import random_feeds
from dagexec.binding.io_binding import Array
from dagexec.cli.arguments import (
    ChoicesOption,
    IntraOpThreadsOption,
    IslandsOption,
    NetTypeOption,
    NumWorkersOption,
    kept_choices,
)
from dagexec.cli.compiled import choices_in_words
from dagexec.cli.feeds import AllowIoOption, JsonOption, ModelArgument, ShapeOption, read_model, with_shapes
from dagexec.cli.json_output import print_json
from dagexec.cli.progress import progress_line
from dagexec.compiler.compilation import compile_model
from dagexec.core.choices import cache_file
from dagexec.executor.compile import compile
from dagexec.executor.executor import Executor
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.options import CompileOptions

_ROUNDS = 15


def tune_command(
    model: ModelArgument,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="Time limit, including preparation.")] = 30.0,
    shape: ShapeOption = None,
    net_type: NetTypeOption = None,
    num_workers: NumWorkersOption = None,
    intra_op_threads: IntraOpThreadsOption = None,
    islands: IslandsOption = None,
    choices: ChoicesOption = None,
    allow_io: AllowIoOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how MODEL runs fastest on this machine; later compilations with the same options use the result."""
    loaded, shapes = with_shapes(read_model(model, allow_io), shape or ())
    options = CompileOptions(
        net_type=net_type,
        num_workers=num_workers,
        intra_op_threads=intra_op_threads,
        islands=islands,
        shapes=shapes,
        tuning_seconds=0,
    )
    feeds = random_feeds(loaded, shapes)
    with kept_choices(choices):
        start = time.perf_counter()
        with compile(loaded, options) as before:
            before.run(feeds)
            with progress_line(f"Tuning {loaded.name}", quiet=as_json) as progress:
                tuned = compile_model(loaded, replace(options, tuning_seconds=seconds, progress=progress))
            took = time.perf_counter() - start
            with compile(loaded, options) as after:
                times = _interleaved([before, after], feeds)
    found = engine_library()
    lines = choices_in_words(tuned)
    kept = choices or cache_file()
    if as_json:
        print_json(
            {
                "model": loaded.name,
                "instruction_set": None if found is None else found.isa.name,
                "seconds": took,
                "choices": lines,
                "kept_in": None if kept is None else str(kept),
                "ms_before": times[0] * 1e3,
                "ms_after": times[1] * 1e3,
            }
        )
        return
    console = Console()
    for line in lines:
        console.print(line, markup=False)
    where = "nowhere: $DAGEXEC_CHOICES is off" if kept is None else str(kept)
    console.print(
        f"{loaded.name}: {times[0] * 1e3:.2f} ms per run before, {times[1] * 1e3:.2f} after; measured in {took:.1f} s, "
        f"saved in {where}",
        markup=False,
    )


def _interleaved(executors: Sequence[Executor], feeds: Mapping[str, Array]) -> list[float]:
    """The median seconds of a run of each executor, in alternating runs."""
    times: list[list[float]] = [[] for _ in executors]
    for _ in range(_ROUNDS):
        for executor, row in zip(executors, times, strict=True):
            start = time.perf_counter()
            executor.run(feeds)
            row.append(time.perf_counter() - start)
    return [float(np.median(row)) for row in times]
