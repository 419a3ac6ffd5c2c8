"""Sessions of `onnx.reference`: NumPy, one thread, for models that need few of it or types that nothing else has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dagexec.foreign.message import known_type, type_of_value
from dagexec.foreign.session import Array, ForeignSession
from dagexec.foreign.unsafe_nodes import check_for_reference
from dagexec.platform.forking import ProcessLock
from dagexec.platform.host_memory import check_fits
from dagexec.platform.lazy import LazyModule

if not TYPE_CHECKING:
    onnx = LazyModule("onnx")
    reference = LazyModule("onnx.reference")
else:
    import onnx
    from onnx import reference

_MAX_SHAPE = 1 << 10  # elements of an input that sizes may be read from


class ReferenceSession(ForeignSession):
    """An evaluator, which runs for one thread at a time."""

    runtime = "onnx.reference"

    def __init__(self, model: onnx.ModelProto) -> None:
        """Raises what the package raises for an operator that it does not have.

        UnsupportedOperatorError is raised for one whose time nothing bounds.
        """
        super().__init__([value.name for value in model.graph.input], [value.name for value in model.graph.output])
        check_for_reference(model)
        self._evaluator = _evaluator_class()(model)
        self._turn = ProcessLock()

    def run(self, values: Sequence[object]) -> list[object]:
        with self._turn.own, np.errstate(all="ignore"):
            return list(self._evaluator.run(None, dict(zip(self.inputs, values, strict=True))))

    def bound(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> Callable[[], object]:
        return partial(self._run_into, inputs, outputs)

    def _run_into(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        for name, target, found in zip(self.outputs, outputs, self.run(inputs), strict=True):
            array = np.asarray(found)
            if array.shape != target.shape:
                raise ValueError(f"{self.runtime} gives {name!r} the shape {array.shape}; inferred was {target.shape}")
            np.copyto(target, array, casting="unsafe")


@functools.cache
def _evaluator_class() -> type[reference.ReferenceEvaluator]:
    """Evaluators, those of graphs in nodes too, that refuse to compute what memory has no place for."""

    class Bounded(reference.ReferenceEvaluator):
        def _init(self) -> None:
            super()._init()
            for node in self.rt_nodes_:
                node.run = partial(_run_if_it_fits, node.run, node.onnx_node, self.opsets)

    return Bounded


def _run_if_it_fits(
    run: Callable[..., object], node: onnx.NodeProto, opsets: Mapping[str, int], *inputs: object, **more: object
) -> object:
    needed = _bytes_of_outputs(node, opsets, inputs)
    check_fits(needed, f"onnx.reference: {node.op_type} {node.name or next(iter(node.output), '')!r}")
    return run(*inputs, **more)


def _bytes_of_outputs(node: onnx.NodeProto, opsets: Mapping[str, int], inputs: Sequence[object]) -> int:
    """What ONNX's inference says that the outputs take, for these inputs; 0 for those of which it says nothing."""
    graph = onnx.GraphProto(name="node", node=[node])
    for name, value in zip(node.input, inputs, strict=False):
        if name and isinstance(value, np.ndarray):
            graph.input.add(name=name).type.CopyFrom(type_of_value(value))
            if value.dtype.kind in "iu" and value.size <= _MAX_SHAPE:
                graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output if name)
    model = onnx.ModelProto(ir_version=onnx.IR_VERSION, graph=graph)
    for domain, version in opsets.items():
        model.opset_import.add(domain=domain, version=version)
    try:
        found = onnx.shape_inference.infer_shapes(model).graph.output
    except Exception:  # of several types: the runtime says what is wrong
        return 0
    kinds = [known_type(value.type) for value in found]
    return sum(kind.nbytes for kind in kinds if kind is not None)
