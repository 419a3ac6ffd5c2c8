"""cudnn-engine."""

from __future__ import annotations

import pytest

from dagexec.compiler.passes import cudnn_engine
from dagexec.compiler.passes.cudnn_engine import CUDNN_ENGINE, CUDNN_STATES
from dagexec.core.model import Model
from dagexec.core.node import arguments_of
from dagexec.errors import DeviceError
from tests.compiler.passes.models import model_of, normal, op

WEIGHTS = {"w": normal(4, 4, 3, 3)}


def conv(source: str, target: str, **arguments: object) -> object:
    return op("Conv", [source, "w"], [target], kernel=3, pad=1, **arguments)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN is there, and computes Conv."""
    monkeypatch.setattr(cudnn_engine.binding, "cudnn", lambda: object())
    monkeypatch.setattr(cudnn_engine, "registered_engines", lambda kind, _device: ["CUDNN"] if kind == "Conv" else [])


def states(model: Model) -> dict[str, int]:
    """By output, the state of each operator with the engine."""
    return {
        definition.output[0]: arguments_of(definition, "").int("cudnn_state", -1)
        for definition in CUDNN_STATES.apply(CUDNN_ENGINE.apply(model).model).model.net.op
        if definition.engine == "CUDNN"
    }


@pytest.mark.usefixtures("library")
def test_branches_have_states_of_their_own_and_chains_share_one() -> None:
    operators = [
        conv("x", "a"), op("Relu", ["a"], ["ra"]), conv("ra", "aa"),
        conv("x", "b"), conv("b", "bb"), conv("x", "c"), conv("x", "d"), conv("x", "e"),
        op("Sum", ["aa", "bb", "c", "d", "e"], ["y"]),
    ]  # fmt: skip
    assert states(model_of(operators, **WEIGHTS)) == {
        "a": 0, "aa": 0, "b": 1, "bb": 1, "c": 2, "d": 3, "e": 0,
    }  # fmt: skip


@pytest.mark.usefixtures("library")
def test_engines_and_states_that_a_net_names_stay() -> None:
    named = conv("x", "a")
    named.engine = "MINE"  # type: ignore[attr-defined]
    model = model_of([named, conv("a", "y", cudnn_state=3)], **WEIGHTS)
    assert states(model) == {"y": 3}
    assert CUDNN_ENGINE.apply(model).changes == ("1 Conv by cuDNN",)


def test_without_the_library_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> object:
        raise DeviceError("nvidia-cudnn-frontend cannot be imported")

    monkeypatch.setattr(cudnn_engine.binding, "cudnn", missing)
    model = model_of([conv("x", "y")], **WEIGHTS)
    assert CUDNN_ENGINE.apply(model).model is model
    assert CUDNN_STATES.apply(model).model is model
