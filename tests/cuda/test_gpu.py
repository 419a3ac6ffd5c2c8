"""Whole nets on a real CUDA device, against the host: the first tests to look at on a machine that has one."""

from __future__ import annotations

import numpy as np
import pytest

import dagexec

pytestmark = pytest.mark.gpu


def image(size: int, channels: int) -> np.ndarray:
    return np.random.default_rng(3).standard_normal((1, channels, size, size)).astype(np.float32)


@pytest.mark.parametrize("options", [{"net_type": "simple"}, {"net_type": "async_dag"}, {"capture": True}], ids=str)
@pytest.mark.parametrize(
    ("name", "size", "channels"), [("lenet", 28, 1), ("squeezenet", 224, 3), ("googlenet", 224, 3)]
)
def test_networks_give_what_the_host_gives(name: str, size: int, channels: int, options: dict[str, object]) -> None:
    data = {"data": image(size, channels)}
    with dagexec.compile(f"zoo:{name}", optimize=False) as host:
        wanted = host.run(data)
    with dagexec.compile(f"zoo:{name}", device="cuda:0", **options) as executor:  # type: ignore[arg-type]
        found = [executor.run(data) for _ in range(4)]
    for blob, expected in wanted.items():
        np.testing.assert_allclose(found[0][blob], expected, rtol=1e-3, atol=1e-5)
        assert {outputs[blob].tobytes() for outputs in found} == {found[0][blob].tobytes()}
