"""Registries: which class serves a def, with which engine, and what is said when none does."""

import logging
from typing import Any

import pytest

from dagexec import OperatorDef, Workspace
from dagexec.core import registry
from dagexec.core.operator import Operator, Step, nothing_to_do
from dagexec.core.schema import OpSchema
from dagexec.errors import SchemaError, UnsupportedFeatureError, UnsupportedOperatorError

SCHEMA = OpSchema("Probe", outputs=(0, 1), infer=lambda _call: [], doc="For tests.")


@pytest.fixture(autouse=True)
def _private_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registrations of a test end with it."""
    for name in ("_schemas", "_operators"):
        monkeypatch.setattr(registry, name, dict(getattr(registry, name)))


def register(engine: str = "", refusal: str = "") -> type[Operator]:
    @registry.operator(SCHEMA, engine=engine)
    class Probe(Operator):
        """Does nothing, or refuses."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if refusal:
                raise UnsupportedFeatureError(refusal)
            super().__init__(*args, **kwargs)

        def prepare(self) -> Step:
            return nothing_to_do

    return Probe


def create(engine: str = "") -> Operator:
    return registry.create_operator(OperatorDef(type="Probe", engine=engine, output=["y"]), Workspace())


def test_the_default_engine_serves_when_none_is_asked_for() -> None:
    default, fast = register(), register("FAST")
    assert type(create()) is default
    assert type(create("DEFAULT")) is default
    assert type(create("FAST")) is fast
    assert registry.registered_engines("Probe") == ["DEFAULT", "FAST"]


def test_engines_are_tried_in_the_order_the_def_lists_them() -> None:
    register()
    fast, small = register("FAST"), register("SMALL")
    assert type(create("SMALL, FAST")) is small
    assert type(create("FAST,SMALL")) is fast


def test_an_engine_that_is_missing_or_refuses_is_passed_over_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    default = register()
    register("FAST", refusal="dilation is not served")
    with caplog.at_level(logging.INFO, "dagexec"):
        assert type(create("MAGIC,FAST")) is default
    assert "Probe: engine MAGIC is not available on cpu" in caplog.messages
    assert "Probe 'y': engine FAST skipped: dilation is not served" in caplog.messages


def test_when_every_engine_refuses_the_reasons_are_given() -> None:
    register(refusal="not today")
    register("FAST", refusal="too slow")
    with pytest.raises(
        UnsupportedOperatorError,
        match="Probe 'y': no implementation for device kind 'cpu': every engine refused: "
        "FAST: too slow; DEFAULT: not today",
    ):
        create("FAST")


def test_a_device_without_implementation_is_named() -> None:
    register()
    definition = OperatorDef(type="Probe", output=["y"])
    definition.device_option.device_type = 1
    with pytest.raises(UnsupportedOperatorError, match="no implementation for device kind 'cuda': none is registered"):
        registry.create_operator(definition, Workspace())


def test_an_unknown_type_suggests_close_names() -> None:
    register()
    with pytest.raises(UnsupportedOperatorError, match="operator type 'Probee' is unknown; close names: Probe"):
        registry.schema_of("Probee")
    with pytest.raises(UnsupportedOperatorError, match=r"^Zzzz 'y' \(operator 2\) of net 'n': .*'Zzzz' is unknown$"):
        registry.create_operator(OperatorDef(type="Zzzz", output=["y"]), Workspace(), index=2, net="n")


def test_a_def_is_verified_before_anything_is_built() -> None:
    register()
    workspace = Workspace()
    with pytest.raises(SchemaError, match=r"Probe 'y' \(operator 4\) of net 'n': expected 0 input\(s\), found 1"):
        registry.create_operator(OperatorDef(type="Probe", input=["x"], output=["y"]), workspace, index=4, net="n")
    assert workspace.blobs() == []


def test_a_place_is_taken_once() -> None:
    register("FAST")
    with pytest.raises(SchemaError, match="operator 'Probe' on cpu with engine FAST exists already"):
        register("FAST")
    with pytest.raises(SchemaError, match="operator type 'Probe' already has a schema"):
        registry.register_schema(OpSchema("Probe", outputs=(0, 1), infer=lambda _call: [], doc="Another."))
    register()
    with pytest.raises(SchemaError, match="with engine DEFAULT exists already"):
        register()


def test_registered_operators_are_sorted() -> None:
    register()
    names = registry.registered_operators()
    assert names == sorted(names)
    assert {"Probe", "Relu", "NoOp"} <= set(names)
    assert registry.schema_of("Probe") is SCHEMA
