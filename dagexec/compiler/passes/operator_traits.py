"""What several passes ask of one operator: what its schema says, for its arguments (`dagexec.core.traits`)."""

from __future__ import annotations

from dagexec.compiler.passes.draft import Trait
from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import UNBOUNDED, OpSchema
from dagexec.core.traits import LayerKind


def of_type(*types: str) -> Trait:
    """The trait of being one of these operator types."""
    return lambda schema: schema.type in types


def is_layer(schema: OpSchema) -> bool:
    """A convolution or fully connected layer."""
    return schema.layer is not None


def is_fully_connected(schema: OpSchema) -> bool:
    """A fully connected layer."""
    return schema.layer is LayerKind.FULLY_CONNECTED


def may_be_post_ops(schema: OpSchema) -> bool:
    """What post-ops may compute."""
    return schema.post_ops is not None


def may_add(schema: OpSchema) -> bool:
    """What may be a sum of its inputs."""
    return schema.post_ops is not None and schema.inputs[1] > 1


def joins_or_cuts(schema: OpSchema) -> bool:
    """What joins tensors to one, or cuts one."""
    return schema.joined is not None or schema.cut is not None


is_reshape = of_type("Reshape")
is_product_or_quotient = of_type("Mul", "Div")


def is_in_training(definition: Node) -> bool:
    """True for an operator that does something else in inference, which its argument `is_test` does not ask for."""
    if "is_test" not in schema_of(definition.type).args:
        return False
    return not definition.arguments().int("is_test", 0)


def moved_inputs(definition: Node) -> list[str] | None:
    """The inputs of which an operator only moves or compares elements; None when it does more than that."""
    schema = schema_of(definition.type)
    if not schema.moves_elements or is_in_training(definition):
        return None
    if len(definition.output) != 1 and schema.outputs[1] < UNBOUNDED:  # not all of them are parts of the input
        return None
    return list(definition.input) if schema.joined is not None else [definition.input[0]]


def min_outputs(definition: Node) -> int:
    """How many outputs an operator has at least; those at the end that it may leave out do not count."""
    results = schema_of(definition.type).results
    return results if results and not is_in_training(definition) else len(definition.output)
