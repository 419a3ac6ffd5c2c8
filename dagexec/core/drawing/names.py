"""What drawings and tables call an operator."""

from __future__ import annotations

from dagexec.core.proto import OperatorDef


def operator_name(definition: OperatorDef) -> str:
    """Its name, or that of its first output, or else its type."""
    return definition.name or next(iter(definition.output), definition.type)


def operator_title(definition: OperatorDef) -> str:
    """Its type and that."""
    return f"{definition.type} {operator_name(definition)}"
