"""What `Operator.bind` gives, and that it holds on its own: many preparations of one operator may be alive at once."""

import numpy as np
import pytest

from dagexec import OperatorDef, Workspace
from dagexec.core.operator import Operator, Prepared, Step, nothing_to_do
from dagexec.core.registry import create_operator
from dagexec.core.schema import OpSchema, same_as_input
from dagexec.ops.engines.onednn.binding import library
from tests.ops.running import Array, operator_def

needs_onednn = pytest.mark.skipif(library() is None, reason="oneDNN is not installed")


def with_engine(engine: str, op_type: str, inputs: list[str], **arguments: int) -> OperatorDef:
    definition = operator_def(op_type, inputs, ["y"], **arguments)
    definition.engine = engine
    return definition


def images(batch: int) -> dict[str, Array]:
    """An image tensor, a filter, the maxima of windows of 2 x 2, and a gradient of these."""
    rng = np.random.default_rng(batch)
    x = rng.standard_normal((batch, 4, 8, 8), np.float32)
    maxima = x.reshape(batch, 4, 4, 2, 4, 2).max(axis=(3, 5))
    return {"x": x, "maxima": maxima, "slope": rng.standard_normal(maxima.shape, np.float32)}


FILTER = np.random.default_rng(0).standard_normal((4, 4, 3, 3), np.float32)


@pytest.mark.parametrize(
    "definition",
    [
        with_engine("", "Conv", ["x", "w"], kernel=3, pad=1),
        with_engine("", "Conv", ["x", "w"], kernel=3, pad=1, shared_buffer=1),
        with_engine("", "MaxPoolGradient", ["x", "maxima", "slope"], kernel=2, stride=2),
        with_engine("", "Concat", ["x", "x"]),
        pytest.param(with_engine("ONEDNN", "Conv", ["x", "w"], kernel=3, pad=1), marks=needs_onednn),
        pytest.param(with_engine("ONEDNN", "LRN", ["x"], size=3), marks=needs_onednn),
        pytest.param(
            with_engine("ONEDNN", "MaxPoolGradient", ["x", "maxima", "slope"], kernel=2, stride=2), marks=needs_onednn
        ),
    ],
    ids=lambda definition: f"{definition.type}-{definition.engine or 'NumPy'}-{len(definition.arg)}",
)
def test_preparations_of_one_operator_for_several_shapes_work_side_by_side(definition: OperatorDef) -> None:
    workspace = Workspace()
    workspace.feed_blob("w", FILTER)
    operator: Operator | None = None
    alive: list[tuple[Prepared, dict[str, Array], Array]] = []
    for batch in (1, 3, 5):  # each larger, so that every one has arrays of its own
        for name, array in images(batch).items():
            workspace.feed_blob(name, array)
        operator = operator or create_operator(definition, workspace)
        prepared = operator.bind(operator.infer())
        fed = {name: workspace.get_blob(name).tensor().array for name in images(batch)}
        alive.append((prepared, fed, workspace.get_blob("y").tensor().array))
    alone = [results_alone(definition, batch) for batch in (1, 3, 5)]
    for turn in (1, -1):
        for (prepared, fed, y), expected in list(zip(alive, alone, strict=True))[::turn]:
            for name, array in images(len(fed["x"])).items():
                fed[name][...] = array
            y.fill(np.nan)
            prepared.step()
            assert y.tobytes() == expected


def results_alone(definition: OperatorDef, batch: int) -> bytes:
    workspace = Workspace()
    for name, array in {**images(batch), "w": FILTER}.items():
        workspace.feed_blob(name, array)
    operator = create_operator(definition, workspace)
    operator.bind(operator.infer()).step()
    return workspace.fetch_blob("y").tobytes()


class Borrower(Operator):
    """Asks twice for working memory, and says that input 0 is in its place."""

    schema = OpSchema("Borrower", inputs=(1, 1), outputs=(1, 1), infer=same_as_input, doc="Test.")

    def prepare(self) -> Step:
        self.working_memory(64)
        self.working_memory(128)
        return Prepared(nothing_to_do, inputs_in_place=(0,))


def test_what_an_operator_says_comes_back_with_the_working_memory_that_it_was_given() -> None:
    workspace = Workspace()
    workspace.feed_blob("x", np.ones(3, np.float32))
    operator = Borrower(operator_def("Borrower", ["x"], ["y"]), workspace)
    given = [np.empty(64, np.uint8), np.empty(128, np.uint8)]
    first = operator.bind(operator.infer(), memory={array.nbytes: array for array in given}.__getitem__)
    second = operator.bind(operator.infer())
    assert list(map(id, first.working_memory)) == list(map(id, given))
    assert [array.nbytes for array in second.working_memory] == [64, 128]
    assert not any(np.shares_memory(one, other) for one, other in zip(given, second.working_memory, strict=True))
    assert first.inputs_in_place == second.inputs_in_place == (0,)
