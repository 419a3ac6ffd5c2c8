"""Pipeline: models and Python steps, connected, as one Model."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dagexec.binding.parameters import initialized
from dagexec.core.model import InputInfo, Model
from dagexec.core.python_step import PythonStep
from dagexec.core.registry import schema_of
from dagexec.core.tensor_spec import Size, SpecLike, TensorSpec, type_meta
from dagexec.errors import ArgumentError, DagexecError, PipelineError
from dagexec.executor.source.loading import ModelSource, load_model
from dagexec.pipelines.description import build
from dagexec.pipelines.merging import merged
from dagexec.pipelines.stage import SEPARATOR, ModelPart, Part, PythonPart, Stage, Value, as_value, values_read
from dagexec.pipelines.stage_types import met, output_specs

Given = Value | Stage


class Pipeline:
    """Models and Python functions, the outputs of some being inputs of others, that run as one net.

        p = dagexec.Pipeline("ocr")
        image = p.input("image", "float32", (1, 3, 64, 256))
        boxes = p.stage("detect", "detection.onnx", x=image)["boxes"]
        crops = p.python("crop", crop, [image, boxes], outputs={"crops": "float32[N, 3, 16, 64]"})
        p.output("text", p.stage("recognize", "recognition.onnx", x=crops)["logits"])
        with dagexec.compile(p, num_workers=2) as executor:
            executor.run({"image": array})["text"]

    Whatever takes a model takes a pipeline. Stages are named; what is in stage "detect" is called "detect/..." in
    messages, traces and proofs. All is checked where it is said, and raises PipelineError; what only the whole tells
    (something that nobody uses) when the pipeline is first made a model. After that it cannot be changed.

    Attributes:
        name: the name in messages.
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise PipelineError(f"a pipeline needs a name, found {name!r:.80}")
        self.name = name
        self._inputs: dict[str, Value] = {}
        self._parts: dict[str, Part] = {}
        self._outputs: dict[str, Value] = {}
        self._unused: set[Value] = set()
        self._model: Model | None = None

    @classmethod
    def from_dict(cls, description: Mapping[str, Any], folder: str | os.PathLike[str] = ".") -> Pipeline:
        """The pipeline that a mapping describes, as a TOML file holds it (docs/pipelines.md).

        Files are relative to `folder`. Functions that it names are imported, as code of yours. Raises PipelineError
        for what is wrong in it, and what `stage` raises.
        """
        pipeline = cls(description.get("name", ""))
        build(pipeline, description, Path(folder))
        return pipeline

    def input(self, name: str, dtype: object = None, shape: Sequence[Size] | None = None) -> Value:
        """An array that each run is given.

        `dtype` is an element type of NumPy, its name, or None for any. `shape` has a number for a size that is fixed, a
        name for one that is the same wherever it has this name, None for any; None in place of all for any shape. What
        is not said is taken from the first model that reads the input. `dtype` may be the whole type as a text, as in
        "float32[N, 3, 64, 64]".
        """
        self._check_open()
        if not isinstance(name, str) or not name:
            raise self._error(f"an input needs a name, found {name!r:.80}")
        if name in self._inputs:
            raise self._error(f"input {name!r} exists already")
        try:
            is_text = isinstance(dtype, str) and "[" in dtype
            if is_text and shape is not None:
                raise ArgumentError("its shape is given twice")
            spec = TensorSpec.of(str(dtype)) if is_text else TensorSpec(type_meta(dtype), _sizes(shape))
        except ArgumentError as error:
            raise self._error(f"input {name!r}: {error}") from None
        self._inputs[name] = Value(self.name, "", name, spec)
        return self._inputs[name]

    def stage(
        self,
        name: str,
        source: ModelSource,
        inputs: Mapping[str, Given] | Given | None = None,
        *,
        drop: Collection[str] = (),
        shapes: Mapping[str, Sequence[int | None]] | None = None,
        foreign: bool = True,
        **wired: Given,
    ) -> Stage:
        """A model, or another pipeline, as a stage.

        Args:
            name: of the stage, without a "/".
            source: whatever `dagexec.load_model` takes. Its init net is run here; its parameters are not copied.
            inputs: what its inputs read, by name; or that of its only input. Those whose names are identifiers may be
                keywords as well: `x=image`.
            drop: names of outputs that nothing is to read. Others must be read, or be outputs of the pipeline.
            shapes, foreign: as for `load_model`.

        Raises PipelineError for inputs that are missing, unknown or of another type, for a name that is taken, and for
        a model that reads or writes files; and what `load_model` raises.
        """
        self._check_name(name)
        model = self._loaded(name, source, shapes, foreign)
        given = self._by_input(name, model, inputs, wired)
        model = self._overridden(model, given)
        required = {one for one in model.needed_inputs() if not model.inputs[one].is_optional}
        for missing in sorted(required - given.keys()):
            expected = model.inputs[missing]
            raise self._error(
                f"stage {name!r}: input {missing!r} is missing, expected {expected}; given: {sorted(given)}"
            )
        for one in given:
            if one not in model.inputs:
                raise self._error(f"stage {name!r}: the model has no input {one!r}; it has {list(model.inputs)}")
        specs = {one: self._met(name, one, TensorSpec.of(model.inputs[one]), value) for one, value in given.items()}
        used = {one: spec for one, spec in specs.items() if one in model.needed_inputs()}
        try:
            found = output_specs(model, used)
        except DagexecError as error:
            raise self._error(f"stage {name!r}: the model cannot take these inputs: {error}") from error
        unknown = sorted(set(drop) - set(model.outputs))
        if unknown:
            raise self._error(f"stage {name!r}: drop: the model has no outputs {unknown}; it has {list(model.outputs)}")
        outputs = {one: Value(self.name, name, one, spec) for one, spec in found.items()}
        self._unused.update(outputs[one] for one in drop)
        self._parts[name] = ModelPart(name, model, given, outputs)
        return Stage(self.name, name, outputs)

    def python(
        self,
        name: str,
        function: Callable[..., Any],
        inputs: Sequence[Given] | Given,
        outputs: Mapping[str, SpecLike] | SpecLike,
        *,
        takes: Sequence[SpecLike] | None = None,
        row_wise: bool = False,
        seconds: float | None = None,
    ) -> Stage:
        """A Python function as a stage.

        It is called with the arrays of `inputs`, which it may not write and which hold other values after the run; what
        it keeps of them, it has to copy. It gives an array, a tuple of them in the order of `outputs`, or a mapping
        by their names. It runs on any of the pool's threads, with the interpreter's lock if Python has one, so that
        two Python steps only overlap where NumPy releases it; and in several runs at once, unless the executor has one
        replica.

        Args:
            name: of the stage, without a "/".
            function: any callable.
            inputs: what it reads, in order.
            outputs: the types of what it gives, by name; the one of a single output, which is then called as the stage.
                Each result is checked against its type. A size is a number; a name of a size that an input has; another
                name, for one that it chooses, the same wherever the name is; or None.
            takes: the types of its inputs, where they are to be more than what is known of them. Their names of sizes
                are the function's own.
            row_wise: each row (on axis 0) of the outputs follows from the same row of the inputs alone, so that
                requests may be joined (`max_batch`) and cut into blocks of rows.
            seconds: about how long a call takes, for the order in which a net's operators run.

        Raises PipelineError. What the function raises in a run becomes an OperatorError that names stage and pipeline.
        """
        self._check_name(name)
        if not callable(function):
            raise self._error(f"stage {name!r}: expected a function, found {function!r:.80}")
        if seconds is not None and not (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
            raise self._error(f"stage {name!r}: seconds must be a number of at least 0, found {seconds!r:.80}")
        listed = [inputs] if isinstance(inputs, Value | Stage) else list(inputs)
        values = [self._value(one, f"stage {name!r}: input {place}") for place, one in enumerate(listed)]
        try:
            declared = {name: outputs} if not isinstance(outputs, Mapping) else outputs
            gives = {one: TensorSpec.of(spec) for one, spec in declared.items()}
            own = [value.spec for value in values] if takes is None else [TensorSpec.of(spec) for spec in takes]
        except ArgumentError as error:
            raise self._error(f"stage {name!r}: {error}") from None
        if not gives:
            raise self._error(f"stage {name!r}: it declares no outputs")
        if len(own) != len(values):
            raise self._error(f"stage {name!r}: takes declares {len(own)} inputs, and there are {len(values)}")
        sizes: dict[str, Size] = {}
        for place, (spec, value) in enumerate(zip(own, values, strict=True)):
            self._met(name, f"{place}", spec, value)
            self._bind(name, spec, value, sizes)
        shown = {one: self._outside(name, spec, sizes) for one, spec in gives.items()}
        result = {one: Value(self.name, name, one, spec) for one, spec in shown.items()}
        self._parts[name] = PythonPart(name, PythonStep(function), values, own, gives, result, row_wise, seconds)
        return Stage(self.name, name, result)

    def output(self, name: str, value: Given) -> None:
        """Have each run give `value` under this name. Raises PipelineError for a name that is taken."""
        self._check_open()
        if not isinstance(name, str) or not name:
            raise self._error(f"an output needs a name, found {name!r:.80}")
        found = self._value(value, f"output {name!r}")
        if name in self._outputs:
            raise self._error(f"output {name!r} exists already: {self._outputs[name]}")
        if name in self._inputs and found is not self._inputs[name]:
            raise self._error(f"output {name!r} has the name of an input")
        self._outputs[name] = found

    @property
    def inputs(self) -> Mapping[str, InputInfo]:
        """What each run is given, by name."""
        return {name: self._input_info(value) for name, value in self._inputs.items()}

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what each run gives."""
        return tuple(self._outputs)

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages, each after those that it reads from."""
        return tuple(self._parts)

    def as_model(self) -> Model:
        """The pipeline as one Model, whose parameters are the arrays of the stages' models.

        Raises PipelineError for a pipeline without outputs, for inputs and outputs of stages that nothing reads, and
        for names that could be of something in a stage.
        """
        if self._model is None:
            self._check_complete()
            self._model = merged(self.name, self.inputs, list(self._parts.values()), self._outputs)
        return self._model

    def _error(self, problem: str) -> PipelineError:
        return PipelineError(f"pipeline {self.name!r}: {problem}")

    def _check_open(self) -> None:
        if self._model is not None:
            raise self._error("it is a model already, and cannot be changed any more")

    def _check_name(self, name: str) -> None:
        self._check_open()
        if not isinstance(name, str) or not name or SEPARATOR in name:
            raise self._error(f"{name!r:.80} is no name of a stage: expected a text without {SEPARATOR!r}")
        if name in self._parts:
            raise self._error(f"stage {name!r} exists already")

    def _value(self, given: object, what: str) -> Value:
        value = as_value(given, self.name, what)
        made = self._inputs.values() if not value.stage else ()
        part = self._parts.get(value.stage)
        if not any(value is one for one in (made if part is None else part.outputs.values())):
            raise self._error(f"{what}: {str(value)!r} is of another pipeline")
        return value

    def _loaded(
        self, name: str, source: ModelSource, shapes: Mapping[str, Sequence[int | None]] | None, foreign: bool
    ) -> Model:
        if source is self:
            raise self._error(f"stage {name!r}: a pipeline cannot be a stage of itself")
        model = load_model(source, shapes=shapes, foreign=foreign)
        if model.has_init_net:
            model = initialized(model)
        for definition in model.program.op:
            if schema_of(definition.type).does_io:
                raise self._error(
                    f"stage {name!r}: the model has a {definition.type}, which reaches beyond its net; stages compute"
                )
        return model

    def _by_input(
        self, name: str, model: Model, inputs: Mapping[str, Given] | Given | None, wired: Mapping[str, Given]
    ) -> dict[str, Value]:
        listed: dict[str, Given] = {}
        if isinstance(inputs, Value | Stage):
            needed = [one for one in model.inputs if one in model.needed_inputs()]
            if len(needed) != 1:
                raise self._error(f"stage {name!r}: the model has {len(needed)} inputs, so name them: {needed}")
            listed[needed[0]] = inputs
        elif inputs is not None:
            listed.update(inputs)
        twice = sorted(listed.keys() & wired.keys())
        if twice:
            raise self._error(f"stage {name!r}: input {twice[0]!r} is given twice")
        listed.update(wired)
        return {one: self._value(value, f"stage {name!r}: input {one!r}") for one, value in listed.items()}

    def _overridden(self, model: Model, given: Mapping[str, Value]) -> Model:
        """The model of which parameters that are `given` are inputs, where it allows that."""
        fed = [one for one in given if model.overridable is not None and one in model.overridable.inputs]
        if not fed or model.overridable is None:
            return model
        made = model.overridable.model_with(fed)
        return initialized(made) if made.has_init_net else made

    def _met(self, stage: str, name: str, expected: TensorSpec, value: Value) -> TensorSpec:
        found = met(expected, value.spec)
        if found is None:
            source = f"stage {value.stage!r}, output {value.name!r}" if value.stage else f"input {value.name!r}"
            raise self._error(f"stage {stage!r}: input {name!r} expects {expected}, found {value.spec} from {source}")
        return found

    def _bind(self, stage: str, spec: TensorSpec, value: Value, sizes: dict[str, Size]) -> None:
        """Note what the named sizes of a Python step's input are in the pipeline."""
        if spec.shape is None:
            return
        outside = value.spec.shape if value.spec.shape is not None else (None,) * len(spec.shape)
        for name, size in zip(spec.shape, outside, strict=True):
            if not isinstance(name, str):
                continue
            known = sizes.get(name)
            if isinstance(known, int) and isinstance(size, int) and known != size:
                raise self._error(
                    f"stage {stage!r}: input of {str(value)!r} expects {spec} with {name} = {known}, found {value.spec}"
                )
            if not isinstance(known, int) and (size is not None or name not in sizes):
                sizes[name] = size

    @staticmethod
    def _outside(stage: str, spec: TensorSpec, sizes: Mapping[str, Size]) -> TensorSpec:
        """The type of a Python step's output as others see it: a size that the function chooses is the stage's own."""
        if spec.shape is None:
            return spec
        shape = [sizes.get(size, f"{stage}_{size}") if isinstance(size, str) else size for size in spec.shape]
        legal = [None if isinstance(size, str) and not size.isidentifier() else size for size in shape]
        return TensorSpec(spec.dtype, tuple(legal))

    def _input_info(self, value: Value) -> InputInfo:
        """What is said of an input; of one of which nothing is said, what the first model says that reads it."""
        info = value.spec.info
        readers = (
            part.model.inputs[name]
            for part in self._parts.values()
            if isinstance(part, ModelPart)
            for name, read in part.inputs.items()
            if read is value
        )
        first = next(readers, info)
        return InputInfo(info.dtype or first.dtype, first.shape if info.shape is None else info.shape)

    def _check_complete(self) -> None:
        if not self._outputs:
            raise self._error("it has no outputs: say which with output(name, value)")
        read = {one for part in self._parts.values() for one in values_read(part)} | set(self._outputs.values())
        for value in self._inputs.values():
            if value not in read:
                raise self._error(f"input {value.name!r} is read by no stage")
        for part in self._parts.values():
            unread = [one.name for one in part.outputs.values() if one not in read and one not in self._unused]
            if not unread:
                continue
            how = f"; drop={unread} leaves them out" if isinstance(part, ModelPart) else ""
            raise self._error(f"outputs {unread} of stage {part.name!r} are read by no stage and are no outputs{how}")
        for name in (*self._inputs, *self._outputs):
            if name.partition(SEPARATOR)[0] in self._parts and SEPARATOR in name:
                raise self._error(f"{name!r} is the name of something in stage {name.partition(SEPARATOR)[0]!r}")


def _sizes(shape: Sequence[Size] | None) -> tuple[Size, ...] | None:
    if isinstance(shape, str) or not (shape is None or isinstance(shape, Sequence)):
        raise ArgumentError(f"{shape!r:.80} is no shape: expected a sequence of sizes")
    return None if shape is None else tuple(shape)
