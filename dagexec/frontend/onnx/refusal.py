"""The nodes of a model that cannot be run, gathered into one message."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import onnx
import onnx.defs

from dagexec.core.model import InputInfo
from dagexec.errors import UnsupportedOperatorError
from dagexec.frontend.onnx.node import DEFAULT_DOMAINS
from dagexec.platform.extras import install_command

_MAX_NAMED = 4
_OF_ONNXRUNTIME = ("com.microsoft", "com.microsoft.nchwc", "com.microsoft.experimental", "com.ms.internal.nhwc")


class Refusals:
    """Nodes that cannot be run, by operator and reason.

    Attributes:
        sizes_missing: some could be if sizes were known.
    """

    def __init__(self) -> None:
        self.sizes_missing = False
        self._names: dict[str, list[str]] = {}
        self._known = False
        self._unknown_domains: set[str] = set()

    def add(self, proto: onnx.NodeProto, opset: int | None, reason: str) -> None:
        """A node, the version of its operator set (None when the model imports none), and why it cannot be run."""
        name = proto.name or next((output for output in proto.output if output), "")
        what = f"{proto.op_type} (domain {proto.domain or 'ai.onnx'}, opset {opset or 'none'}): {reason}"
        self._names.setdefault(what, []).append(repr(name))
        if proto.domain in _OF_ONNXRUNTIME or onnx.defs.has(
            proto.op_type, "" if proto.domain in DEFAULT_DOMAINS else proto.domain
        ):
            self._known = True
        else:
            self._unknown_domains.add(proto.domain or "ai.onnx")

    def check(self) -> None:
        """Raise UnsupportedOperatorError when there is one: a line for each reason, the most frequent first."""
        if not self._names:
            return
        rows = sorted(self._names.items(), key=lambda row: -len(row[1]))
        lines = [f"{_named(nodes)}: {what}" for what, nodes in rows]
        count = sum(map(len, self._names.values()))
        raise UnsupportedOperatorError(f"{count} node(s) cannot be run:\n  " + "\n  ".join(lines))

    def advice(self, inputs: Mapping[str, InputInfo], *, foreign: bool) -> str:
        """Advice on how to run the model, for its `inputs`, and whether other runtimes were tried (`foreign`)."""
        advice = []
        if not foreign and self._known:
            advice.append("foreign=True leaves such nodes to onnxruntime, or to the reference of the onnx package")
        elif foreign and importlib.util.find_spec("onnxruntime") is None:
            advice.append(f"onnxruntime may have them: {install_command('onnxruntime')}")
        is_open = {name: info for name, info in inputs.items() if info.shape is None or None in info.shape}
        if self.sizes_missing and is_open:
            shown = ", ".join(f"{name!r} {info}" for name, info in list(is_open.items())[:_MAX_NAMED])
            more = f" and {len(is_open) - _MAX_NAMED} more" if len(is_open) > _MAX_NAMED else ""
            advice.append(f"load_model(..., shapes=) fixes sizes that the model leaves open: {shown}{more}")
        if self._unknown_domains:
            domains = ", ".join(sorted(self._unknown_domains))
            advice.append(f"operators of {domains} may come as functions inside the model: ask whoever exported it")
        advice.append("an exporter can often write the model in other operators, or in an earlier operator set")
        return "what may help:\n  " + "\n  ".join(advice)


def _named(nodes: list[str]) -> str:
    more = f" and {len(nodes) - _MAX_NAMED} more" if len(nodes) > _MAX_NAMED else ""
    kind = "node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"{kind} {', '.join(nodes[:_MAX_NAMED])}{more}"
