"""The nodes of a model that cannot be run, gathered into one message."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import onnx

from dagexec.core.model import InputInfo
from dagexec.errors import UnsupportedOperatorError
from dagexec.platform.extras import install_command

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


def advice(inputs: Mapping[str, InputInfo], *, foreign: bool) -> str:
    """What may make a model run that was refused: its `inputs`, and whether other runtimes were tried (`foreign`)."""
    found = []
    if not foreign:
        found.append("foreign=True leaves such nodes to onnxruntime, or to the reference of the onnx package")
    elif importlib.util.find_spec("onnxruntime") is None:
        found.append(f"onnxruntime may have them: {install_command('onnxruntime')}")
    if is_open := {name: info for name, info in inputs.items() if info.shape is None or None in info.shape}:
        shown = ", ".join(f"{name!r} {info}" for name, info in list(is_open.items())[:_MAX_NAMED])
        found.append(f"where sizes must be known, load_model(..., shapes=) fixes those that are open: {shown}")
    found.append("an exporter can often write the model in other operators, or in an earlier operator set")
    return "what may help:\n  " + "\n  ".join(found)


def _named(nodes: list[str]) -> str:
    more = f" and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else ""
    kind = "node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"{kind} {', '.join(nodes[:_MAX_NAMED])}{more}"
