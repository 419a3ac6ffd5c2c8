"""Plants a candidate whose first step does not end for half an hour, and compiles.

`python -m tests.compiler.tuning.planted KIND SECONDS`, KIND one of layout, implementation or none. Standard
error has the log, with the line "planted: begun" once the step runs; standard output says what was chosen. The step is
one call of native code, which nothing interrupts, and which lets other threads run.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable
from dataclasses import replace

import dagexec.ops.engines.onednn.measuring as measuring
import dagexec.platform.processor as processor
from dagexec.building.model_builder import ModelBuilder
from dagexec.cli import main
from dagexec.compiler.compilation import compile_model
from dagexec.core.model import Model
from dagexec.core.operator import Operator, Prepared
from dagexec.ops.engines.onednn.problem import Assembled
from dagexec.options import CompileOptions

_HALF_AN_HOUR = 2**31 - 1  # rounds of the hash; a second is about a million


def endless() -> None:
    """The step."""
    print("planted: begun", file=sys.stderr, flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", _HALF_AN_HOUR)
    print("planted: ended", file=sys.stderr, flush=True)


def small_net() -> Model:
    """Two branches of convolutions on images of 48 x 48, joined: work enough for two threads."""
    builder = ModelBuilder("small", seed=3)
    x = builder.add_input("data", (1, 16, 48, 48))
    left = builder.relu(builder.conv(x, "left", 16, 64, kernel=3, pad=1), "left_relu")
    right = builder.relu(builder.conv(x, "right", 16, 64, kernel=3, pad=1), "right_relu")
    return builder.model([builder.softmax(builder.flatten(builder.concat([left, right], "joined"), "flat"), "softmax")])


def plant_in_operators(hit: Callable[[Operator], bool]) -> None:
    """Operators for which `hit` says so get the endless step."""
    bind = Operator.bind

    def planted(operator: Operator, *given: object, **named: object) -> Prepared:
        prepared = bind(operator, *given, **named)  # type: ignore[arg-type]
        return replace(prepared, step=endless) if hit(operator) else prepared

    Operator.bind = planted  # type: ignore[method-assign, assignment]


def plant_in_implementations() -> None:
    """Every implementation after the first of its problem gets the endless step."""
    assembled = measuring._assembled

    def planted(problem: measuring.Problem, candidate: measuring.Candidate, arrays: object) -> object:
        found, result = assembled(problem, candidate, arrays)  # type: ignore[arg-type]
        if candidate.name != next(iter(problem.candidates())).name:
            found = Assembled([endless], found.bound, found.direct)
        return found, result

    measuring._assembled = planted  # type: ignore[assignment]


PLANTED: dict[str, Callable[[], None]] = {
    "layout": lambda: plant_in_operators(
        lambda one: "Conv" in one.definition.type and one.arguments.string("order", "NCHW") != "NHWC"
    ),
    "implementation": plant_in_implementations,
    "none": lambda: None,
}


if __name__ == "__main__":
    kind, seconds, *command = sys.argv[1:]
    logging.basicConfig(level=logging.DEBUG, format="%(message)s", stream=sys.stderr)
    processor.available_cores = lambda: 2
    PLANTED[kind]()
    if command:
        sys.argv = ["dagexec", *command]
        main()
        sys.exit()
    compiled = compile_model(small_net(), CompileOptions(tuning_seconds=float(seconds)))
    assert compiled.report is not None
    for line in compiled.report.lines():
        print(line, flush=True)
