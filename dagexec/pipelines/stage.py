"""Stages of a pipeline, and the values that they hand each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from dagexec.core.model import Model
from dagexec.core.python_step import PythonStep
from dagexec.core.tensor_spec import TensorSpec
from dagexec.errors import PipelineError
from dagexec.platform.records import dataclass

SEPARATOR = "/"
"""Between the name of a stage and what is in it."""


@dataclass(frozen=True, eq=False)
class Value:
    """An input of a pipeline, or an output of a stage: what stages read.

    Attributes:
        pipeline: the name of the pipeline that it is in.
        stage: the stage that gives it; "" for an input of the pipeline.
        name: the input, or the output of the stage.
        spec: what is known of its type when the pipeline is built.
    """

    pipeline: str
    stage: str
    name: str
    spec: TensorSpec

    def __str__(self) -> str:
        return f"{self.stage}{SEPARATOR}{self.name}" if self.stage else self.name


@dataclass(frozen=True, eq=False)
class Stage:
    """A stage of a pipeline: `stage["boxes"]` is one of its outputs; one of a single output stands for that itself.

    Attributes:
        pipeline, name: the names of both.
        outputs: what it gives, by name.
    """

    pipeline: str
    name: str
    outputs: Mapping[str, Value] = field(repr=False)

    def __getitem__(self, output: str) -> Value:
        """The output of that name. Raises PipelineError."""
        found = self.outputs.get(output)
        if found is None:
            raise PipelineError(
                f"pipeline {self.pipeline!r}: stage {self.name!r} has no output {output!r}; it has {list(self.outputs)}"
            )
        return found

    def value(self) -> Value:
        """Its only output. Raises PipelineError where it has several."""
        if len(self.outputs) != 1:
            raise PipelineError(
                f"pipeline {self.pipeline!r}: stage {self.name!r} has {len(self.outputs)} outputs, so say which: "
                f"{list(self.outputs)}"
            )
        return next(iter(self.outputs.values()))


@dataclass(frozen=True, eq=False)
class ModelPart:
    """A model as a stage: `inputs` are what its inputs read, and `outputs` what it gives."""

    name: str
    model: Model
    inputs: Mapping[str, Value]
    outputs: Mapping[str, Value]


@dataclass(frozen=True, eq=False)
class PythonPart:
    """A Python function as a stage: `takes` are the types of its `inputs`, in order, as they are checked in a run."""

    name: str
    step: PythonStep
    inputs: Sequence[Value]
    takes: Sequence[TensorSpec]
    gives: Mapping[str, TensorSpec]
    outputs: Mapping[str, Value]
    row_wise: bool
    seconds: float | None


Part = ModelPart | PythonPart


def values_read(part: Part) -> Sequence[Value]:
    """What a stage reads, in the order of its inputs."""
    return list(part.inputs.values()) if isinstance(part, ModelPart) else part.inputs


def as_value(given: Any, pipeline: str, what: str) -> Value:
    """The value that `given` is or, as a stage, gives. Raises PipelineError, naming `what` it is for."""
    found = given.value() if isinstance(given, Stage) else given
    if not isinstance(found, Value):
        raise PipelineError(
            f"pipeline {pipeline!r}: {what}: expected an input of the pipeline or an output of a stage, "
            f"found {given!r:.80}"
        )
    return found
