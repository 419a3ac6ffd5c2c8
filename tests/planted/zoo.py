"""The nets that mutation tests and `benchmarks/mutations.py` take things from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from dagexec import NetDef, Workspace, create_shared_buffer
from dagexec.analysis.comparison import random_feeds
from dagexec.binding.parameters import initialized
from dagexec.core.device import CPU, Device
from dagexec.devices.sim import simulated
from dagexec.executor.source.loading import load_model
from tests.planted.plans import MutantNet

SIM, OTHER = Device("sim", 0), Device("sim", 1)


@dataclass(frozen=True)
class Case:
    """A model of the zoo, on devices.

    Attributes:
        name: what reports call it.
        model: "squeezenet", ...
        devices: one for all operators, or several that stretches of operators are on in turn.
        shared_buffer: convolutions work in the shared buffer of their device.
        states: convolutions use so many library states in turn.
        every: the tests try each so many-th mutant, none at all if 0; the benchmark tries all.
    """

    name: str
    model: str
    devices: tuple[Device, ...] = (SIM,)
    shared_buffer: bool = False
    states: int = 0
    every: int = 0


CASES = (
    Case("squeezenet", "squeezenet", every=1),
    Case("googlenet", "googlenet", every=5),
    Case("resnet50", "resnet50"),
    Case("lenet on cpu, sim:0 and sim:1", "lenet", (SIM, CPU, OTHER), every=1),
    Case("squeezenet on cpu, sim:0 and sim:1", "squeezenet", (SIM, CPU, OTHER)),
    Case("googlenet on cpu, sim:0 and sim:1", "googlenet", (SIM, CPU, OTHER)),
    Case("squeezenet with a shared buffer", "squeezenet", shared_buffer=True, every=3),
    Case("googlenet with a shared buffer", "googlenet", shared_buffer=True),
    Case("squeezenet with 2 library states", "squeezenet", states=2, every=3),
    Case("googlenet with 4 library states", "googlenet", states=4),
)
_STRETCH = 3  # operators that follow one another on one device of several


@contextmanager
def mutant_net(case: Case) -> Iterator[MutantNet]:
    """The net of `case`, prepared, hollow."""
    model = initialized(load_model(f"zoo:{case.model}"))
    with simulated([SIM, OTHER]):
        workspace = Workspace()
        home = str(case.devices[0])
        for name, array in {**model.parameters, **random_feeds(model)}.items():
            workspace.feed_blob(name, array, device=home)
        create_shared_buffer(workspace, SIM)
        with MutantNet(_placed(model.net, case), workspace, num_workers=2) as net:
            net.hollow = True
            yield net


@contextmanager
def random_mutant_net(seed: int) -> Iterator[MutantNet]:
    """A random net of 20 operators on few blobs: several writers, in-place writes, control inputs, several devices."""
    rng = random.Random(seed)
    names = [f"b{index}" for index in range(rng.randint(3, 12))]
    net = NetDef(name=f"random {seed}", external_input=names)
    for _ in range(20):
        inputs, outputs = rng.sample(names, rng.randint(0, 3)), rng.sample(names, rng.randint(0, 2))
        both = [name for name in outputs if name in inputs]  # in place: at the same position
        definition = net.op.add(
            type="NoOp",
            input=both + [name for name in inputs if name not in both],
            output=both + [name for name in outputs if name not in both],
            control_input=rng.sample(names, rng.choice((0, 0, 0, 1))),
        )
        definition.device_option.CopyFrom(rng.choice((SIM, SIM, OTHER, CPU)).to_option())
    with simulated([SIM, OTHER]):
        workspace = Workspace()
        for name in names:
            workspace.feed_blob(name, np.zeros(4, np.float32))
        with MutantNet(net, workspace, num_workers=2) as running:
            yield running


def _placed(net: NetDef, case: Case) -> NetDef:
    placed = NetDef()
    placed.CopyFrom(net)
    convolutions = 0
    for index, definition in enumerate(placed.op):
        device = case.devices[index // _STRETCH % len(case.devices)]
        definition.device_option.CopyFrom(device.to_option())
        if definition.type != "Conv":
            continue
        if case.shared_buffer:
            definition.arg.add(name="shared_buffer", i=1)
        if case.states:
            definition.engine = "CUDNN"
            definition.arg.add(name="cudnn_state", i=convolutions % case.states)
        convolutions += 1
    return placed
