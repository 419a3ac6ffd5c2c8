"""With `--device cuda:0` all nets of these tests run on CUDA."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.placing import nets_on_cuda


@pytest.fixture(scope="package", autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("--device") is None:
        yield
        return
    with nets_on_cuda():
        yield
