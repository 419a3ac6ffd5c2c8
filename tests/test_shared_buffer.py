"""Nets whose convolutions share one buffer: the bytes of private buffers, one convolution at a time, no deadlock."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dagexec
from dagexec import NetDef, Workspace, create_shared_buffer, force_shared_buffer
from dagexec.binding.parameters import initialized
from dagexec.core.model import InputInfo, Model
from dagexec.core.operator import Operator, Step
from dagexec.core.shared_buffer import Allocate, SharedBuffer, shared_step
from dagexec.errors import ArgumentError, OperatorError
from tests.nets import temporary_operator
from tests.ops.running import Array, operator_def

CONVOLUTIONS = {
    "3x3": ("Conv", (2, 4, 9, 8), (6, 4, 3, 3), {"kernel": 3, "pad": 1}),
    "1x1 of float16": ("Conv", (2, 4, 9, 8), (6, 4, 1, 1), {"kernel": 1}),
    "depthwise": ("Conv", (2, 4, 9, 8), (4, 1, 3, 3), {"kernel": 3, "group": 4}),
    "transposed": ("ConvTranspose", (2, 4, 5, 5), (4, 3, 3, 3), {"kernel": 3, "stride": 2}),
    "transposed with strides of 1": ("ConvTranspose", (2, 4, 5, 5), (4, 3, 3, 3), {"kernel": 3}),
}
WIDE = 8


@pytest.fixture
def forced() -> Iterator[None]:
    force_shared_buffer()
    yield
    force_shared_buffer(False)


def arrays_of(name: str) -> tuple[list[Array], dict[str, int]]:
    _, x_shape, filter_shape, arguments = CONVOLUTIONS[name]
    rng = np.random.default_rng(1)
    dtype = np.float16 if "float16" in name else np.float32
    return [rng.normal(size=shape).astype(dtype) for shape in (x_shape, filter_shape)], arguments


def run(definition: dagexec.OperatorDef, arrays: list[Array], buffer: bool) -> tuple[list[Array], Workspace]:
    workspace = Workspace()
    if buffer:
        create_shared_buffer(workspace)
    for name, array in zip(definition.input, arrays, strict=True):
        workspace.feed_blob(name, array)
    workspace.run_operator_once(definition)
    return [workspace.fetch_blob(name) for name in definition.output], workspace


@pytest.mark.parametrize("engine", ["", "WINOGRAD", "FFT", "DIRECT"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_every_convolution_and_gradient_gives_the_same_bytes_from_a_shared_buffer(name: str, engine: str) -> None:
    op_type = CONVOLUTIONS[name][0]
    arrays, arguments = arrays_of(name)
    private, shared = (operator_def(op_type, ["x", "w"], ["y"], **arguments, shared_buffer=flag) for flag in (0, 1))
    private.engine = shared.engine = engine
    (y,), _ = run(private, arrays, buffer=False)
    (found,), _ = run(shared, arrays, buffer=True)
    assert found.tobytes() == y.tobytes()
    outputs = ["dw", "db", "dx"]
    for definition in (private, shared):
        definition.type += "Gradient"
        definition.input.append("dy")
        del definition.output[:]
        definition.output.extend(outputs)
    expected, _ = run(private, [*arrays, y], buffer=False)
    gradients, _ = run(shared, [*arrays, y], buffer=True)
    for one, other in zip(gradients, expected, strict=True):
        assert one.tobytes() == other.tobytes()


def test_a_convolution_takes_its_columns_from_the_shared_buffer() -> None:
    arrays, arguments = arrays_of("3x3")
    _, workspace = run(operator_def("Conv", ["x", "w"], ["y"], **arguments, shared_buffer=1), arrays, buffer=True)
    columns = 4 * 9 * 9 * 8 * 4  # C, taps, pixels of one image (each has its own product), bytes
    assert create_shared_buffer(workspace).nbytes >= columns


def test_a_net_that_asks_for_it_makes_it_where_nobody_has() -> None:
    arrays, arguments = arrays_of("3x3")
    definition = operator_def("Conv", ["x", "w"], ["y"], **arguments, shared_buffer=1)
    y, workspace = run(definition, arrays, buffer=False)
    assert create_shared_buffer(workspace).nbytes > 0
    del definition.arg[-1]
    np.testing.assert_array_equal(y, run(definition, arrays, buffer=False)[0])


def test_the_force_flag_holds_for_operators_created_after_it(forced: None) -> None:
    arrays, arguments = arrays_of("3x3")
    definition = operator_def("Conv", ["x", "w"], ["y"], **arguments)
    _, workspace = run(definition, arrays, buffer=False)
    assert create_shared_buffer(workspace).nbytes > 0


def branches(count: int, **arguments: int) -> tuple[NetDef, dict[str, Array]]:
    """A net of `count` convolutions of different sizes beside each other, and what to feed."""
    rng = np.random.default_rng(2)
    net = NetDef(name="branches")
    feeds = {"x": rng.normal(size=(2, 3, 20, 20)).astype(np.float32)}
    for number in range(count):
        feeds[f"w{number}"] = rng.normal(size=(4 + number, 3, 3, 3)).astype(np.float32)
        net.op.append(operator_def("Conv", ["x", f"w{number}"], [f"y{number}"], kernel=3, **arguments))
    net.external_input.extend(feeds)
    net.external_output.extend(f"y{number}" for number in range(count))
    return net, feeds


class WatchedBuffer(SharedBuffer):
    """Counts the threads inside, and fails when there are two."""

    users = 0
    uses = 0

    def use(self):  # type: ignore[no-untyped-def]
        held = super().use()
        outer = self

        class Watched:
            def __enter__(self) -> Array:
                memory: Array = held.__enter__()
                assert outer.users == 0
                outer.users += 1
                outer.uses += 1
                return memory

            def __exit__(self, *error: object) -> object:
                outer.users -= 1
                return held.__exit__(*error)  # type: ignore[arg-type]

        return Watched()


@pytest.mark.parametrize("net_type", ["simple", "dag", "async_dag"])
def test_convolutions_on_several_workers_take_turns_and_give_the_bytes_of_private_buffers(net_type: str) -> None:
    net, feeds = branches(WIDE, shared_buffer=1)
    plain, _ = branches(WIDE)
    with dagexec.compile(plain, optimize=False, net_type="simple") as executor:
        expected = executor.run(feeds)
    workspace = Workspace()
    buffer = create_shared_buffer(workspace)
    buffer.__class__ = WatchedBuffer
    assert isinstance(buffer, WatchedBuffer)
    for name, array in feeds.items():
        workspace.feed_blob(name, array)
    built = workspace.create_net(net, net_type=net_type, num_workers=4)
    for _ in range(20):
        built.run()
        for name, array in expected.items():
            assert workspace.fetch_blob(name).tobytes() == array.tobytes()
    assert buffer.uses == 20 * WIDE
    built.close()


@pytest.mark.slow
def test_replicas_share_the_buffer_of_the_executor() -> None:
    net, feeds = branches(WIDE)
    with dagexec.compile(net, optimize=False, net_type="simple") as executor:
        expected = executor.run(feeds)
    arguments = {"shared_buffer": 1}
    with (
        dagexec.compile(net, optimize=False, num_workers=2, replicas=4, operator_arguments=arguments) as executor,
        ThreadPoolExecutor(8) as callers,
    ):
        buffers = {id(operator.shared_buffer) for operator in executor.net().operators}  # type: ignore[attr-defined]
        assert len(buffers) == 1
        for found in callers.map(lambda _: executor.run(feeds, timeout=60), range(64)):
            for name, array in expected.items():
                assert found[name].tobytes() == array.tobytes()


def convolutions_in_both_nets(**arguments: int) -> Model:
    """A model whose init net computes the filter of its net with a convolution."""
    rng = np.random.default_rng(3)
    given = {"w0": rng.normal(size=(4, 3, 5, 5)), "w1": rng.normal(size=(1, 3, 3, 3))}
    init, net = NetDef(name="init"), NetDef(name="predict")
    init.op.append(operator_def("Conv", ["w0", "w1"], ["w2"], kernel=3, **arguments))
    net.op.append(operator_def("Conv", ["x", "w2"], ["y"], kernel=3, **arguments))
    parameters = {name: array.astype(np.float32) for name, array in given.items()}
    return Model("both", net, init, parameters, {"x": InputInfo()}, ("y",))


@pytest.mark.parametrize("prepare", [lambda model: model, initialized], ids=["as it is", "initialized"])
def test_an_init_net_may_use_a_shared_buffer_too(prepare: Callable[[Model], Model], forced: None) -> None:
    feeds = {"x": np.random.default_rng(4).normal(size=(2, 1, 9, 9)).astype(np.float32)}
    force_shared_buffer(False)
    with dagexec.compile(convolutions_in_both_nets(), optimize=False) as executor:
        expected = executor.run(feeds)["y"].tobytes()
    with dagexec.compile(prepare(convolutions_in_both_nets(shared_buffer=1)), optimize=False, replicas=2) as executor:
        assert executor.run(feeds)["y"].tobytes() == expected
    force_shared_buffer()
    with dagexec.compile(prepare(convolutions_in_both_nets()), optimize=False) as executor:
        assert executor.run(feeds)["y"].tobytes() == expected


def test_an_argument_that_no_operator_knows_is_refused() -> None:
    net, _ = branches(2)
    with pytest.raises(ArgumentError, match="net 'branches': no operator knows the argument\\(s\\) sharred_buffer"):
        dagexec.compile(net, optimize=False, operator_arguments={"sharred_buffer": 1, "shared_buffer": 1})


def test_arguments_for_all_operators_leave_those_of_the_model_as_they_are() -> None:
    net, _ = branches(2, shared_buffer=0)
    with dagexec.compile(net, optimize=False, operator_arguments={"shared_buffer": 1}) as executor:
        assert [operator.shared_buffer for operator in executor.net().operators] == [None, None]  # type: ignore[attr-defined]


class Holder:
    """A test operator that works in the shared buffer of its net's convolutions, and does what it is told there."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.go_on = threading.Event()
        self.fails = False
        self.buffer: SharedBuffer | None = None

    def __call__(self, operator: Operator) -> None:
        assert self.buffer is not None
        shared_step(self.buffer, self._build, operator.label)()

    def _build(self, allocate: Allocate) -> Step:
        allocate((1,), np.float32)
        return self._hold

    def _hold(self) -> None:
        self.inside.set()
        assert self.go_on.wait(30)
        if self.fails:
            raise ZeroDivisionError("inside the buffer")


