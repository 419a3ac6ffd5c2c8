"""OnnxName: what an operator is in ONNX, as its schema declares it for the ONNX frontend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from dagexec.core.arguments import ArgumentValue
from dagexec.platform.records import dataclass


@dataclass(frozen=True)
class OnnxName:
    """An ONNX operator with the inputs, the outputs and the meaning of an operator of dagexec.

    Attributes:
        type: the ONNX operator.
        version: its newest supported version, by the first operator set that has it; later ones are unknown.
        attributes: each attribute that is read, and the argument that it becomes; all others must have their default.
        ignored: attributes without influence on the result.
        values: for an attribute whose values differ from the argument's, the translation; other values are refused.
        fixed: arguments that the operator always has.
        domain: of the operator, '' the default one.
    """

    type: str
    version: int
    attributes: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    values: Mapping[str, Mapping[ArgumentValue, ArgumentValue]] = field(default_factory=dict)
    fixed: Mapping[str, ArgumentValue] = field(default_factory=dict)
    domain: str = ""
