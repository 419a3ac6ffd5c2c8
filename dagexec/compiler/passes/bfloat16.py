"""bfloat16, float16: convolutions and products in 16 bits, and what lies between them, summing in float32.

bfloat16 has float32's range and 8 bits of precision: half the memory, and twice the products an instruction where the
processor has AVX512_BF16 or AMX. float16 has 11 bits and ends at 65504; a GPU multiplies both at one rate.

Convolutions and fully connected layers with constant weights get their weights and inputs in it; element-wise
operators and pooling go along where an input is in it already, operators that only move elements where all are. Casts
stand where that begins and ends; inputs and outputs of the model stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.operator_traits import moved_inputs
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.dtypes import BFLOAT16, FLOAT16, FLOAT32, TypeMeta
from dagexec.core.node import Node, new_node
from dagexec.core.registry import schema_of


def narrowing_pass(meta: TypeMeta) -> Pass:
    """The pass to `meta`, BFLOAT16 or FLOAT16."""
    doc = f"convolutions, products and what lies between them in {meta.name}"
    return Pass("precision", doc, lambda draft: _Narrowing(draft, meta).run(), retypes=True)


class _Narrowing:
    """A net on its way to 16 bits, in list order."""

    def __init__(self, draft: Draft, meta: TypeMeta) -> None:
        self._meta = meta
        self._draft = draft
        self._types = draft.types()
        self._narrow: set[str] = set()  # blobs that are in 16 bits
        self._casts: dict[tuple[str, str], str] = {}  # of a blob or parameter, to a type: the name of that

    def run(self) -> None:
        """Go through the list."""
        draft = self._draft
        for number, definition in draft.operators():
            positions = self._float_inputs(number, definition)
            if positions is None:
                self._widen_inputs(number, definition)
            else:
                self._rewrite(number, definition, positions)

    def _float_inputs(self, number: int, definition: Node) -> list[int] | None:
        """The inputs that have to be in 16 bits for the operator to be; None when it stays in float32."""
        draft = self._draft
        if not draft.is_free(number):
            return None
        schema = schema_of(definition.type)
        if schema.layer is not None:
            constants = [draft.constant(name) is not None for name in definition.input[1:]]
            return list(range(len(definition.input))) if all(constants) and self._are_floats(definition.input) else None
        count = len(definition.input) if schema.narrows else len(moved_inputs(definition) or ())
        names = definition.input[:count]
        # Joined to what would have to be cast first, as new keys to those of the past, nothing is gained
        enough = any if schema.narrows else all
        is_narrow = [name in self._narrow for name in names if draft.constant(name) is None]
        goes_along = bool(is_narrow) and enough(is_narrow) and self._are_floats(names)
        return list(range(count)) if goes_along else None

    def _are_floats(self, names: Iterable[str]) -> bool:
        """True when all are float32 in the model as it was."""
        return all(map(self._is_float, names))

    def _is_float(self, name: str) -> bool:
        constant = self._draft.constant(name)
        if constant is not None:
            return bool(constant.dtype == np.float32)
        kind = self._types.get(name)
        return kind is not None and kind.meta is FLOAT32

    def _rewrite(self, number: int, definition: Node, positions: list[int]) -> None:
        draft = self._draft
        inputs, outputs = list(definition.input), list(definition.output)
        before: list[Node] = []
        after: list[Node] = []
        for position in positions:
            name = definition.input[position]
            if name not in self._narrow:
                inputs[position] = self._narrowed(name, before)
        for position, name in enumerate(definition.output):
            if name in draft.outputs or not all(map(draft.is_free, draft.readers(name))):
                narrow = draft.fresh(f"{name}/{self._meta.name}")
                outputs[position] = narrow
                self._narrow.add(narrow)
                self._casts[name, self._meta.name] = narrow
                after.append(new_node("Cast", [narrow], [name], to="float32"))
            else:
                self._narrow.add(name)
        draft.changed(f"{draft.label(number)}: in {self._meta.name}")
        placed = [*before, definition.changed(inputs=inputs, outputs=outputs), *after]
        draft.replace(number, placed[0], *placed[1:])

    def _narrowed(self, name: str, before: list[Node]) -> str:
        """The blob or parameter that holds `name` in 16 bits; a Cast that is needed goes to `before`."""
        key = (name, self._meta.name)
        if key not in self._casts:
            constant = self._draft.constant(name)
            if constant is not None:
                narrow = self._draft.add_parameter(f"{name}/{self._meta.name}", constant.astype(self._meta.numpy))
            else:
                narrow = self._draft.fresh(f"{name}/{self._meta.name}")
                before.append(new_node("Cast", [name], [narrow], to=self._meta.name))
            self._casts[key] = narrow
        return self._casts[key]

    def _widen_inputs(self, number: int, definition: Node) -> None:
        """An operator that stays in float32 reads its inputs in that."""
        narrow = [name for name in dict.fromkeys(definition.input) if name in self._narrow]
        if not narrow:
            return
        before: list[Node] = []
        for name in narrow:
            if (name, "float32") not in self._casts:
                self._casts[name, "float32"] = self._draft.fresh(f"{name}/float32")
                before.append(new_node("Cast", [name], [self._casts[name, "float32"]], to="float32"))
        inputs = [self._casts[name, "float32"] if name in narrow else name for name in definition.input]
        placed = [*before, definition.changed(inputs=inputs)]
        self._draft.replace(number, placed[0], *placed[1:])


PASS = narrowing_pass(BFLOAT16)
"""For dtype bfloat16."""

FLOAT16_PASS = narrowing_pass(FLOAT16)
"""For dtype float16."""
