"""Networks of the zoo on CUDA, whole, on small images: what the host computes, and nothing of it on the host."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import dagexec
from dagexec import zoo
from dagexec.core.device import Device
from tests.cuda.emulated import cuda_devices

CUDA = Device("cuda", 0)
SIZES = {"googlenet": 64, "mobilenet_v2": 32, "nasnet_a": 32, "squeezenet": 32}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_a_network_gives_what_it_gives_on_the_host(name: str) -> None:
    published = zoo.architecture(name)
    model = replace(published, images=replace(published.images, size=SIZES[name])).model(1, 0)
    feeds = {"data": np.random.default_rng(0).standard_normal((1, 3, SIZES[name], SIZES[name])).astype(np.float32)}
    with dagexec.compile(model, optimize=False, net_type="simple") as host:
        wanted = host.run(feeds)["softmax"]
    assert np.unique(wanted).size > 100
    with cuda_devices():
        for net_type, optimize in (("simple", False), ("async_dag", True)):
            with dagexec.compile(
                model, device="cuda:0", net_type=net_type, optimize=optimize, num_workers=2
            ) as executor:
                graph = executor.net().graph
                assert {graph.device(index) for index in range(len(graph))} == {CUDA}
                found = executor.run(feeds)["softmax"]
                np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * wanted.max())
                assert executor.run(feeds)["softmax"].tobytes() == found.tobytes()
