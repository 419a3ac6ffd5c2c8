"""What several passes ask of one operator: what its schema says, for its arguments (`dagexec.core.traits`)."""

from __future__ import annotations

from dagexec.core.node import Node
from dagexec.core.registry import schema_of
from dagexec.core.schema import UNBOUNDED


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
