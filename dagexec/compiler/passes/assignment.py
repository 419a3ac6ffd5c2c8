"""single-assignment: a blob that several operators write becomes several blobs, so that each has one value in a run.

Caffe2's nets overwrite blobs (`Relu` from `conv1` to `conv1`), which hides from every other pass what an operator
reads. The last writer keeps the name. Operators that must write in place keep writing where they read (Cytron et al.
1991, "Efficiently computing static single assignment form"; a net has no branches, so there is nothing to join).
"""

from __future__ import annotations

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.node import Node
from dagexec.core.registry import schema_of


def edit(draft: Draft) -> None:
    """Give each value of a blob written several times a name of its own.

    Left alone are blobs that are fed, parameters, read before they are written, named by a control input, or touched
    by an operator on another device.
    """
    for name in draft.written_often():
        if _may_be_renamed(draft, name):
            _rename(draft, name)


def _may_be_renamed(draft: Draft, name: str) -> bool:
    if draft.is_given(name) or draft.is_controlled(name) or draft.is_read_early(name):
        return False
    return all(draft.is_on_host(number) for number in (*draft.writers(name), *draft.readers(name)))


def _rename(draft: Draft, name: str) -> None:
    touching = sorted({*draft.writers(name), *draft.readers(name)})
    writes = [number for number in draft.writers(name) if not must_stay_in_place(draft[number], name)]
    if len(writes) < 2:
        return
    last = max(writes)
    current = name
    versions: list[str] = []
    for number in touching:
        definition = draft[number]
        inputs = tuple(current if blob == name else blob for blob in definition.input)
        if number in writes:
            current = name if number == last else draft.fresh(f"{name}/{len(versions) + 1}")
            versions.append(current)
        outputs = tuple(current if blob == name else blob for blob in definition.output)
        if (inputs, outputs) != (definition.input, definition.output):
            draft.replace(number, definition.changed(inputs=inputs, outputs=outputs))
    draft.changed(f"blob {name!r}, written {len(writes)} times, becomes {', '.join(map(repr, versions))}")


def must_stay_in_place(definition: Node, name: str) -> bool:
    """True when the operator reads `name` and has to write its result there."""
    if name not in definition.input or name not in definition.output:
        return False
    pairs = schema_of(definition.type).enforced_inplace
    if any(
        source < len(definition.input)
        and target < len(definition.output)
        and definition.input[source] == definition.output[target] == name
        for source, target in pairs
    ):
        return True
    return any(post_op.startswith("sum:") for post_op in definition.arguments().strings("post_ops"))


PASS = Pass("single-assignment", "A blob written several times becomes several, one a value.", edit, retypes=True)
