"""Files that PyTorch writes: one module by both exporters, with static and with dynamic axes.

The older exporter traces to TorchScript; the newer one is `torch.export` and onnxscript.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from model_files.recipe import Feeds, Recipe

OLDER, NEWER = "older", "newer"
STATIC, DYNAMIC = "static", "dynamic"
_OLDER_OPSET, _NEWER_OPSET = 17, 20

Axes = Mapping[str, Sequence[int]]
Tensors = Mapping[str, Any]


@dataclass(frozen=True)
class Exported:
    """A module to export.

    Attributes:
        build: makes the module, after the seed is set.
        runs: makes the inputs of each run, by name and in the order of `call`; the first one is traced.
        call: what the module is asked for: it gets the module and the inputs, and returns a tensor or several.
        dynamic: the axes of each input that differ between runs; empty when the file has static axes only.
        exporters: by whom.
        opset: for the older exporter.
    """

    build: Callable[[], Any]
    runs: Callable[[], Sequence[Tensors]]
    call: Callable[..., Any] = lambda module, *inputs: module(*inputs)
    dynamic: Axes = field(default_factory=dict)
    exporters: Sequence[str] = (OLDER, NEWER)
    opset: int = _OLDER_OPSET

    def recipes(self, family: str, name: str) -> list[Recipe]:
        """One for each exporter and kind of axes."""
        return [
            Recipe(f"{family}/{name}.{exporter}.{axes}", partial(self.write, exporter, axes))
            for exporter in self.exporters
            for axes in ((STATIC, DYNAMIC) if self.dynamic else (STATIC,))
        ]

    def module(self) -> Any:
        """What is exported: a module whose inputs are the tensors of a run, with the same weights in every process."""
        torch.manual_seed(0)
        return _Called(self.build().eval(), self.call)

    def write(self, exporter: str, axes: str, file: Path) -> list[Feeds]:
        """Write the model to `file`; returns the inputs of the runs, of one run with static axes."""
        called, runs = self.module(), self.runs()
        names, inputs = list(runs[0]), tuple(runs[0].values())
        dynamic = self.dynamic if axes == DYNAMIC else {}
        write = _write_older if exporter == OLDER else _write_newer
        with torch.no_grad():
            write(called, inputs, names, dynamic, file, self.opset)
        return [{name: tensor.numpy() for name, tensor in run.items()} for run in (runs if dynamic else runs[:1])]


class _Called(torch.nn.Module):  # type: ignore[misc, unused-ignore]
    """A module whose inputs are tensors and whose outputs are a tuple of tensors."""

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, *inputs: Any) -> Any:
        found = self.call(self.module, *inputs)
        return found if torch.is_tensor(found) else tuple(found)


def _write_older(called: Any, inputs: Any, names: list[str], dynamic: Axes, file: Path, opset: int) -> None:
    axes = {name: {axis: f"{name}_{axis}" for axis in given} for name, given in dynamic.items()}
    torch.backends.mha.set_fastpath_enabled(False)  # its fused operator cannot be exported
    torch.onnx.export(
        called,
        inputs,
        os.fspath(file),
        input_names=names,
        dynamic_axes=axes or None,
        dynamo=False,
        opset_version=opset,
    )


def _write_newer(called: Any, inputs: Any, names: list[str], dynamic: Axes, file: Path, opset: int) -> None:
    del opset  # the newer exporter has one that it is made for
    sizes = tuple(dict.fromkeys(dynamic.get(name, ()), torch.export.Dim.DYNAMIC) or None for name in names)
    torch.onnx.export(
        called,
        inputs,
        os.fspath(file),
        input_names=names,
        dynamic_shapes=(sizes,) if dynamic else None,
        dynamo=True,
        opset_version=_NEWER_OPSET,
        external_data=False,
        verbose=False,
    )


def normal(*shape: int, seed: int = 0) -> Any:
    """Normal random numbers that are the same in every process."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def integers(limit: int, *shape: int, seed: int = 0) -> Any:
    """Random int64 numbers from 0 up to, and without, `limit`."""
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed))
