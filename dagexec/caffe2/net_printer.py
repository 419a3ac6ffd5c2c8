"""Nets as text that reads like the calls that made them: `net.FC(['x', 'w', 'b'], ['y'])`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from google.protobuf.message import Message

from dagexec.caffe2.utils import ArgsToDict
from dagexec.core.proto import DeviceOption, NetDef, OperatorDef

__all__ = ["debug_net", "to_string"]

_LONGEST = 64


def to_string(obj: Any, c2_syntax: bool = True) -> str:
    """A net, or its message, as text: calls of methods, or with `c2_syntax=False` assignments."""
    net: NetDef = obj.Proto() if hasattr(obj, "Proto") else obj
    return "\n".join(_lines(net, c2_syntax)) + "\n"


def debug_net(net: Any) -> None:
    """Print a net."""
    print(to_string(net), end="")


def _lines(net: NetDef, c2_syntax: bool) -> Iterator[str]:
    yield f"# net {net.name!r}: {len(net.op)} operators"
    if net.external_input:
        yield f"# external inputs: {', '.join(net.external_input)}"
    for operator in net.op:
        settings = [f"{name}={_value(value)}" for name, value in ArgsToDict(operator.arg).items()]
        for field in ("name", "engine"):
            if getattr(operator, field):
                settings.append(f"{field}={getattr(operator, field)!r}")
        if operator.HasField("device_option"):
            settings.append(f"device_option={_device(operator.device_option)}")
        yield _method(operator, settings) if c2_syntax else _assignment(operator, settings)
    if net.external_output:
        yield f"# external outputs: {', '.join(net.external_output)}"


def _method(operator: OperatorDef, settings: list[str]) -> str:
    return f"net.{operator.type}({', '.join([str(list(operator.input)), str(list(operator.output)), *settings])})"


def _assignment(operator: OperatorDef, settings: list[str]) -> str:
    call = f"{operator.type}({', '.join([*operator.input, *settings])})"
    return f"{', '.join(operator.output)} = {call}" if operator.output else call


def _device(option: DeviceOption) -> str:
    node = f", {option.node_name!r}" if option.node_name else ""
    return f"DeviceOption({option.device_type}, {option.device_id}{node})"


def _value(value: Any) -> str:
    if isinstance(value, Message):
        text = f"<{type(value).__name__} of {value.ByteSize()} bytes>"
    elif isinstance(value, bytes):
        text = repr(value.decode(errors="replace"))
    else:
        text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}...<+len={len(text) - _LONGEST}>"
