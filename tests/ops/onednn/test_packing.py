from __future__ import annotations

import weakref
from collections.abc import Hashable, Mapping

import numpy as np
import pytest

from dagexec import NetDef, Workspace
from dagexec.core.constant import Keeper
from dagexec.core.dtypes import FLOAT32
from dagexec.ops.engines.onednn import packing
from dagexec.ops.engines.onednn.binding import library
from dagexec.ops.engines.onednn.descriptors import Descriptor, aligned_empty
from dagexec.ops.engines.onednn.operator import reorder
from dagexec.ops.engines.onednn.packing import Making
from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.scheduler.nets.simple import SimpleNet
from tests.ops.onednn.engine import needs_onednn, normal
from tests.ops.running import Array, operator_def, run_net

WEIGHTS = {
    "w": normal(1, 32, 3, 3, 16),
    "depthwise": normal(2, 32, 3, 3, 1),
    "pointwise": normal(3, 48, 1, 1, 32),
    "bias": normal(4, 48),
    "matrix": normal(5, 48, 160),
    "row": normal(6, 48),
    "small": normal(7, 7, 48),
    "few": normal(8, 7),
    "input": normal(9, 1, 32, 48),
    "state": normal(10, 1, 32, 8),
    "gates": normal(11, 1, 64),
}
"""Constants, filters as M, kernel, C/G."""


Forms = dict[str, Mapping[Hashable, Array]]
"""Packed forms by the name of the constant."""


def run_packed(keepers: Mapping[str, Keeper] | None = None) -> tuple[dict[str, bytes], Forms]:
    """The results of convolutions, layers and an LSTM, and the packed forms of their weights."""
    workspace = Workspace()
    for name, array in WEIGHTS.items():
        workspace.feed_blob(name, array)
        workspace.get_blob(name).tensor().freeze()
    constants = {name: workspace.get_blob(name).tensor().constant for name in WEIGHTS}
    for name, constant in constants.items():
        assert constant is not None
        if keepers is not None:
            constant.keep(keepers[name])
    workspace.feed_blob("x", normal(12, 1, 12, 12, 16))
    workspace.feed_blob("rows", normal(13, 9, 160))
    definitions = [
        operator_def("Conv", ["x", "w"], ["a"], order="NHWC", kernel=3, pad=1),
        operator_def("Conv", ["a", "depthwise"], ["b"], order="NHWC", kernel=3, pad=1, group=32),
        operator_def("Conv", ["b", "pointwise", "bias"], ["c"], order="NHWC", kernel=1),
        operator_def("FC", ["rows", "matrix", "row"], ["d"]),
        operator_def("FC", ["d", "small", "few"], ["e"]),
        operator_def("Reshape", ["d"], ["steps", "shape"], shape=[9, 1, 48]),
        operator_def("LSTM", ["steps", "input", "state", "gates"], ["f"], hidden_size=8, bias=1),
    ]
    for definition in definitions:
        definition.engine = "ONEDNN"
    with SimpleNet(NetDef(name="n", op=definitions), workspace) as net:
        net.run()
    forms = {name: constant.forms() for name, constant in constants.items() if constant is not None}
    return {name: workspace.fetch_blob(name).tobytes() for name in "abcdef"}, forms


@needs_onednn
def test_packed_weights_have_names_of_their_layouts_and_are_not_computed_again_where_they_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    results, forms = run_packed()
    again, same = run_packed()
    assert {name: set(found) for name, found in forms.items()} == {name: set(found) for name, found in same.items()}
    assert {"w", "matrix", "input", "state"} <= {name for name, found in forms.items() if found}
    assert all(isinstance(form, str) for found in forms.values() for form in found)

    def never(making: Making) -> None:
        raise AssertionError(f"{making.what} is kept")

    monkeypatch.setattr(packing, "_made", never)
    kept, found = run_packed({name: found.get for name, found in forms.items()})
    assert results == again == kept
    assert all(found[name][form] is array for name, by_form in forms.items() for form, array in by_form.items())


@needs_onednn
@pytest.mark.parametrize(
    ("op_type", "filters", "arguments", "form"),
    [
        ("Conv", (512, 1, 1, 512), {}, "panels"),
        ("Conv", (40, 3, 3, 1), {"group": 40, "pad": 1}, "direct"),
        ("Conv", (16, 5, 3, 8), {"pad": 1}, "direct"),
        ("Conv", (32, 3, 3, 8), {"group": 4, "pad": 1}, "direct"),
        ("Conv", (64, 5, 5, 48), {"pad": 2}, "copy"),
        ("ConvTranspose", (512, 2, 2, 32), {"stride": 2}, "rows of panels"),
    ],
)
def test_a_filter_is_made_anew_from_its_packed_form(
    monkeypatch: pytest.MonkeyPatch, op_type: str, filters: tuple[int, ...], arguments: dict[str, int], form: str
) -> None:
    monkeypatch.setattr("dagexec.core.constant.MIN_BYTES", 0)  # small ones stay otherwise
    workspace, weights = Workspace(), normal(1, *filters)
    channels = filters[0] if op_type == "ConvTranspose" else filters[-1] * arguments.get("group", 1)
    workspace.feed_blob("x", normal(2, 1, 9, 9, channels))
    workspace.feed_blob("w", weights)
    tensor = workspace.get_blob("w").tensor()
    tensor.freeze()
    kernels = list(filters[1:3])
    definition = operator_def(op_type, ["x", "w"], ["y"], order="NHWC", kernels=kernels, **arguments, engine="ONEDNN")
    run_net(workspace, definition)
    assert tensor.constant is not None
    made = [str(found).partition(",")[0] for found in tensor.constant.forms()]
    if form in made:  # which one is taken is the processor's to decide
        np.testing.assert_array_equal(tensor.constant.made_anew(), weights)
    else:
        pytest.skip(f"packed as {made}")


def test_memory_of_a_copy_that_is_made_once_is_let_go_of_before_cycles_are_collected() -> None:
    """Transformed weights of all layers stayed until then: five times the file, while the first run was prepared."""
    found = library()
    assert found is not None
    x, y = np.arange(4096, dtype=np.float32).reshape(64, 64), aligned_empty(4 * 4096)
    source, target = Descriptor.of(found, x, FLOAT32), Descriptor.of(found, x.T, FLOAT32)
    with garbage_collection_paused():
        reorder(found, "copy", source, target, x, y, aligned_empty).run_once()
        np.testing.assert_array_equal(y.view(np.float32).reshape(64, 64), x.T)
        given = weakref.ref(x)
        del x
        assert given() is None
