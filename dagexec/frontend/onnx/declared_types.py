"""What a model declares of its tensors, beside what its operators compute: a contradiction is an error.

Converters rely on declared shapes, so a wrong one would end in a wrong result. Element types and numbers of axes are
compared in every model; sizes where they follow from the model alone: that is where no input has an open size, but
perhaps its first, the batch. Sizes of a result that no operator reads mislead nobody, and exporters of forests with
several targets declare one column.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dagexec.core.dtypes import FLOAT32
from dagexec.core.inference import Probed, probed_net
from dagexec.core.model import InputInfo
from dagexec.core.node import Node
from dagexec.core.schema import TensorType
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.initializers import Array, type_name
from dagexec.frontend.onnx.node import Dims
from dagexec.frontend.onnx.stated import Stated

_PROBES = ((1, 224), (2, 256))
"""Sizes that open axes are given in turn: the first axis, and others."""


def check_declared(
    stated: Stated,
    operators: Sequence[Node],
    parameters: Mapping[str, Array],
    inputs: Mapping[str, InputInfo],
) -> None:
    """Raise ModelFormatError, naming both, where the graph declares another type of a tensor than is computed.

    `operators`, `parameters` and `inputs` are those of the model. What depends on values of a run is not known here,
    and is not compared.
    """
    if not stated.numbers:
        return
    is_open = any(None in (info.shape or ()) for info in inputs.values())
    computed = _inferred(operators, parameters, inputs, _PROBES if is_open else _PROBES[:1])
    compares_sizes = all(None not in (info.shape or ())[1:] for info in inputs.values())
    read = {name for operator in operators for name in operator.input}
    for name, number in stated.numbers.items():
        types = computed[name].types if name in computed and name not in inputs else (None,)
        here, there = types[0], types[-1]
        if here is None or there is None or len(here.shape) != len(there.shape):
            continue
        if number and number != here.meta.onnx:
            raise ModelFormatError(f"tensor {name!r} is declared as {type_name(number)}, and {here.meta} is computed")
        sizes = stated.shapes.get(name)
        if sizes is None or sizes == here.shape == there.shape:
            continue
        found = tuple(
            a if a == b and compares_sizes and name in read else None
            for a, b in zip(here.shape, there.shape, strict=True)
        )
        if not _agree(sizes, found):
            raise ModelFormatError(f"tensor {name!r} is declared with shape {_shown(sizes)}, computed {_shown(found)}")


def _agree(stated: Dims, found: Dims) -> bool:
    return len(stated) == len(found) and all(
        a is None or b is None or a == b for a, b in zip(stated, found, strict=True)
    )


def _shown(sizes: Dims) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in sizes)}]"


def _inferred(
    operators: Sequence[Node],
    parameters: Mapping[str, Array],
    inputs: Mapping[str, InputInfo],
    probes: Sequence[tuple[int, int]],
) -> Mapping[str, Probed]:
    """Types of all tensors for each of these sizes of open axes of inputs; None where an operator refuses them."""
    known = {name: Probed.of_constant(array, len(probes)) for name, array in parameters.items()}
    for name, info in inputs.items():
        if info.shape is not None:
            kind = info.dtype or FLOAT32
            known[name] = Probed.of_types(TensorType(_filled(info, *sizes), kind) for sizes in probes)
    return probed_net(operators, known, len(probes))


def _filled(info: InputInfo, first: int, other: int) -> tuple[int, ...]:
    sizes = enumerate(info.shape or ())
    return tuple((other if axis else first) if size is None else size for axis, size in sizes)
