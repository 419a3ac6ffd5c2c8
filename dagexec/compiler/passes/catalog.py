"""The passes on a graph in their order: those before a layout is chosen, and those after it.

Each makes room for the next: single values for all others; constants for the folds; activations as one operator
before they move, and before a factor at their end is folded away; folds for the fusions, whose layers must be next to
each other. What writes in place comes last, as other passes leave such blobs alone. For each two whose order matters
`tests/compiler/passes/test_order.py` has a net.
"""

from __future__ import annotations

from dagexec.compiler.passes import (
    activation_fusion,
    activation_patterns,
    assignment,
    attention,
    batch_norm_folding,
    before_concat,
    before_resize,
    channel_multiplier,
    channel_shuffle,
    common_subexpressions,
    constant_folding,
    convolution_sums,
    dead_code,
    elementwise_fusion,
    embedding_bags,
    expression_fusion,
    global_pooling,
    identities,
    in_place,
    inner_products,
    leading_axes,
    residual_fusion,
    slice_indices,
    zero_copy,
)
from dagexec.compiler.passes.rewriting import Pass

BEFORE_ISLANDS: tuple[Pass, ...] = (
    assignment.PASS,
    constant_folding.PASS,
    identities.PASS,
    dead_code.PASS,
    common_subexpressions.PASS,
)
"""Those of the first that leave operators as they are, for runtimes that have their own fusions."""

SIMPLIFYING: tuple[Pass, ...] = (
    *BEFORE_ISLANDS,
    embedding_bags.PASS,
    slice_indices.PASS,
    attention.PASS,
    inner_products.PASS,
    leading_axes.PASS,
    global_pooling.PASS,
    activation_patterns.PASS,
    before_concat.PASS,
    batch_norm_folding.PASS,
    before_resize.PASS,
    channel_shuffle.PASS,
    convolution_sums.PASS,
    channel_multiplier.PASS,
    activation_fusion.PASS,
    residual_fusion.PASS,
    elementwise_fusion.PASS,
    expression_fusion.PASS,
)
"""What makes the net smaller, whatever computes it."""

FINISHING: tuple[Pass, ...] = (identities.PASS, zero_copy.PASS, in_place.PASS, dead_code.PASS)
"""What comes after engines and layouts are chosen, by which some permutations change nothing any more."""

GRAPH_PASSES: tuple[Pass, ...] = (*SIMPLIFYING, *FINISHING)
"""Both."""
