from __future__ import annotations

import numpy as np
import pytest

from dagexec.compiler.passes.engine import ENGINE
from dagexec.core.dtypes import FLOAT32, FLOAT64
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.ops.engines.onednn import binding

needs_onednn = pytest.mark.skipif(binding.library() is None, reason="oneDNN is not installed")


def model(dtype: type = np.float32, meta: object = FLOAT32) -> Model:
    net = NetDef(name="net")
    net.op.append(OperatorDef(type="Conv", input=["x", "w"], output=["conv"]))
    net.op.append(OperatorDef(type="Relu", input=["conv"], output=["relu"], engine="DEFAULT"))
    net.op.append(OperatorDef(type="Shape", input=["relu"], output=["y"]))
    info = InputInfo(meta, (1, 3, 8, 8))  # type: ignore[arg-type]
    return Model("m", net, None, {"w": np.zeros((4, 3, 1, 1), dtype)}, {"x": info}, ("y",))


def engines(changed: Model) -> list[str]:
    return [definition.engine for definition in changed.net.op]


@needs_onednn
def test_operators_that_onednn_has_name_it_unless_they_name_another_engine() -> None:
    rewritten = ENGINE.apply(model())
    assert engines(rewritten.model) == ["ONEDNN", "DEFAULT", ""]
    assert rewritten.changes == ("1 Conv by oneDNN",)


@needs_onednn
def test_float64_is_left_to_numpy() -> None:
    assert engines(ENGINE.apply(model(np.float64, FLOAT32)).model) == ["", "DEFAULT", ""]
    assert engines(ENGINE.apply(model(np.float32, FLOAT64)).model) == ["", "DEFAULT", ""]


@needs_onednn
def test_operators_on_a_device_are_not_touched() -> None:
    given = model()
    given.net.op[0].device_option.device_type = 1
    assert engines(ENGINE.apply(given).model) == ["", "DEFAULT", ""]


def test_where_nothing_but_numpy_computes_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.compiler.passes.engine.engine_library", lambda: None)
    given = model()
    rewritten = ENGINE.apply(given)
    assert rewritten.model is given
    assert not rewritten.changes


@pytest.mark.skipif(binding.own_kernels() is None, reason="no kernels run here")
def test_without_onednn_our_own_kernels_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dagexec.compiler.passes.engine.engine_library", binding.own_kernels)
    rewritten = ENGINE.apply(model())
    assert engines(rewritten.model) == ["ONEDNN", "DEFAULT", ""]
    assert rewritten.changes == ("1 Conv by our own kernels",)


@needs_onednn
def test_convolutions_are_told_when_the_weights_of_the_net_stay_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for nbytes, told in ((2 * 4 * 3 * 4, True), (2 * 4 * 3 * 4 - 1, False)):
        monkeypatch.setattr("dagexec.compiler.passes.engine.last_level_cache", lambda nbytes=nbytes: nbytes)
        rewritten = ENGINE.apply(model()).model
        arguments = [{arg.name: arg.i for arg in definition.arg} for definition in rewritten.net.op]
        assert arguments == [{"cold_weights": 0} if told else {}, {}, {}]
