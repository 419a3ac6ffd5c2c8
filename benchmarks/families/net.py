"""One model of the benchmark: how its file and its feeds for one and for eight rows are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model_files import packages
from model_files.recipe import Feeds, Recipe
from model_files.torch_export import DYNAMIC, NEWER, OLDER, Axes, Exported, Tensors

from families import BATCHES

_BATCH_AXIS = (0,)
_SPREAD = 0.02


@dataclass(frozen=True)
class Net:
    """A module of PyTorch at the size at which it is used, with a dynamic batch axis.

    Attributes:
        name: of the file.
        build: makes the module; `lively` gives it weights.
        inputs: makes the inputs for so many rows.
        call: what the module is asked for.
        dynamic: axes that the file leaves open; by default the first one of each input.
        exporter: by whom the file is written.
        settle: the rows with which batch normalization takes its statistics; 0 for a net that has none.
    """

    name: str
    build: Callable[[], Any]
    inputs: Callable[[int], Tensors]
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)
    dynamic: Axes | None = None
    exporter: str = NEWER
    settle: int = 0

    def exported(self) -> Exported:
        """The module for the exporters; it is traced with the largest batch, since a size of 1 may be kept as it is."""
        dynamic = dict.fromkeys(self.inputs(1), _BATCH_AXIS) if self.dynamic is None else self.dynamic
        return Exported(
            self._lively,
            lambda: [self.inputs(rows) for rows in reversed(BATCHES)],
            call=self.call,
            dynamic=dynamic,
            exporters=(self.exporter,),
        )

    def recipe(self, family: str) -> Recipe:
        """The file, whose feeds are in the order of BATCHES."""
        return Recipe(f"{family}/{self.name}", self._write)

    def _write(self, file: Path) -> Sequence[Feeds]:
        return self.exported().write(self.exporter, DYNAMIC, file)[::-1]

    def _lively(self) -> Any:
        net = lively(self.build().eval())
        if self.settle:
            settled(net, partial(self.call, net, *self.inputs(self.settle).values()))
        return net


@dataclass(frozen=True)
class Packaged:
    """A model with trained weights that a package carries.

    Attributes:
        name: of the file here.
        source: of the recipe in `model_files.packages`.
        inputs: makes the feeds for so many rows.
    """

    name: str
    source: str
    inputs: Callable[[int], Feeds]

    def recipe(self, family: str) -> Recipe:
        """The file, whose feeds are in the order of BATCHES."""
        return Recipe(f"{family}/{self.name}", self._write)

    def _write(self, file: Path) -> Sequence[Feeds]:
        [recipe] = [found for found in packages.recipes() if found.name == f"{packages.FAMILY}/{self.source}"]
        recipe.write(file)
        return [self.inputs(rows) for rows in BATCHES]


def lively(net: Any) -> Any:
    """The net with every bias, scale and head in effect: those of fresh nets are zero, or so small that a wrong layer
    would not show in the results."""
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if "layer_scale" in name:
                parameter.fill_(0.5)
            elif not parameter.any():
                parameter.normal_(0, _SPREAD)
    return net


def settled(net: Any, run: Callable[[], object]) -> None:
    """Batch normalization gets the mean and variance of a run, with which values neither vanish nor grow."""
    layers = [part for part in net.modules() if isinstance(part, torch.nn.modules.batchnorm._BatchNorm)]
    for layer in layers:
        layer.momentum = None  # the mean over the runs, of which there is one
        layer.train()
    with torch.no_grad():
        run()
    net.eval()


__all__ = ["NEWER", "OLDER", "Net", "Packaged", "lively", "settled"]
