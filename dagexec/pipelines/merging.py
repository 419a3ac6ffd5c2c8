"""The Model of a pipeline: the nets of its stages one after another, with the stage in front of all names.

A stage reads the very blobs that another one writes, so that dependencies, memory plan and proof see one net. A model
that writes to a blob that it is fed gets a copy of it, as others read that too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt

from dagexec.core.arguments import make_argument
from dagexec.core.model import InputInfo, Model, StageTypes
from dagexec.core.operator_def import op
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.pipelines.stage import SEPARATOR, ModelPart, Part, PythonPart, Value

_COPY = "Copy"


def merged(name: str, inputs: Mapping[str, InputInfo], parts: Sequence[Part], outputs: Mapping[str, Value]) -> Model:
    """One model of all `parts`, each of which comes after those that it reads."""
    blobs: dict[Value, str] = {}
    operators: list[OperatorDef] = []
    parameters: dict[str, npt.NDArray[Any]] = {}
    stages: dict[str, StageTypes] = {}

    def blob_of(value: Value) -> str:
        return blobs[value] if value.stage else value.name

    for part in parts:
        if isinstance(part, PythonPart):
            operators.append(_call(part, [blob_of(value) for value in part.inputs]))
            blobs.update((value, f"{part.name}{SEPARATOR}{one}") for one, value in part.outputs.items())
            continue
        given = {one: blob_of(value) for one, value in part.inputs.items()}
        names = given | _own_copies(part, given, operators)
        prefix = _Prefix(part.name, names)
        operators.extend(prefix.operator(definition, part.model.net) for definition in part.model.net.op)
        parameters.update((prefix.blob(one), array) for one, array in part.model.parameters.items())
        blobs.update((value, prefix.blob(one)) for one, value in part.outputs.items())
        stages.update(_stages(part, given, prefix))
    renamed = _name_outputs(operators, {one: blob_of(value) for one, value in outputs.items()})
    net = NetDef(name=name, op=operators, external_input=[*inputs, *parameters], external_output=outputs)
    steps = tuple(part.step for part in parts if isinstance(part, PythonPart))
    inner = tuple(step for part in parts if isinstance(part, ModelPart) for step in part.model.python_steps)
    return Model(
        name,
        net,
        parameters=parameters,
        inputs=dict(inputs),
        outputs=tuple(outputs),
        python_steps=(*steps, *inner),
        stages={stage: _renamed(types, renamed) for stage, types in stages.items()},
        texts=any(part.model.texts for part in parts if isinstance(part, ModelPart)),
    )


def _stages(part: ModelPart, given: Mapping[str, str], prefix: _Prefix) -> dict[str, StageTypes]:
    """The model as a stage; those that it has, if it is a pipeline. `given` are the blobs that its inputs read."""
    model = part.model
    if not model.stages:
        return {
            part.name: StageTypes(
                {given[one]: info for one, info in model.inputs.items() if one in given},
                tuple(prefix.blob(one) for one in model.outputs),
            )
        }
    return {
        f"{part.name}{SEPARATOR}{stage}": StageTypes(
            {prefix.blob(one): info for one, info in types.inputs.items()}, tuple(map(prefix.blob, types.outputs))
        )
        for stage, types in model.stages.items()
    }


def _renamed(types: StageTypes, names: Mapping[str, str]) -> StageTypes:
    inputs = {names.get(one, one): info for one, info in types.inputs.items()}
    return StageTypes(inputs, tuple(names.get(one, one) for one in types.outputs))


class _Prefix:
    """Names of a stage's model in the pipeline; `inputs` are the blobs that its inputs read."""

    def __init__(self, stage: str, inputs: Mapping[str, str]) -> None:
        self._stage = stage
        self._inputs = inputs

    def blob(self, name: str) -> str:
        return self._inputs.get(name) or (name and f"{self._stage}{SEPARATOR}{name}")

    def operator(self, definition: OperatorDef, net: NetDef) -> OperatorDef:
        """A copy under the names of the pipeline, on the device that its net is for."""
        made = OperatorDef()
        made.CopyFrom(definition)
        made.name = f"{self._stage}{SEPARATOR}{_name(definition)}"
        for field in ("input", "output", "control_input"):
            getattr(made, field)[:] = [self.blob(one) for one in getattr(definition, field)]
        if net.HasField("device_option") and not definition.HasField("device_option"):
            made.device_option.CopyFrom(net.device_option)
        draws = definition.output and made.device_option.HasField("random_seed")
        if draws and not any(argument.name == "drawn_as" for argument in made.arg):
            made.arg.append(make_argument("drawn_as", definition.output[0]))  # the numbers that it draws alone
        return made


def _name(definition: OperatorDef) -> str:
    return definition.name or (definition.output[0] if definition.output else definition.type)


def _own_copies(part: ModelPart, names: Mapping[str, str], operators: list[OperatorDef]) -> dict[str, str]:
    """Blobs of its own, by input, for inputs that the model writes; `operators` get the copies."""
    written = {name for definition in part.model.net.op for name in definition.output}
    own = {one: f"{part.name}{SEPARATOR}{one}" for one in names if one in written}
    for one, blob in own.items():
        operators.append(op(_COPY, [names[one]], [blob], name=f"{part.name}{SEPARATOR}{_COPY} {one}"))
    return own


def _call(part: PythonPart, inputs: Sequence[str]) -> OperatorDef:
    """The operator of a Python step."""
    sizes = {size for spec in part.takes for size in spec.names()}
    follows = all(
        spec.dtype is not None
        and spec.shape is not None
        and all(size is not None and (isinstance(size, int) or size in sizes) for size in spec.shape)
        for spec in part.gives.values()
    )
    return op(
        "Python",
        inputs,
        [f"{part.name}{SEPARATOR}{one}" for one in part.gives],
        name=part.name,
        function=part.step.token,
        takes=[str(spec) for spec in part.takes],
        gives=[str(spec) for spec in part.gives.values()],
        results=list(part.gives),
        inferred=1 if follows else None,
        row_wise=int(part.row_wise),
        seconds=None if part.seconds is None else float(part.seconds),
    )


def _name_outputs(operators: list[OperatorDef], outputs: Mapping[str, str]) -> dict[str, str]:
    """Have blobs of stages be called as the outputs that they are; others are copied there. Returns the new names."""
    written = {name for definition in operators for name in definition.output}
    renamed: dict[str, str] = {}
    copies: dict[str, str] = {}
    for name, blob in outputs.items():
        if blob in written and blob not in renamed:
            renamed[blob] = name
        elif blob != name:
            copies[name] = blob
    for definition in operators:
        for field in ("input", "output", "control_input"):
            names = getattr(definition, field)
            names[:] = [renamed.get(one, one) for one in names]
    for name, blob in copies.items():
        operators.append(op(_COPY, [renamed.get(blob, blob)], [name], name=f"{_COPY} {name}"))
    return renamed