def held_net() -> tuple[NetDef, dict[str, Array]]:
    """Convolutions beside an operator that holds the buffer."""
    net, feeds = branches(4, shared_buffer=1)
    net.op.add(type="Hold", input=["x"], output=["held"])
    net.external_output.append("held")
    return net, feeds


def test_an_operator_that_raises_inside_lets_the_others_and_the_next_run_through() -> None:
    holder = Holder()
    with temporary_operator("Hold", holder):
        net, feeds = held_net()
        with dagexec.compile(net, optimize=False, num_workers=2) as executor:
            holder.buffer = executor.net().operators[0].shared_buffer  # type: ignore[attr-defined]
            assert holder.buffer is not None
            holder.fails = True
            holder.go_on.set()
            with pytest.raises(OperatorError, match="inside the buffer"):
                executor.run(feeds, timeout=60)
            assert not holder.buffer.in_use
            holder.fails = False
            assert set(executor.run(feeds, timeout=60)) == {"y0", "y1", "y2", "y3", "held"}


def test_a_run_that_is_cancelled_while_others_wait_for_the_buffer_ends_when_it_is_free() -> None:
    async def cancel_one_of_two(executor: dagexec.Executor, holder: Holder, feeds: dict[str, Array]) -> None:
        cancelled = asyncio.create_task(executor.run_async(feeds))
        assert await asyncio.to_thread(holder.inside.wait, 30)
        other = asyncio.create_task(executor.run_async(feeds))
        await asyncio.sleep(0)  # the other request is made
        cancelled.cancel()
        await asyncio.sleep(0)  # the cancellation is delivered
        assert not cancelled.done()  # it waits for the worker inside the buffer
        holder.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert len(await other) == 5

    holder = Holder()
    with temporary_operator("Hold", holder):
        net, feeds = held_net()
        with dagexec.compile(net, optimize=False, num_workers=2, replicas=2) as executor:
            holder.buffer = executor.net().operators[0].shared_buffer  # type: ignore[attr-defined]
            asyncio.run(cancel_one_of_two(executor, holder, feeds))
            assert holder.buffer is not None
            assert not holder.buffer.in_use
            assert len(executor.run(feeds, timeout=60)) == 5
