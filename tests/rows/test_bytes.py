"""A row has the same bytes in a batch of any size as alone, on every engine and number of threads.

`python -m tests.rows` tries more sizes, and networks; `make test-matrix` runs this module under each instruction set.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dagexec.core.registry import has_engine
from tests.ops.onednn.engine import needs_onednn
from tests.rows.case import Case, batch, case, constant, positive, shared
from tests.rows.comparison import Difference, differences
from tests.rows.networks import DISTINCT, network
from tests.rows.operators import operator_cases

CASES = operator_cases()
ENGINES = [pytest.param("", id="numpy"), pytest.param("ONEDNN", marks=needs_onednn, id="onednn")]
SIZES = (2, 3, 4, 6, 7, 8, 9, 16, 17, 31, 33, 64)


def sizes_for(name: str) -> list[int]:
    """Three of SIZES that a name decides, so that cases together have all of them."""
    return sorted(np.random.default_rng(zlib.crc32(name.encode())).choice(SIZES, 3, replace=False).tolist())


def found(one: Case, engine: str, sizes: Sequence[int], threads: int, distinct: int = 5) -> list[Difference]:
    options = {"optimize": False, "net_type": "simple", "num_workers": 1, "intra_op_threads": threads}
    return list(differences(one.subject(engine), sizes, distinct=distinct, **options))


TYPES = sorted({one.op_type for one in CASES})
each_type = pytest.mark.parametrize(
    ("engine", "op_type"),
    [("", op_type) for op_type in TYPES]
    + [pytest.param("ONEDNN", one, marks=needs_onednn) for one in TYPES if has_engine(one, "ONEDNN")],
)


@each_type
def test_a_row_of_nine_is_the_lone_row(engine: str, op_type: str) -> None:
    for one in CASES:
        if one.op_type == op_type:
            assert not found(one, engine, [9], 1, distinct=2), str(one)


@pytest.mark.slow
@each_type
def test_a_row_of_a_batch_is_the_lone_row(engine: str, op_type: str) -> None:
    for one in CASES:
        if one.op_type == op_type:
            small, *others = sizes_for(str(one))
            assert not found(one, engine, others, 1), f"{one}, 1 thread"
            assert not found(one, engine, [small], 2), f"{one}, 2 threads"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "one",
    [case("FC", batch(300), constant(40, 300), constant(40)), case("FC", batch(64), shared(9, 64), shared(9))],
    ids=str,
)
def test_a_row_of_a_product_is_the_lone_row(engine: str, one: Case) -> None:
    assert not found(one, engine, (2, 7, 33), 1)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "one",
    [
        case("SoftmaxGradient", batch(300, draw=positive), batch(300)),
        case("MulGradient", batch(8, 7, 7), batch(8, 1, 1), batch(8, 7, 7), outputs=2),
        case("FCGradient", batch(300), constant(40, 300), batch(40), wanted=["input"]),
        case("MaxPool1DGradient", batch(8, 6), batch(8, 4), batch(8, 4), kernels=[3]),
    ],
    ids=lambda one: one.op_type,
)
def test_a_row_of_a_gradient_is_the_lone_row(engine: str, one: Case) -> None:
    if engine and not has_engine(one.op_type, engine):
        pytest.skip(f"{engine} does not compute {one.op_type}")
    assert not found(one, engine, range(1, 10), 1)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_products_and_convolutions_of_any_size(engine: str, data: st.DataObject) -> None:
    made = data.draw(st.sampled_from([constant, shared]))
    inner, units = data.draw(st.integers(1, 600)), data.draw(st.integers(1, 300))
    sizes = data.draw(st.lists(st.integers(2, 64), min_size=1, max_size=4))
    threads = data.draw(st.sampled_from([1, 2]))
    assert not found(case("FC", batch(inner), made(units, inner), made(units)), engine, sizes, threads)
    channels, filters, kernel = (data.draw(st.integers(1, most)) for most in (40, 40, 5))
    image = data.draw(st.integers(kernel, 16))
    window = {"kernel": kernel, "pad": data.draw(st.integers(0, kernel // 2)), "stride": data.draw(st.integers(1, 2))}
    weights = made(filters, channels, kernel, kernel)
    assert not found(case("Conv", batch(channels, image, image), weights, **window), engine, sizes, threads)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["lenet", "lenet_digits", "resnet20", "squeezenet"])
def test_an_image_of_a_batch_is_the_lone_image_in_a_compiled_network(name: str, threads: int) -> None:
    assert not list(differences(network(name), (2, 5, 8, 17), distinct=DISTINCT, intra_op_threads=threads))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["lenet", "squeezenet"])
def test_an_image_of_a_batch_is_the_lone_image_in_a_network_that_was_measured(name: str, dtype: str) -> None:
    subject = network(name)
    samples = [subject.feeds([number]) for number in range(DISTINCT)] if dtype == "int8" else None
    options = {"dtype": dtype, "calibration": samples, "tuning_seconds": 3.0, "intra_op_threads": 2}
    assert not list(differences(subject, (2, 5, 9), distinct=DISTINCT, **options))


def test_a_difference_is_seen() -> None:
    """Where bytes may depend on the batch, some do."""
    one = case("FC", batch(1024), shared(1000, 1024), shared(1000))
    free = differences(one.subject(), (2, 64), optimize=False, net_type="simple", batch_invariant=False)
    assert any(difference.largest > 0 for difference in free)
