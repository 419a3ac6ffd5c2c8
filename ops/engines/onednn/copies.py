"""Operators that only move elements, by kernels of our own: Transpose, Slice, Split, Expand, Tile, Pad and their kin.

The default engine says which part is copied where, as copies by NumPy; kernels do the same (`ops/kernels/copies.py`),
on threads where that is worth it, and without the interpreter. A Transpose of 128 x 12 x 64 to 12 x 64 x 128 takes 19
us on one core of an AMD EPYC (Zen 4), NumPy 84.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import ClassVar

import numpy as np

from dagexec.core.dtypes import HELD_TYPES, TypeMeta
from dagexec.core.operator import Operator, Prepared, Step, nothing_to_do, parts_of
from dagexec.core.registry import operator
from dagexec.core.schema import UNBOUNDED
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.blocks import Array
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.image import depth_to_space, pad
from dagexec.ops.families.index import indexing
from dagexec.ops.families.index.places import part_at
from dagexec.ops.families.shape import concat, reshaping, slicing
from dagexec.ops.kernels.copies import copy_step


class Moving(OneDNNOperator):
    """Base: the copies that the default engine would do."""

    reads_strided = writes_strided = False
    repeats = True
    moved_inputs = UNBOUNDED
    metas: ClassVar[Collection[TypeMeta]] = HELD_TYPES

    def needs_onednn(self) -> bool:
        """NumPy moves elements in any order."""
        return False

    def prepare_primitive(self) -> Step:
        """As `copying`."""
        return copying(self)


def copying(owner: OneDNNOperator) -> Prepared:
    """All copies of the default engine as one step. Raises UnsupportedFeatureError where it does something else."""
    made = super(OneDNNOperator, owner).prepare()  # type: ignore[safe-super]
    prepared = made if isinstance(made, Prepared) else Prepared(made)
    pairs = copied_pairs(prepared.step)
    step = None if pairs is None else copy_step(owner.onednn.machine, pairs, owner.label)
    if step is None:
        if prepared.step is nothing_to_do:
            return prepared
        raise UnsupportedFeatureError(f"{owner.label}: there is no kernel for these copies")
    return replace(prepared, step=step)


def copied_pairs(step: Step) -> list[tuple[Array, Array]] | None:
    """The sources and targets of a step that is nothing but copies by NumPy; None for others."""
    pairs: list[tuple[Array, Array]] = []
    for part in parts_of(step):
        if not isinstance(part, partial) or part.keywords:
            return None
        if part.func is np.copyto:
            target, source = part.args
            pairs.append((np.broadcast_to(source, target.shape), target))
        elif part.func is np.concatenate:
            sources, axis, target = part.args
            ends = np.cumsum([source.shape[axis] for source in sources])[:-1]
            pairs += zip(sources, np.split(target, ends, axis), strict=True)
        else:
            return None
    return [pair for pair in pairs if pair[1].size]


@operator(indexing.Gather.schema, engine="ONEDNN")
class Gather(OneDNNOperator, indexing.Gather):
    """What indices that never change pick, where it is a part of the data with strides of its own; a copy of that."""

    moved_inputs = 1
    metas: ClassVar[Collection[TypeMeta]] = HELD_TYPES

    def needs_onednn(self) -> bool:
        """The default engine picks from any order."""
        return False

    def prefers_default(self) -> bool:
        """Where it is no such part."""
        return self._part() is None

    def _part(self) -> Array | None:
        data, indices, axis = self.x(0), self.x(1), self.axis()
        size = data.shape[axis]
        first = -size if indexing.wraps(self.call(), axis) else 0
        if self.input(1).constant is None or not self.y(0).size or "match_outer" in self.arguments:
            return None
        if indices.min() < first or indices.max() >= size:
            return None
        part = part_at(np.moveaxis(data, axis, 0), np.where(indices < 0, indices + size, indices), distinct=False)
        return None if part is None else np.moveaxis(part, range(indices.ndim), range(axis, axis + indices.ndim))

    def prepare_primitive(self) -> Step:
        """One copy. Raises UnsupportedFeatureError where there is no kernel."""
        part = self._part()
        step = None if part is None else copy_step(self.onednn.machine, [(part, self.y(0))], self.label)
        if step is None:
            raise UnsupportedFeatureError(f"{self.label}: there is no kernel for this copy")
        return step


_MOVING: tuple[type[Operator], ...] = (
    reshaping.Transpose,
    reshaping.NCHW2NHWC,
    reshaping.NHWC2NCHW,
    concat.Split,
    slicing.Slice,
    slicing.Expand,
    slicing.Tile,
    slicing.TileAxes,
    depth_to_space.DepthToSpace,
    depth_to_space.SpaceToDepth,
    *pad.PADS,
)

for _default in _MOVING:
    _members = {
        "__doc__": _default.__doc__,
        "__module__": __name__,
        "reads_strided": _default.reads_strided,
        "writes_strided": _default.writes_strided,
    }
    operator(_default.schema, engine="ONEDNN")(type(_default.__name__, (Moving, _default), _members))
