"""ONNX's Attention with the keys and values of the past, as attention over a session's cache and what masks it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from dagexec.compiler.length_contents import Array
from dagexec.core.arguments import ArgumentValue
from dagexec.core.dtypes import BOOL, FLOAT32
from dagexec.core.node import Node, new_node
from dagexec.core.schema import OperatorCall
from dagexec.ops.families.attention.attention import read_attention, read_windows
from dagexec.ops.families.attention.cached import CACHED_ATTENTION

_BY_HEAD, _BY_POSITION = (0, 1, 2, 3), (0, 2, 1, 3)


class NotCachedError(Exception):
    """It does more with its caches than attention over a session's does; the message says what."""


class AttentionWithPast:
    """One operator.

    Attributes:
        sizes: with a full cache.
        states: the inputs that are its caches.
        present: the outputs that these become.
    """

    def __init__(self, call: OperatorCall) -> None:
        """Raises NotCachedError."""
        node, self.sizes = call.definition, read_attention(call)
        self._call, self._node = call, node
        if self.sizes.cache is None or len(node.output) != 1 + len(call.inputs[self.sizes.cache :]):
            raise NotCachedError(f"{node.type} does not give both of its caches back, and nothing else")
        if any(kind.meta is not FLOAT32 for index, kind in enumerate(call.inputs) if index != self.sizes.mask):
            raise NotCachedError(f"{node.type} has caches of other numbers than float32")
        if self.sizes.mask is not None and call.inputs[self.sizes.mask].meta not in (BOOL, FLOAT32):
            raise NotCachedError(f"{node.type} has a mask of other numbers than float32")
        self.states, self.present = node.input[self.sizes.cache :], node.output[1:]

    def nodes(
        self, caches: tuple[str, str], length: str, constants: dict[str, Array], windows: dict[object, str]
    ) -> Iterator[Node]:
        """The operators that compute its output, CachedAttention among them, which put new arrays into `constants`.

        `caches` are the blobs that it reads beside Q, K and V, `length` has how many positions the cache holds, and
        `windows` are the masks of earlier ones.
        """
        sizes, node = self.sizes, self._node
        fresh = f"{node.output[0]}/with past/"
        mask = "" if sizes.mask is None else node.input[sizes.mask]
        is_added = sizes.mask is not None and self._call.inputs[sizes.mask].meta is FLOAT32
        window, made = self._window(length, constants, windows)
        yield from made
        shown = [name for name in (window, "" if is_added else mask) if name]
        if len(shown) > 1:
            yield new_node("And", shown, [f"{fresh}shown"])
            shown = [f"{fresh}shown"]
        operands, order = list(node.input[:3]), _BY_HEAD
        if sizes.joined:
            order = _BY_POSITION
            widths = sizes.width, sizes.width, sizes.value_width
            heads = sizes.heads, sizes.key_heads, sizes.key_heads
            for index, (count, width) in enumerate(zip(heads, widths, strict=True)):
                view = f"{fresh}{index}"
                by_head = [sizes.batch, sizes.queries, count, width]
                yield new_node("Reshape", [operands[index]], [view], shape=by_head)
                operands[index] = view
        result = f"{fresh}y" if sizes.joined else node.output[0]
        inputs = [*operands, *caches, *shown, *([mask] if is_added else [])]
        arguments: Mapping[str, ArgumentValue] = {
            **{f"{name}_axes": list(order) for name in "qkvy"},
            **dict(zip(("keys", "values"), self.states, strict=True)),
            "scale": self._call.arguments.float("scale", 1 / math.sqrt(sizes.width or 1)),
            "softcap": self._call.arguments.float("softcap", 0.0),
            "mask": len(shown),
            "bias": int(is_added),
            "nan_to_zero": int(bool(mask)),  # a query that sees no key gives 0
        }
        yield new_node(CACHED_ATTENTION, inputs, [result], name=node.name, engine=node.engine, arg=arguments)
        if sizes.joined:
            shape = [sizes.batch, sizes.queries, sizes.heads * sizes.value_width]
            yield new_node("Reshape", [result], [node.output[0]], shape=shape)

    def _window(self, length: str, constants: dict[str, Array], windows: dict[object, str]) -> tuple[str, list[Node]]:
        """The mask that follows from positions alone, '' for none, and what computes it."""
        sizes, (causal, left, right) = self.sizes, read_windows(self._call)
        right = 0 if causal else right
        if right >= sizes.queries - 1:
            right = -1  # no key is that far behind a query
        limits = [
            (kind, bound) for kind, bound, is_set in (("LE", left, left >= 0), ("GE", -right, right >= 0)) if is_set
        ]
        key = sizes.queries, sizes.keys, tuple(limits)
        if not limits or key in windows:
            return windows.get(key, ""), []
        name = windows[key] = f"session/window/{len(windows)}"
        made, shown = [new_node("Add", [f"{name}/from", length], [f"{name}/behind"])], list[str]()
        constants[f"{name}/from"] = np.arange(sizes.queries)[:, None] - np.arange(sizes.keys)
        for kind, bound in limits:
            constants[f"{name}/{kind}"] = np.array(bound)
            shown.append(name if len(limits) == 1 else f"{name}/{kind}/shown")
            made.append(new_node(kind, [f"{name}/behind", f"{name}/{kind}"], shown[-1:]))
        if len(limits) > 1:
            made.append(new_node("And", shown, [name]))
        return name, made
