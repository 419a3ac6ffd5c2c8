"""A model as records of a manifest and sections of a file, and back.

An array is a record of type, shape and section. What decides how memory is used is compared with its hash whenever it
is read: nets, strings, and whole numbers that may be indices or sizes. Large arrays of other numbers are used where
they are, and their hashes are left alone: a wrong number in them is a wrong number in the results, as in any file of
weights, and nothing worse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.constant import Keeper
from dagexec.core.dtypes import STRING, from_name, from_numpy
from dagexec.core.model import InputInfo, Model, StageTypes
from dagexec.core.proto import NetDef
from dagexec.errors import DagexecError, ModelFormatError
from dagexec.plans.container import Container, DamagedError, Sections, count, flag, items, maybe, record, text
from dagexec.storage.net_file import parse_message

Array = npt.NDArray[Any]
Record = dict[str, object]

_MODEL = ("name", "net", "init_net", "parameters", "inputs", "outputs", "texts", "stages")
_INPUT = ("dtype", "shape", "is_sequence", "is_optional")
_MOST_AXES = 64  # that NumPy knows


def array_record(array: Array, sections: Sections) -> list[object]:
    """Type, shape and section of an array; strings are a section of their lengths and their bytes."""
    meta = from_numpy(array.dtype)
    shape = list(array.shape)
    if meta is not STRING:
        return [meta.name, shape, sections.add(array)]
    values = [value if isinstance(value, bytes) else str(value).encode() for value in array.ravel().tolist()]
    lengths = np.fromiter(map(len, values), np.dtype("<u8"), len(values))
    return [meta.name, shape, sections.add(lengths.tobytes() + b"".join(values))]


def array_of(found: object, container: Container) -> Array:
    """The array of a record, read-only. Raises DamagedError."""
    name, sizes, section = items(found, 3)
    try:
        meta = from_name(text(name))
    except DagexecError as error:
        raise DamagedError(str(error)) from None
    shape = tuple(map(count, items(sizes)))
    if len(shape) > _MOST_AXES:
        raise DamagedError(f"an array of {len(shape)} axes")
    elements = 1
    for size in shape:
        elements *= size
    content = container.unchecked(section)
    if meta is STRING:
        return _strings(container.checked(section).tobytes(), elements).reshape(shape)
    if elements * meta.itemsize != len(content):
        raise DamagedError(f"an array of {meta} {list(shape)} in {len(content)} bytes")
    if meta.is_integer and meta.itemsize >= np.int32().itemsize:
        container.checked(section)
    return content.view(meta.numpy).reshape(shape)


def _strings(content: bytes, elements: int) -> Array:
    start = 8 * elements
    lengths = np.frombuffer(content, "<u8", elements).tolist() if start <= len(content) else [len(content)]
    if start + sum(lengths) != len(content):
        raise DamagedError(f"{elements} strings in {len(content)} bytes")
    found = np.empty(elements, np.object_)
    for index, length in enumerate(lengths):
        found[index] = content[start : start + length]
        start += length
    return found


def forms_record(forms: Mapping[str, Mapping[str, Array]], sections: Sections) -> Record:
    """The packed forms of parameters, each a section."""
    return {
        name: {form: sections.add(array) for form, array in sorted(of_one.items())}
        for name, of_one in forms.items()
        if of_one
    }


def keepers_of(found: object, container: Container) -> dict[str, Keeper]:
    """What gives the packed forms of each parameter, in the file's memory. Raises DamagedError."""
    return {name: _keeper(dict(_pairs(one)), container) for name, one in _pairs(found)}


def _keeper(sections: Mapping[str, object], container: Container) -> Keeper:
    return {form: container.unchecked(section) for form, section in sections.items()}.get


def chosen_record(chosen: Sequence[Mapping[str, str]]) -> list[object]:
    """Implementations by geometry: those that operators have, and of each operator which of these it has."""
    known: dict[tuple[tuple[str, str], ...], int] = {}
    places = [known.setdefault(tuple(sorted(names.items())), len(known)) for names in chosen]
    return [[dict(names) for names in known], places]


