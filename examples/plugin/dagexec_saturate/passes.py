"""A pass that removes a Relu before a Relu."""

from __future__ import annotations

from dagexec.compiler.passes import Draft, Pass
from dagexec.operators import OpSchema


def is_relu(schema: OpSchema) -> bool:
    """True for what the pass is about; a net without is passed over."""
    return schema.type == "Relu"


def edit(draft: Draft) -> None:
    """Relu of Relu is Relu."""
    for number in draft.having(is_relu):
        if number not in draft or not draft.is_free(number):
            continue
        definition = draft[number]
        reader = draft.only_reader(definition.output[0])
        if reader is not None and draft[reader].type == "Relu":
            draft.changed(f"{draft.label(number)} is done again by {draft.label(reader)}")
            draft.redirect(definition.output[0], definition.input[0])
            draft.remove(number)


RELU_OF_RELU = Pass("relu-of-relu", "A Relu before a Relu is removed.", edit, needs=(is_relu,))
