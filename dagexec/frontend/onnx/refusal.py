"""The nodes of a model that cannot be run, gathered into one message."""

from __future__ import annotations

import onnx

from dagexec.errors import UnsupportedOperatorError

_MAX_NAMED = 4


class Refusals:
    """Nodes that cannot be run, by operator and reason."""

    def __init__(self) -> None:
        self._names: dict[str, list[str]] = {}

    def add(self, proto: onnx.NodeProto, opset: int | None, reason: str) -> None:
        """A node, the version of its operator set (None when the model imports none), and why it cannot be run."""
        name = proto.name or next((output for output in proto.output if output), "")
        what = f"{proto.op_type} (domain {proto.domain or 'ai.onnx'}, opset {opset or 'none'}): {reason}"
        self._names.setdefault(what, []).append(repr(name))

    def check(self) -> None:
        """Raise UnsupportedOperatorError when there is one: a line for each reason, the most frequent first."""
        if not self._names:
            return
        rows = sorted(self._names.items(), key=lambda row: -len(row[1]))
        lines = [f"{_named(nodes)}: {what}" for what, nodes in rows]
        count = sum(map(len, self._names.values()))
        raise UnsupportedOperatorError(f"{count} node(s) cannot be run:\n  " + "\n  ".join(lines))


def _named(nodes: list[str]) -> str:
    more = f" and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else ""
    kind = "node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"{kind} {', '.join(nodes[:_MAX_NAMED])}{more}"
