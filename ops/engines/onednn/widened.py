"""Convolutions in groups of few channels as if there were no groups, with zeros in the filter.

Where the channels of a group do not fill a vector, oneDNN may have nothing but a product of narrow matrices a group: 24
to 112 channels in four groups, 56 x 56, took 0.84 ms with AVX2. The sums over all channels take a fifth of that, though
three of four products are with zeros. Values that are not finite spread to other groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np

from dagexec.core.dtypes import FLOAT32
from dagexec.core.operator import Step
from dagexec.errors import UnsupportedFeatureError
from dagexec.ops.base.layout import NCHW
from dagexec.ops.engines.onednn.descriptors import WEIGHTS, Array, Descriptor, aligned_empty
from dagexec.ops.engines.onednn.division import misreads
from dagexec.ops.engines.onednn.operator import reorder
from dagexec.ops.engines.onednn.packing import Making
from dagexec.ops.engines.onednn.primitive import EXEC_ARG_MD, PrimitiveDescriptor
from dagexec.ops.engines.onednn.problem import COMPOSED, Asked, Assembled, Candidate, Memory, Pack, Problem, assemble

MAX_SUMMED = 128
"""Channels of all groups times taps: with more, products with zeros cost more than narrow matrices do."""

Shape = tuple[int, ...]

AskWide = Callable[[Shape], PrimitiveDescriptor]
"""Asks the library for the convolution without groups, for the shape of its filter."""


def pays(grouped: Shape) -> bool:
    """True for a filter (G, M/G, C/G, kernel) of few channels in all, that is not depthwise."""
    return grouped[2] > 1 and prod((grouped[0], *grouped[2:])) <= MAX_SUMMED


def candidates(ask: AskWide, grouped: Shape, padding: int) -> Iterator[Asked]:
    """The library's first implementation for the filter without groups, unless it is no better than that with them.

    It is right with so many columns of padding.
    """
    likely = Candidate(f"{COMPOSED}widened ", None, products=grouped[0])
    yield Asked(likely, partial(_candidate, ask, grouped, padding, likely))


def _candidate(ask: AskWide, grouped: Shape, padding: int, likely: Candidate) -> Candidate | None:
    groups, filters, channels, *kernel = grouped
    shape = groups * filters, groups * channels, *kernel
    try:
        found = ask(shape)
    except UnsupportedFeatureError:
        return None
    description = next(one for one in found.implementations() if not misreads(one.name, padding))
    candidate = Candidate(likely.name + description.name, description)
    if candidate.is_general:
        return None
    return replace(candidate, assemble=partial(_assemble, candidate, shape), products=groups)


def _assemble(
    candidate: Candidate,
    shape: Shape,
    problem: Problem,
    arrays: Mapping[int, Array],
    memory: Memory,
    pack: Pack,
) -> Assembled:
    library, (given, meta) = problem.library, problem.tensors[WEIGHTS]
    layout = Descriptor.of_order(library, shape, meta, NCHW)
    if candidate.primitive.wants(EXEC_ARG_MD, WEIGHTS, layout):
        raise UnsupportedFeatureError(f"{problem.label}: {candidate.name} reads unconverted filters")
    wide = replace(problem, tensors={**problem.tensors, WEIGHTS: (layout, meta)}, composed=None)

    def pack_wide(
        number: int, array: Array, source: Descriptor, target: Descriptor, making: Making | None = None
    ) -> tuple[Array, Step]:
        if number != WEIGHTS:
            return pack(number, array, source, target, making)
        fill = partial(_widen, problem, shape, layout, array, target)
        return pack(number, array, given, target, Making("widened", target.nbytes, fill))

    return assemble(wide, candidate, arrays, memory, pack_wide)


def _widen(problem: Problem, shape: Shape, layout: Descriptor, array: Array, target: Descriptor, packed: Array) -> None:
    """Set `packed` to the filter with zeros between the groups, in the layout of the implementation."""
    library, label = problem.library, problem.label
    groups = problem.groups
    grouped = groups, shape[0] // groups, shape[1] // groups, *shape[2:]
    plain = aligned_empty(problem.plain[WEIGHTS].nbytes)
    reorder(library, label, problem.tensors[WEIGHTS][0], problem.plain[WEIGHTS], array, plain, aligned_empty).run_once()
    wide = np.zeros((groups, grouped[1], groups, *grouped[2:]), FLOAT32.numpy)
    for group, values in enumerate(plain.view(FLOAT32.numpy).reshape(grouped)):
        wide[group, :, group] = values
    reorder(library, label, layout, target, wide, packed, aligned_empty).run_once()
