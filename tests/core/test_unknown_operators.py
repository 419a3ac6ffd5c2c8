"""All operators of a model that dagexec does not have are one error, which counts them."""

from __future__ import annotations

import pytest

import dagexec
from dagexec import NetDef, Workspace, op
from dagexec.errors import UnsupportedOperatorError


def net_of(*types: str, name: str = "n") -> NetDef:
    operators = [op(kind, [f"b{number}"], [f"b{number + 1}"]) for number, kind in enumerate(types)]
    return NetDef(name=name, op=operators, external_input=["b0"], external_output=[f"b{len(types)}"])


def test_one_unknown_operator_is_named_by_its_place() -> None:
    with pytest.raises(UnsupportedOperatorError, match=r"^Rellu 'b2' \(operator 1\) of net 'n': .*close names: Relu"):
        dagexec.compile(net_of("Relu", "Rellu"))


def test_a_workspace_counts_the_unknown_operators_of_a_net() -> None:
    workspace = Workspace()
    workspace.create_blob("b0")
    with pytest.raises(UnsupportedOperatorError) as raised:
        workspace.create_net(net_of("Zzz", "Relu", "Rellu", "Zzz", "Zzz"))
    lines = str(raised.value).splitlines()
    assert lines[0] == "net 'n': 4 operators of 2 types cannot be run:"
    assert lines[1] == "  operator type 'Zzz' is unknown: 3 operator(s), first Zzz 'b1' (operator 0) of net 'n'"
    assert lines[2].startswith("  operator type 'Rellu' is unknown; close names: Relu")
    assert lines[2].endswith(": 1 operator(s), first Rellu 'b3' (operator 2) of net 'n'")


@pytest.mark.parametrize("optimize", [True, False])
def test_compile_counts_those_of_the_init_net_too(optimize: bool) -> None:
    with pytest.raises(UnsupportedOperatorError) as raised:
        dagexec.compile((net_of("Zzz", "Zzz", name="init"), net_of("Zzz", "Yyy")), optimize=optimize)
    text = str(raised.value)
    assert "4 operators of 2 types cannot be run" in text
    assert "'Zzz' is unknown: 3 operator(s), first Zzz 'b1' (operator 0) of net 'init'" in text
    assert "'Yyy' is unknown: 1 operator(s), first Yyy 'b2' (operator 1) of net 'n'" in text