def chosen_of(found: object) -> list[dict[str, str]]:
    """The implementations of each operator. Raises DamagedError."""
    known, places = items(found, 2)
    names = [{geometry: text(name) for geometry, name in _pairs(one)} for one in items(known)]
    if any(count(place) >= len(names) for place in items(places)):
        raise DamagedError(f"an operator has one of {len(names)} choices that is not there")
    return [names[place] for place in places]


def model_record(model: Model, sections: Sections) -> Record:
    """All of a model that is data; of functions of the application nothing is said."""
    return {
        "name": model.name,
        "net": _net_section(model.program.message(), sections),
        "init_net": _net_section(model.init_program.message(), sections) if model.has_init_net else None,
        "parameters": {name: array_record(array, sections) for name, array in model.parameters.items()},
        "inputs": _inputs_record(model.inputs),
        "outputs": list(model.outputs),
        "texts": model.texts,
        "stages": {
            name: [_inputs_record(stage.inputs), list(stage.outputs)] for name, stage in sorted(model.stages.items())
        },
    }


class KeptArrays(Mapping[str, Array]):
    """Arrays of a file, each read when somebody asks for it, who gets a ModelFormatError for what is none."""

    def __init__(self, records: Mapping[str, object], container: Container) -> None:
        self._records, self._container = records, container

    def __getitem__(self, name: str) -> Array:
        try:
            return array_of(self._records[name], self._container)
        except DamagedError as error:
            raise self._container.damaged(error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)


def model_of(found: object, container: Container) -> Model:
    """The model of a record, with arrays over the file's memory. Raises DamagedError.

    It may access nothing: that is for whoever opens the file to allow.
    """
    name, net, init_net, parameters, inputs, outputs, texts, stages = record(found, _MODEL)
    return Model(
        name=text(name),
        net=_net(net, container),
        init_net=maybe(lambda section: _net(section, container), init_net),
        parameters=KeptArrays(dict(_pairs(parameters)), container),
        inputs=_inputs(inputs),
        outputs=_texts(outputs),
        folder=Path(container.path).parent,
        texts=flag(texts),
        stages={name: _stage(one) for name, one in _pairs(stages)},
    )


def _net_section(net: NetDef, sections: Sections) -> int:
    return sections.add(net.SerializeToString(deterministic=True))


def check_parameters(found: object, container: Container) -> None:
    """Compare all arrays of a model's record with their hashes. Raises DamagedError."""
    for _, one in _pairs(record(found, _MODEL)[_MODEL.index("parameters")]):
        container.checked(items(one, 3)[2])


def _net(section: object, container: Container) -> NetDef:
    try:
        return parse_message(container.checked(section).tobytes(), NetDef, "its net")
    except ModelFormatError as error:
        raise DamagedError(str(error)) from None


def _pairs(found: object) -> Iterator[tuple[str, Any]]:
    if not isinstance(found, dict):
        raise DamagedError(f"expected an object, found {found!r:.80}")
    yield from found.items()


def _texts(found: object) -> tuple[str, ...]:
    return tuple(map(text, items(found)))


def _stage(found: object) -> StageTypes:
    inputs, outputs = items(found, 2)
    return StageTypes(_inputs(inputs), _texts(outputs))


def _inputs_record(inputs: Mapping[str, InputInfo]) -> Record:
    return {
        name: {
            "dtype": None if info.dtype is None else info.dtype.name,
            "shape": None if info.shape is None else list(info.shape),
            "is_sequence": info.is_sequence,
            "is_optional": info.is_optional,
        }
        for name, info in inputs.items()
    }


def _inputs(found: object) -> dict[str, InputInfo]:
    return {name: _input(one) for name, one in _pairs(found)}


def _input(found: object) -> InputInfo:
    dtype, shape, is_sequence, is_optional = record(found, _INPUT)
    try:
        meta = maybe(lambda name: from_name(text(name)), dtype)
    except DagexecError as error:
        raise DamagedError(str(error)) from None
    sizes = maybe(lambda axes: tuple(maybe(count, size) for size in items(axes)), shape)
    return InputInfo(meta, sizes, flag(is_sequence), flag(is_optional))
