"""A model's declared types, compared with those that its operators compute: a contradiction is an error.

Converters rely on declared shapes, so a wrong one would lead to a wrong result. Element types and numbers of axes are
compared in every model; sizes where they follow from the model alone, which is where no input has an open size except
perhaps its first, the batch. Sizes of a result that no operator reads do no harm, and exporters of forests with several
targets declare one column.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from dagexec.core.model import InputInfo
from dagexec.core.node import Node
from dagexec.errors import ModelFormatError
from dagexec.frontend.onnx.initializers import type_name
from dagexec.frontend.onnx.known_types import KnownTypes
from dagexec.frontend.onnx.node import Dims
from dagexec.frontend.onnx.stated import Stated


def check_declared(
    stated: Stated,
    operators: Sequence[Node],
    parameters: Collection[str],
    inputs: Mapping[str, InputInfo],
    types: KnownTypes,
) -> None:
    """Raise ModelFormatError, naming both, where the graph declares another type of a tensor than is computed.

    `operators`, `parameters` and `inputs` are those of the model, and `types` the known types of their tensors. Types
    that depend on values of a run are not known, and not compared.
    """
    compares_sizes = all(None not in (info.shape or ())[1:] for info in inputs.values())
    computed = {name for operator in operators for name in operator.output}.union(parameters).difference(inputs)
    read = {name for operator in operators for name in operator.input}
    for name, number in stated.numbers.items():
        if name not in computed:
            continue
        here, *_, there = types.in_probes(name)[-2:] * 2
        if here is None or there is None or len(here.shape) != len(there.shape):
            continue
        if number and number != here.meta.onnx:
            raise ModelFormatError(f"tensor {name!r} is declared as {type_name(number)}, and {here.meta} is computed")
        sizes = stated.shapes.get(name)
        if sizes is None or sizes == here.shape == there.shape:
            continue
        inferred = tuple(
            a if a == b and compares_sizes and name in read else None
            for a, b in zip(here.shape, there.shape, strict=True)
        )
        if not _agree(sizes, inferred):
            raise ModelFormatError(
                f"tensor {name!r} is declared with shape {_shown(sizes)}, computed {_shown(inferred)}"
            )


def _agree(stated: Dims, found: Dims) -> bool:
    return len(stated) == len(found) and all(
        a is None or b is None or a == b for a, b in zip(stated, found, strict=True)
    )


def _shown(sizes: Dims) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in sizes)}]"
