"""batch-norm-folding: affine maps of channels become part of the weights and bias next to them.

For a convolution or fully connected layer y = W x + b, with W's rows the output channels:

    after it:   factor * y + shift          = (factor * W) x + (factor * b + shift)
    before it:  W (factor * x + shift) + b  = (W * factor) x + (b + W shift)

where W shift sums over the input channels and taps. The second needs a window without padding, which is zero and not
the shift, unless the shift is zero. (Jacob et al. 2018, arXiv:1712.05877, section 3.2, folds the first for inference.)
What follows a batch normalization that cannot be folded becomes part of its own scale and bias.
"""

from __future__ import annotations

import numpy as np

from dagexec.compiler.passes.affine import Affine, Channels, affine_of, identity, normalization
from dagexec.compiler.passes.draft import Draft
from dagexec.compiler.passes.linear_layer import LinearLayer, read_layer, write_layer
from dagexec.compiler.passes.operator_traits import is_layer
from dagexec.compiler.passes.rewriting import Pass
from dagexec.core.schema import OpSchema


def edit(draft: Draft) -> None:
    """Fold chains of affine maps after and before each layer; then those after each batch normalization left."""
    for number in draft.having(is_layer):
        layer = read_layer(draft, number) if number in draft else None
        if layer is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite then is not folded
                _fold(draft, layer)
    left = draft.having(_is_normalization)
    types = draft.types() if left else {}
    for number in left:
        if number in draft and draft.is_free(number):
            kind = types.get(draft[number].input[0])
            if kind is not None:
                _extend(draft, number, kind.rank)


def _fold(draft: Draft, layer: LinearLayer) -> None:
    after = _chain_after(draft, layer.number, layer.result)
    before, source = _chain_before(draft, layer)
    folded = layer
    for _, affine in before:
        folded = folded.with_input_map(affine)
    if after:
        folded = folded.with_output_map(_composed([affine for _, affine in after], layer.result.count))
    if folded is layer or not folded.is_finite:
        return
    taken = [draft.label(number) for number, _ in (*before, *after)]
    draft.changed(f"{draft.label(layer.number)} takes in {', '.join(taken)}")
    write_layer(draft, folded, source, after[-1][0] if after else layer.number)
    for number, _ in (*before, *after[:-1]):
        draft.remove(number)


def _composed(maps: list[Affine], channels: int) -> Affine:
    total = identity(channels)
    for affine in maps:
        total = total.then(affine)
    return total


def _chain_after(draft: Draft, number: int, channels: Channels) -> list[tuple[int, Affine]]:
    """The affine maps that follow operator `number`, each the only reader of what is before it."""
    chain: list[tuple[int, Affine]] = []
    while True:
        name = draft[number].output[0]
        reader = draft.only_reader(name)
        affine = None if reader is None else affine_of(draft, reader, name, channels)
        if reader is None or affine is None:
            return chain
        chain.append((reader, affine))
        number = reader


def _chain_before(draft: Draft, layer: LinearLayer) -> tuple[list[tuple[int, Affine]], str]:
    """The affine maps before a layer that may be folded into it, the nearest first, and the blob before them all."""
    chain: list[tuple[int, Affine]] = []
    name, reader = draft[layer.number].input[0], layer.number
    while True:
        writer = draft.producer(name)
        if writer is None or draft.only_reader(name) != reader:
            return chain, name
        variable = [source for source in draft[writer].input if draft.constant(source) is None]
        if len(variable) != 1:
            return chain, name
        affine = affine_of(draft, writer, variable[0], layer.source)
        if affine is None or (layer.is_padded and affine.shift.any()):
            return chain, name
        chain.append((writer, affine))
        name, reader = variable[0], writer


def _extend(draft: Draft, number: int, rank: int) -> None:
    """Fold the affine maps after a batch normalization of tensors of `rank` axes into its scale and bias."""
    definition = draft[number]
    own = normalization(draft, number)
    order = draft.arguments(number).string("order", "NCHW").upper()
    if own is None or order not in ("NCHW", "NHWC"):
        return
    scale, bias = (draft.parameters[name] for name in definition.input[1:3])
    channels = Channels(own.factor.size, rank - 1 if order == "NHWC" else 1, rank, scale.dtype)
    chain = _chain_after(draft, number, channels)
    if not chain or scale.dtype not in (np.float32, np.float64):
        return
    total = _composed([affine for _, affine in chain], channels.count)
    source, scale_name, bias_name, *others = definition.input
    inputs = [
        source,
        draft.add_parameter(scale_name, (scale * total.factor).astype(scale.dtype)),
        draft.add_parameter(bias_name, (bias * total.factor + total.shift).astype(scale.dtype)),
        *others,
    ]
    outputs = [draft[chain[-1][0]].output[0], *definition.output[1:]]
    changed = definition.changed(inputs=inputs, outputs=outputs)
    draft.changed(f"{draft.label(number)} takes in {', '.join(draft.label(reader) for reader, _ in chain)}")
    draft.replace(chain[-1][0], changed)
    for reader in (number, *(reader for reader, _ in chain[:-1])):
        draft.remove(reader)


def _is_normalization(schema: OpSchema) -> bool:
    return schema.type == "SpatialBN"


def _may_take_maps(schema: OpSchema) -> bool:
    return is_layer(schema) or _is_normalization(schema)


PASS = Pass(
    "batch-norm-folding", "Affine maps of channels become part of weights and biases.", edit, needs=(_may_take_maps,)
)
