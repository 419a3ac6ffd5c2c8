"""A small example of every differentiable operator, for a numerical check of its gradient.

Values lie away from places without a derivative. The tests of an operator's own family go further.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dagexec.core.arguments import ArgumentValue
from tests.ops.formulas import differentiable, smooth_inputs

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Example:
    """One operator on given inputs.

    Attributes:
        inputs: the arrays; those of float64 are differentiated, or those in `wanted`.
        outputs: how many there are.
        inplace: outputs that have the names of inputs.
        statistics: outputs that no gradient is given for.
        arguments: of the operator.
    """

    inputs: Sequence[Array]
    outputs: int = 1
    wanted: tuple[int, ...] | None = None
    inplace: dict[int, int] = field(default_factory=dict)
    statistics: tuple[int, ...] = ()
    arguments: dict[str, ArgumentValue] = field(default_factory=dict)


_rng = np.random.default_rng(2026)


def _normal(*shape: int) -> Array:
    return _rng.normal(size=shape)


def _apart(*shape: int) -> Array:
    """Values at least 0.1 from each other, and from the multiples of 1: nothing has a corner or a tie there."""
    size = int(np.prod(shape))
    values = (np.arange(size) - size // 2) * 0.2 + 0.13
    return _rng.permutation(values).reshape(shape)


def _between(low: float, high: float, *shape: int) -> Array:
    return _rng.uniform(low, high, shape)


def _probabilities(*shape: int) -> Array:
    values = _between(0.2, 1, *shape)
    return values / values.sum(axis=-1, keepdims=True)


def _integers(*values: int) -> Array:
    return np.array(values, np.int64)


def _example(*inputs: Array, **arguments: ArgumentValue) -> Example:
    return Example(inputs, arguments=arguments)


def _elementwise() -> Iterator[tuple[str, Example]]:
    for name in differentiable():
        yield name, Example(smooth_inputs(name, {}, 5))
    for name in ("NanCheck", "Copy", "EnsureCPUOutput", "Alias", "AliasWithName", "EnsureDense"):
        yield name, _example(_apart(2, 3))
    yield "Pow", _example(_between(0.5, 2, 5), exponent=2.5)
    yield "Pow", _example(_between(0.5, 2, 2, 3), _normal(3))
    yield "Cast", _example(_normal(3), to="float64")
    yield "Logit", _example(_between(0.2, 0.8, 5))
    yield "CopyOnDeviceLike", Example([_normal(3), np.zeros(1)], wanted=(0,))
    yield "CastLike", Example([_normal(3), np.zeros(1)], wanted=(0,))
    yield "PRelu", _example(_apart(2, 3, 2), _normal(3))
    for name in ("Add", "Sub", "Mul"):
        yield name, _example(_normal(2, 3), _normal(2, 3))
        yield name, _example(_normal(2, 3), _normal(3))
    yield "Div", _example(_normal(2, 3), _between(0.5, 2, 2, 1))
    for name in ("Max", "Min"):
        yield name, _example(_apart(2, 3), _apart(2, 3)[::-1] + 0.05)
    yield "Mean", _example(_normal(2, 3), _normal(2, 3), _normal(2, 3))
    yield "Sum", _example(_normal(2, 3), _normal(2, 3))
    yield "Sum", _example(_normal(2, 3), _normal(3), broadcast=1)
    yield "WeightedSum", _example(_normal(4), _normal(1), _normal(4), _normal(1), grad_on_w=1)
    yield "Where", _example(_rng.random((2, 3)) < 0.5, _normal(2, 3), _normal(2, 3))


def _reductions() -> Iterator[tuple[str, Example]]:
    for name in ("ReduceL2", "ReduceL1", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd", "ReduceSum"):
        yield name, _example(_apart(2, 3, 2), axes=[1], keepdims=0)
    for name in ("Max", "Mean", "Sum"):
        yield f"ReduceBack{name}", _example(_apart(2, 3, 2), num_reduce_dim=2)
        yield f"ReduceFront{name}", _example(_apart(2, 3, 2), num_reduce_dim=1)
    for name in ("ColwiseMax", "RowwiseMax"):
        yield name, _example(_apart(2, 3, 4))
    for name in ("SumElements", "SumSqrElements", "AveragedLoss"):
        yield name, _example(_normal(2, 3))
    for power, average in ((1, 0), (2, 0), (2, 1)):
        yield "LpNorm", _example(_apart(2, 3), p=power, average=average)
    yield "ReduceTailSum", _example(_normal(2, 3, 2))
    yield "Moments", Example([_normal(2, 3, 2)], outputs=2, arguments={"axes": [0, 2], "keepdims": 0})
    for name in ("Softmax", "LogSoftmax"):
        yield name, _example(_normal(2, 4))
    yield "Normalize", _example(_normal(2, 4))


def _shapes() -> Iterator[tuple[str, Example]]:
    x = _normal(2, 3, 4)
    for name in ("Flatten", "FlattenToVec", "Transpose"):
        yield name, _example(x)
    yield "Reshape", Example([x], outputs=2, arguments={"shape": [4, -1]})
    yield "ResizeLike", Example([x, np.zeros((4, 6))], wanted=(0,))
    yield "PrependDim", _example(x, dim_size=2)
    yield "MergeDim", _example(x)
    yield "ExpandDims", _example(x, dims=[1])
    yield "Squeeze", _example(_normal(2, 1, 3), dims=[1])
    yield "Concat", Example([_normal(2, 3), _normal(2, 1)], outputs=2, arguments={"axis": 1})
    yield "DepthConcat", Example([_normal(2, 3, 1, 1), _normal(2, 1, 1, 1)], outputs=2)
    yield "Split", Example([x], outputs=2, arguments={"axis": 1, "split": [1, 2]})
    yield "Slice", _example(x, starts=[0, 1, 1], ends=[-1, 3, 3])
    yield "Tile", _example(_normal(2, 3), tiles=3, axis=1)
    yield "Expand", _example(_normal(2, 1), shape=[2, 3])
    yield "Pad", _example(_normal(2, 3), pads=[0, 1, 1, 0])
    yield "PadImage", _example(_normal(1, 2, 3, 3), pad=1, mode="reflect")
    yield "Gather", _example(_normal(4, 2), _integers(1, 3, 1))
    yield "BatchGather", _example(_normal(2, 4), _integers(1, 3, 1))
    yield "IndexRows", _example(_normal(2, 2, 3), np.zeros((2, 2), np.int64))
    yield "SparseToDense", Example([_integers(1, 3, 1), _normal(3, 2), np.zeros((5, 2))], wanted=(1,))
    yield "BooleanMask", Example([_normal(4, 2), np.array([True, False, True, True])], wanted=(0,))
    lengths, weights = np.array([2, 0, 3], np.int32), _normal(5)
    for kind in ("Sum", "Mean"):
        yield f"Lengths{kind}", Example([_normal(5, 2), lengths], wanted=(0,))
        yield f"SparseLengths{kind}", Example([_normal(4, 2), _integers(1, 3, 1, 0, 0), lengths], wanted=(0,))
    yield "LengthsWeightedSum", Example([_normal(5, 2), weights, lengths], wanted=(0,))
    rows = _integers(1, 3, 1, 0, 0)
    yield "SparseLengthsWeightedSum", Example([_normal(4, 2), weights, rows, lengths], wanted=(0,))
    yield "LengthsMax", Example([_apart(5, 2), lengths], wanted=(0,))
    with_weights: dict[str, ArgumentValue] = {"grad_on_weights": 1}
    yield "LengthsWeightedSum", Example([_normal(5, 2), weights, lengths], wanted=(0, 1), arguments=with_weights)
    yield (
        "SparseLengthsWeightedSum",
        Example([_normal(4, 2), weights, rows, lengths], wanted=(0, 1), arguments=with_weights),
    )
    yield from _segments_by_number(rows)
    yield "LengthsTile", Example([_normal(3, 2), lengths], wanted=(0,))
    yield from _padded_and_packed(lengths)
    yield from _merged_features()
    identifiers, shown = _integers(7, 2, 9, 2, 3), {"mask": [9, 2, 4]}
    yield "SparseToDenseMask", Example([identifiers, _normal(5, 2), _normal(2)], wanted=(1,), arguments=shown)
    yield "SparseToDenseMask", Example([identifiers, _normal(5), _normal(), lengths], wanted=(1,), arguments=shown)
    yield "SplitByLengths", Example([_normal(2, 5), lengths[[0, 2, 1, 1]]], 2, (0,), arguments={"axis": 1})
    yield "LengthsTopK", Example([_apart(5), lengths], outputs=2, wanted=(0,), arguments={"k": 2})
    yield "PackRNNSequence", Example([_normal(5, 2), lengths], wanted=(0,))
    yield "UnpackRNNSequence", Example([_normal(3, 3, 2), lengths], wanted=(0,))
    yield "GatherByKey", Example([_integers(0, 1, 3, 2, 1), _normal(2, 2), _normal(3, 2)], wanted=(1, 2))
    sparse = [lengths, _integers(1, 3, 1, 0, 2)]
    yield "BatchSparseToDense", Example([*sparse, _normal(5)], wanted=(2,), arguments={"dense_last_dim": 4})
    yield "BatchDenseToSparse", Example([*sparse, _normal(3, 4)], wanted=(2,), arguments={"dense_last_dim": 4})
    yield "SpaceToBatch", _example(_normal(1, 2, 2, 4), pad=1)
    yield "BatchToSpace", _example(_normal(4, 2, 2, 3), pad=1)
    yield "BatchMoments", Example([_normal(2, 3, 2, 2)], outputs=2)
    yield "TopK", Example([_apart(2, 5)], outputs=2, arguments={"k": 2})
    yield "TopK", Example([_apart(2, 5)], outputs=2, arguments={"k": 2, "axis": 0, "largest": 0})
    yield from _places()
    yield "Trilu", Example([x, _integers(1)], wanted=(0,))
    yield "ReverseSequence", Example([x, _integers(2, 0, 1)], wanted=(0,))
    yield "CumSum", _example(x, axis=1, exclusive=1)
    yield "CumSum", Example([x, _integers(-1)], wanted=(0,), arguments={"reverse": 1})
    image = _normal(2, 4, 3, 3)
    yield "ResizeNearest", _example(image, height_scale=2.0, width_scale=2.0)
    yield "UpsampleBilinear", _example(image, height_scale=2.0, width_scale=1.5)
    yield "UpsampleNearest", _example(image, scale=3)
    rois = np.array([[0, 0.4, 0.3, 2.2, 1.9], [1, 1.1, 0.2, 4.5, 2.7]])
    yield "RoIAlign", Example([image, rois], wanted=(0,), arguments={"pooled_h": 2, "pooled_w": 2})
    yield from _detectors()
    yield "ChannelShuffle", _example(image, group=2)
    yield "DepthToSpace", _example(_normal(1, 8, 2, 3), block_size=2)
    yield "SpaceToDepth", _example(_normal(1, 2, 4, 6), block_size=2, mode="CRD")
    yield "NCHW2NHWC", _example(image)
    yield "NHWC2NCHW", _example(image)


def _segments_by_number(rows: Array) -> Iterator[tuple[str, Example]]:
    weights = _normal(5)
    for kind, ids in (("Sorted", _integers(0, 0, 1, 2, 2)), ("Unsorted", _integers(3, 0, 1, 0, 0))):
        for name, data in (("Sum", []), ("Mean", []), ("WeightedSum", [weights])):
            yield f"{kind}Segment{name}", Example([_normal(5, 2), *data, ids], wanted=(0,))
            yield f"Sparse{kind}Segment{name}", Example([_normal(4, 2), *data, rows, ids], wanted=(0,))
    for name in ("Sum", "Mean", "Max", "LogSumExp", "LogMeanExp"):
        yield f"SortedSegmentRange{name}", Example([_apart(5, 2), _integers(0, 0, 1, 2, 2)], wanted=(0,))


def _detectors() -> Iterator[tuple[str, Example]]:
    rois = np.array([[0, 0.4, 0.3, 2.2, 1.9], [1, 1.1, 0.2, 4.5, 2.7]])
    sizes = {"pooled_h": 2, "pooled_w": 2}
    rotated = np.array([[0, 1.3, 1.6, 2.2, 1.9, 30.0], [1, 1.1, 1.2, 3.5, 2.7, -70.0]])
    yield "RoIAlignRotated", Example([_normal(2, 4, 3, 3), rotated], wanted=(0,), arguments=sizes)
    for name in ("RoIPool", "RoIPoolF"):
        yield name, Example([_apart(2, 2, 4, 4), rois], 2, (0,), statistics=(1,), arguments=sizes)
    group = {"group_size": 2, "output_dim": 2}
    yield "PSRoIPool", Example([_normal(2, 8, 4, 4), rois], 2, (0,), statistics=(1,), arguments=group)
    permutation, labels = np.array([2, 0, 1], np.int32), np.array([1, 0, 3], np.int32)
    yield "BatchPermutation", Example([_normal(3, 2, 2), permutation], wanted=(0,))
    yield "SampleAs", Example([_normal(3, 2), labels], wanted=(0,))
    yield "SpatialNarrowAs", Example([_normal(2, 3, 4), _normal(2, 2, 3)], wanted=(0,))
    weights = [_between(0.5, 2, 3, 4), _between(0.5, 2, 3, 4)]
    box = {"beta": 0.7, "scale": 1.5}
    yield "SmoothL1Loss", Example([_normal(3, 4), _normal(3, 4), *weights], wanted=(0,), arguments=box)
    places, count = np.array([[0, 4, 1, 2], [1, 0, 0, 0], [0, 4, 1, 2]], np.float64), np.array([2.0])
    selected = [_normal(2, 8, 2, 3), _normal(3, 4), places, count]
    yield "SelectSmoothL1Loss", Example(selected, wanted=(0,), arguments=box)
    targets = np.array([[1, 0], [-1, 1]], np.int32)
    for normalize in (0, 1):
        arguments = {"scale": 1.5, "normalize": normalize}
        yield "SigmoidCrossEntropyLoss", Example([_normal(2, 2), targets], wanted=(0,), arguments=arguments)
    classes = np.array([0, 1, 2, -1, 2, 0, 1, 2], np.int32).reshape(1, 2, 2, 2)
    focal = {"num_classes": 3, "gamma": 2.0, "alpha": 0.3, "scale": 1.5}
    yield "SigmoidFocalLoss", Example([_normal(1, 6, 2, 2), classes, count], wanted=(0,), arguments=focal)
    scores = [_normal(1, 6, 2, 2), classes, count]
    yield "SoftmaxFocalLoss", Example(scores, 2, (0,), statistics=(1,), arguments=focal)
    yield "GroupSpatialSoftmax", _example(_normal(1, 6, 2, 2), num_classes=3)


def _padded_and_packed(lengths: Array) -> Iterator[tuple[str, Example]]:
    widths: dict[str, ArgumentValue] = {"padding_width": 2, "end_padding_width": 1}
    paddings = [_normal(2), _normal(2)]
    yield "AddPadding", Example([_normal(5, 2)], arguments=widths)
    yield "AddPadding", Example([_normal(5, 2), lengths, *paddings], 2, (0, 2, 3), statistics=(1,), arguments=widths)
    yield "AddPadding", Example([_normal(5, 2), lengths, *paddings[:1]], 2, (0, 2), statistics=(1,), arguments=widths)
    longer = lengths + np.int32(3)
    yield "RemovePadding", Example([_normal(14, 2), longer], 2, (0,), statistics=(1,), arguments=widths)
    yield "PackSegments", Example([lengths, _normal(5, 2)], wanted=(1,))
    yield "PackSegments", Example([lengths, _normal(5, 2)], wanted=(1,), arguments={"max_length": 2})
    yield "UnpackSegments", Example([lengths, _normal(3, 3, 2)], wanted=(1,))
    yield "ReversePackedSegs", Example([_normal(3, 3, 2), lengths], wanted=(0,))
    for mode, numbers in (("sequence", [lengths]), ("window", [lengths]), ("upper", [])):
        yield "SequenceMask", Example([_normal(3, 4), *numbers], wanted=(0,), arguments={"mode": mode, "fill_val": 0.5})


def _merged_features() -> Iterator[tuple[str, Example]]:
    present = [np.array([True, False]), np.array([True, True])]
    lengths, counts = np.array([1, 2], np.int32), np.array([2, 0, 1], np.int32)
    ids: dict[str, ArgumentValue] = {"feature_ids": [5, 6]}
    values, keys = _normal(2, 3), _integers(1, 2, 3)
    groups: dict[str, tuple[list[list[Array]], int]] = {
        "SingleScalar": ([[values[0, :2], present[0]], [values[1, :2], present[1]]], 0),
        "SingleList": ([[lengths, values[0], present[0]], [lengths, values[1], present[1]]], 1),
        "SingleMap": ([[lengths, keys, values[0], present[0]], [lengths, keys, values[1], present[1]]], 2),
        "MultiScalar": ([[lengths, keys, values[0]], [lengths, keys, values[1]]], 2),
        "MultiList": ([[lengths, keys, counts, values[0]], [lengths, keys, counts, values[1]]], 3),
        "MultiMap": ([[lengths, keys, counts, keys, values[0]], [lengths, keys, counts, keys, values[1]]], 4),
    }
    for kind, ((first, second), place) in groups.items():
        outputs = 3 + (not kind.endswith("Scalar")) + kind.endswith("Map")
        wanted, rest = (place, len(first) + place), tuple(range(outputs - 1))
        single = ids if kind.startswith("Single") else {}
        yield f"Merge{kind}FeatureTensors", Example([*first, *second], outputs, wanted, {}, rest, single)
    mask = np.array([[True, False], [True, True]])
    yield "MergeDenseFeatureTensors", Example([_normal(2, 2), mask], 3, (0,), {}, (0, 1), ids)


def _lists() -> Iterator[tuple[str, Example]]:
    yield "SquareRootDivide", Example([_normal(3, 2), _integers(4, 0, 9)], wanted=(0,))
    yield "FlexibleTopK", Example([_apart(3, 5), _integers(2, 1, 5)], outputs=2, wanted=(0,))
    yield "IntegralImage", _example(_normal(2, 2, 3, 4))


def _places() -> Iterator[tuple[str, Example]]:
    twice, once = _integers(2, 0, 2, 1).reshape(2, 2), _integers(2, 0, 1, 1).reshape(2, 2)
    yield "GatherElements", _example(_normal(3, 2), twice)
    yield "ScatterElements", _example(_normal(3, 2), once, _normal(2, 2))
    yield "ScatterElements", _example(_normal(2, 3), twice, _normal(2, 2), axis=1, reduction="add")
    yield "GatherND", _example(_normal(3, 2, 2), twice[:, :1])
    yield "GatherND", _example(_normal(2, 3, 2), twice[..., np.newaxis], batch_dims=1)
    yield "ScatterND", _example(_normal(3, 2), once[:, :1], _normal(2, 2))
    yield "ScatterND", _example(_normal(3, 3, 2), twice[:, np.newaxis], _normal(2, 1, 2), reduction="add")


def _products() -> Iterator[tuple[str, Example]]:
    yield "FC", _example(_normal(2, 3), _normal(4, 3), _normal(4))
    yield "FCTransposed", _example(_normal(2, 3), _normal(3, 4), _normal(4))
    yield "MatMul", _example(_normal(2, 3), _normal(4, 3), trans_b=1)
    yield "BatchMatMul", _example(_normal(2, 2, 3), _normal(2, 3, 2))
    yield "Einsum", _example(_normal(2, 3, 2), _normal(3, 4, 2), equation="bij,ikj->kb")
    yield "Einsum", _example(_normal(2, 3), _normal(3), _normal(2), equation="ij,j,i")
    yield "Gemm", _example(_normal(2, 3), _normal(3, 4), _normal(4), alpha=0.5, beta=2.0)


def _windows() -> Iterator[tuple[str, Example]]:
    for suffix, rank in (("", 2), ("1D", 1), ("2D", 2), ("3D", 3)):
        size, kernels = (4,) * rank, (2,) * rank
        x = _apart(1, 2, *size) if rank < 3 else _apart(1, 1, *size)
        channels = x.shape[1]
        sizes: list[ArgumentValue] = [list(kernels), [2] * rank]
        window: dict[str, ArgumentValue] = {"kernels": sizes[0], "strides": sizes[1]}
        yield f"Conv{suffix}", Example([x, _normal(2, channels, *kernels), _normal(2)], arguments=window)
        yield f"ConvTranspose{suffix}", Example([x, _normal(channels, 2, *kernels), _normal(2)], arguments=window)
        places = (2,) * rank
        filters = _normal(*places, 2, channels, *kernels)
        yield f"LC{suffix}", Example([x, filters, _normal(*places, 2)], arguments=window)
        yield f"AveragePool{suffix}", Example([x], arguments=window)
        yield f"MaxPool{suffix}", Example([x], arguments=window)
        yield f"LpPool{suffix}", Example([x], arguments={**window, "p": 3.0})
        yield f"MaxPoolWithIndex{suffix}", Example([x], outputs=2, arguments=window)
    yield "Im2Col", _example(_normal(1, 2, 3, 3), kernel=2)
    yield "Col2Im", Example([_normal(1, 8, 2, 2), np.zeros((1, 2, 3, 3))], wanted=(0,), arguments={"kernel": 2})


def _normalizations() -> Iterator[tuple[str, Example]]:
    image, four, two = _normal(2, 4, 2, 2), _normal(4), _between(0.5, 2, 4)
    trained: dict[str, Any] = {"outputs": 5, "inplace": {1: 3, 2: 4}, "statistics": (1, 2, 3, 4), "wanted": (0, 1, 2)}
    yield "SpatialBN", Example([image, four, four, four, two], **trained, arguments={"is_test": 0})
    yield "SpatialBN", Example([image, four, four, four, two], wanted=(0, 1, 2), arguments={"is_test": 1})
    saved: dict[str, Any] = {"outputs": 3, "statistics": (1, 2)}
    yield "InstanceNorm", Example([image, four, four], **saved)
    yield "GroupNorm", Example([image, four, four], **saved, arguments={"group": 2})
    yield "LayerNorm", Example([_normal(2, 4), four, two], **saved)
    yield "ElementwiseLinear", _example(_normal(2, 4), four, two)
    yield "AffineChannel", _example(image, four, two, is_learnable=1)
    yield "AffineChannel", Example([_normal(2, 3, 4), four, two], wanted=(0,), arguments={"order": "NHWC"})
    yield "RowMul", _example(_normal(4, 2, 2), four)
    yield "LRN", _example(image, size=3, alpha=0.5, beta=0.75)
    yield "Dropout", Example([_normal(8)], outputs=2, arguments={"is_test": 1})


def _losses() -> Iterator[tuple[str, Example]]:
    labels = np.array([0, 3], np.int32)
    for name in ("SoftmaxWithLoss",):
        yield name, Example([_normal(2, 4), labels], outputs=2, statistics=(0,))
    spatial = np.array([[[0, 1], [-1, 2]]], np.int32)
    yield "SpatialSoftmaxWithLoss", Example([_normal(1, 3, 2, 2), spatial], outputs=2, statistics=(0,))
    yield "LabelCrossEntropy", _example(_probabilities(2, 4), labels)
    yield "CrossEntropy", Example([_probabilities(2, 4), _probabilities(2, 4)], wanted=(0,))
    signs = np.array([1, -1, 1, -1], np.int32)
    yield "CosineEmbeddingCriterion", Example([_apart(4), signs], wanted=(0,), arguments={"margin": 0.05})
    yield "MarginRankingCriterion", Example([_apart(4), _apart(4) + 0.05, signs], wanted=(0, 1))
    yield "BernoulliJSD", Example([_between(0.2, 0.8, 5), _between(0.2, 0.8, 5)], wanted=(0,))
    sessions = [np.array([0.0, 1, 2, 1, 0]), np.array([3, 0, 2], np.int32)]
    yield "PairWiseLoss", Example([_apart(5), *sessions], wanted=(0,))
    yield "PairWiseLoss", Example([_apart(5), sessions[0]], wanted=(0,))
    yield "DotProductWithPadding", _example(_normal(2, 5), _normal(2, 3), pad_value=0.5)
    yield "DotProductWithPadding", _example(_normal(2, 2), _normal(2, 4), replicate=1)
    yield "MakeTwoClass", _example(_between(0.1, 0.9, 3))
    yield "SigmoidCrossEntropyWithLogits", Example([_apart(2, 3), _between(0, 1, 2, 3)], wanted=(0,))
    weighted = Example([_apart(2, 3), _between(0, 1, 2, 3), _between(1, 2, 2, 3)], wanted=(0,))
    yield "WeightedSigmoidCrossEntropyWithLogits", weighted
    for name in ("SquaredL2Distance", "L1Distance", "DotProduct", "CosineSimilarity"):
        yield name, _example(_apart(2, 3), _normal(2, 3))


def _recurrent() -> Iterator[tuple[str, Example]]:
    steps, batch, features, hidden = 3, 2, 2, 2
    x = _normal(steps, batch, features)
    for name, gates, saved in (("LSTM", 4, (3, 4)), ("GRU", 3, (2, 3))):
        weights = [_normal(1, gates * hidden, features), _normal(1, gates * hidden, hidden)]
        bias = _normal(1, 2 * gates * hidden)
        yield (
            name,
            Example(
                [x, *weights, bias],
                outputs=saved[-1] + 1,
                statistics=saved,
                arguments={"hidden_size": hidden, "bias": 1},
            ),
        )
    lengths, step = np.array([3, 1], np.int32), np.array([1], np.int32)
    state = _normal(1, batch, hidden)
    yield "LSTMUnit", Example([state, state, _normal(1, batch, 4 * hidden), lengths, step], outputs=2)
    yield "GRUUnit", Example([state, _normal(1, batch, 3 * hidden), lengths, step], wanted=(0, 1))


STRETCHES: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, ArgumentValue]]] = [
    ((3,), (2, 3), {}),
    ((2, 1, 3), (4, 1), {}),
    ((2, 3), (), {}),
    ((), (), {}),
    ((2, 3, 4), (3,), {"broadcast": 1, "axis": 1}),
    ((2, 3, 4), (2, 3), {"broadcast": 1, "axis": 0}),
    ((2, 3, 4), (3, 4), {"broadcast": 1}),
    ((2, 3, 4), (1,), {"broadcast": 1}),
    ((2, 3, 4), (1, 3, 1), {"broadcast": 1}),
    ((2, 3, 2, 2), (3,), {"broadcast": 1, "axis_str": "C"}),
    ((2, 2, 2, 3), (3,), {"broadcast": 1, "axis_str": "C", "order": "NHWC"}),
]
"""Shapes of operands of which one is stretched, and arguments."""


def _stretched() -> Iterator[tuple[str, Example]]:
    for a, b, arguments in STRETCHES:
        for name in ("Add", "Sub", "Mul", "Div", "Pow"):
            yield name, _example(_between(0.5, 2, *a), _between(0.5, 2, *b), **arguments)
    for exponent in (2.0, 3.0, 1.0, 0.0, -1.0):
        yield "Pow", _example(_between(0.5, 2, 2, 3, 2), exponent=exponent)
    yield "Pow", Example([_between(-2, 2, 2, 3), _integers(0, 1, 3)], wanted=(0,))
    for name in ("Max", "Min", "Mean", "Sum"):
        yield name, _example(_apart(2, 3), _apart(2, 3) + 0.03, _apart(2, 3) + 0.06)
    for shapes in (((2, 3), (3,), (2, 1)), ((3,), (2, 3), ())):
        chosen, x, y = shapes
        yield "Where", _example(_rng.random(chosen) < 0.5, _normal(*x), _normal(*y))
    rows = Example([_rng.random(2) < 0.5, _normal(2, 3, 2), _normal(2, 3, 2)], arguments={"broadcast_on_rows": 1})
    yield "Where", rows
    for name in ("Softmax", "LogSoftmax"):
        for axis, single in ((0, 0), (-1, 0), (3, 0), (1, 1), (0, 1), (-1, 1)):
            yield name, _example(_normal(2, 3, 4), axis=axis, single_axis=single)
    for slope, order in (((1,), "NCHW"), ((5,), "NHWC"), ((3, 1, 1), "NCHW"), ((2, 1, 4, 1), "NCHW")):
        yield "PRelu", _example(_apart(2, 3, 4, 5), _normal(*slope), order=order)
    yield "Cast", _example(_normal(3), to="double", from_type="double")
    for shape in ((2, 3), (0,), ()):
        weighted = [_normal(*shape), np.array([0.5]), _normal(*shape), np.array([-2.0])]
        yield "WeightedSum", _example(*weighted, grad_on_w=1)
        yield "WeightedSum", Example(weighted, wanted=(0, 2), inplace={0: 0})


def _multiplied() -> Iterator[tuple[str, Example]]:
    for x, w, arguments in (
        ((2, 3, 4), (5, 12), {}),
        ((2, 3, 4), (5, 4), {"axis": 2}),
        ((2, 3, 4), (5, 4), {"axis": -1}),
        ((2, 6), (2, 2, 6), {"axis_w": 2}),
        ((2, 6), (2, 2, 6), {"axis_w": -1}),
        ((6,), (3, 6), {"axis": 0}),
    ):
        units = int(np.prod(w[: arguments.get("axis_w", 1)]))
        yield "FC", _example(_normal(*x), _normal(*w), _normal(units), **arguments)
    for turned_a, turned_b in ((0, 0), (0, 1), (1, 0), (1, 1)):
        turned: dict[str, ArgumentValue] = {"trans_a": turned_a, "trans_b": turned_b}
        a = _normal(2, 2, 3) if turned_a else _normal(3, 2, 2)
        b = _normal(2, 2, 2) if turned_b else _normal(4, 2)
        folds: dict[str, ArgumentValue] = {"axis_a": 2} if turned_a else {}
        yield "MatMul", _example(a, b, **turned, **folds)
        for like in ((6,), (1, 3, 2)):
            yield "MatMul", Example([a, b, np.zeros(like, np.float32)], wanted=(0, 1), arguments={**turned, **folds})
        for stack_a, stack_b in (
            ((2, 3), ()),
            ((), (2, 3)),
            ((2, 1), (3,)),
            ((3,), (2, 3)),
            ((1,), (2,)),
            ((2,), (2,)),
        ):
            a = _normal(*stack_a, *((3, 2) if turned_a else (2, 3)))
            b = _normal(*stack_b, *((4, 3) if turned_b else (3, 4)))
            yield "BatchMatMul", _example(a, b, broadcast=1, **turned)
        a, b = _normal(*((3, 1) if turned_a else (1, 3))), _normal(*((4, 3) if turned_b else (3, 4)))
        yield "BatchMatMul", _example(a, b, **turned)
        a, b = _normal(*((4, 3) if turned_a else (3, 4))), _normal(*((2, 4) if turned_b else (4, 2)))
        for c in ((), (2,), (3, 1), (1, 2), (3, 2)):
            yield "Gemm", _example(a, b, _normal(*c), alpha=0.5, beta=1.5, **turned)
        yield "Gemm", _example(a, b, alpha=0.5, **turned)
    for one, other in (((3,), (3,)), ((3,), (3, 2)), ((3,), (2, 3, 2)), ((2, 3), (3,)), ((2, 4, 3), (3,))):
        yield "BatchMatMul", _example(_normal(*one), _normal(*other), broadcast=1)


def _moved() -> Iterator[tuple[str, Example]]:
    for name, arguments in (
        ("Flatten", {"axis": 0}), ("Flatten", {"axis": -1}), ("Reshape", {"shape": [0, -1]}),
        ("Reshape", {"shape": [3, 1, 4]}), ("Squeeze", {"dims": [1]}), ("Squeeze", {"dims": [-2]}),
        ("ExpandDims", {"dims": [0, -1]}), ("Transpose", {"axes": [2, 0, 1]}),
        ("Reorder", {"from_order": "NCHW", "to_order": "NHWC"}),
    ):  # fmt: skip
        yield name, _example(_apart(2, 1, 6), **arguments)
    yield "Reshape", Example([_normal(2, 3), _integers(3, 2)], outputs=2, wanted=(0,))
    yield "Squeeze", Example([_normal(2, 1, 3)], inplace={0: 0}, arguments={"dims": [1]})
    yield "ExpandDims", Example([_normal(2, 3)], inplace={0: 0}, arguments={"dims": [1]})
    image = _normal(2, 3, 1, 3)
    for arguments in ({"order": "NHWC"}, {"order": "NCHW"}, {"add_axis": 1, "axis": 1}, {"add_axis": 1, "axis": -1}):
        for outputs in (1, 2):
            yield "Concat", Example([image, image + 1], outputs, arguments=arguments)
            if "order" in arguments:
                yield "DepthConcat", Example([image, image + 1], outputs, arguments=arguments)
    for axis in (-3, -1, 0, 1):
        parts = [np.moveaxis(_normal(count, 2, 3), 0, axis).copy() for count in (1, 2, 3)]
        yield "Concat", Example(parts, arguments={"axis": axis})
    for outputs, arguments in (
        (3, {"axis": 1}), (3, {"axis": -2, "split": [1, 2, 3]}), (2, {"axis": 0}), (2, {"axis": 0, "add_axis": 1}),
        (3, {"order": "NCHW"}), (1, {"axis": 2}),
    ):  # fmt: skip
        yield "Split", Example([_normal(2, 6, 3)], outputs, arguments=arguments)
    by_input = Example([_normal(2, 6), np.array([4, 2], np.int32)], outputs=2, wanted=(0,), arguments={"axis": 1})
    yield "Split", by_input
    for arguments in (
        {"starts": [0, 1], "ends": [-1, 3]}, {"starts": [1], "ends": [1]},
        {"starts": [-2], "ends": [-1], "axes": [-1]}, {"starts": [0], "ends": [5], "steps": [2], "axes": [1]},
        {"starts": [4], "ends": [-9], "steps": [-2], "axes": [1], "onnx_style": 1},
    ):  # fmt: skip
        yield "Slice", _example(_normal(2, 5), **arguments)
    yield "Slice", Example([_normal(4, 3), _integers(1, 0), _integers(3, 2)], wanted=(0,))
    for axis in (-2, 0, 1):
        yield "Tile", _example(_normal(2, 3), tiles=2, axis=axis)
        yield "Tile", Example([_normal(2, 0), _integers(3), _integers(axis)], wanted=(0,))
    for shape, expanded in (
        ((3, 1), [2, 1, 4]),
        ((1,), [2, 3]),
        ((), [2, 2]),
        ((2, 3), [1]),
        ((2, 1, 2), [3, 1]),
        ((1, 3), [0, 3]),
    ):
        yield "Expand", _example(_normal(*shape), shape=expanded)
        yield "Expand", Example([_normal(*shape), np.array(expanded)], wanted=(0,))


def _picked() -> Iterator[tuple[str, Example]]:
    for indices in ([1, 1, 0], [[2, 0], [2, 2]], 1, []):
        picks = np.array(indices, np.int64)
        for dense in (0, 1):
            yield "Gather", _example(_normal(3, 2), picks.astype(np.int32), dense_gradient=dense)
        for axis in (0, 1, -1):
            yield "Gather", _example(_normal(3, 3, 3), picks, axis=axis)
            yield "Gather", _example(_normal(3, 3, 3), picks - 3, axis=axis, wrap_indices=1)
        yield "BatchGather", _example(_normal(2, 3, 2), picks.astype(np.int32))
    for shape, axis, k in (((4,), 0, 0), ((2, 3), -1, 3), ((3, 2, 4), 1, 1), ((3, 2, 4), 0, 2)):
        yield "TopK", Example([_apart(*shape)], outputs=3, arguments={"k": k, "axis": axis})
        yield "TopK", Example([_apart(*shape), _integers(k)], outputs=2, wanted=(0,), arguments={"axis": axis})


def _of_images() -> Iterator[tuple[str, Example]]:
    x = _normal(2, 2, 4, 5)
    for order in ("NCHW", "NHWC"):
        for height, width in ((2.0, 3.0), (1.0, 1.0), (1.5, 2.5), (0.5, 0.3), (2.0, 0.7), (3.0, 1.2)):
            yield "ResizeNearest", _example(x, height_scale=height, width_scale=width, order=order)
            scales = np.array([height, width], np.float32)
            yield "ResizeNearest", Example([x, scales], wanted=(0,), arguments={"order": order})
        for group in (1, 2, 3, 6):
            yield (
                "ChannelShuffle",
                _example(_normal(*((2, 6, 1, 2), (2, 1, 2, 6))[order == "NHWC"]), group=group, order=order),
            )
        for mode in ("constant", "reflect", "edge"):
            yield "PadImage", _example(_normal(2, 3, 4, 2), mode=mode, order=order, pads=[1, 1, 2, 0], value=3.0)
        pooled = _apart(2, 4, 4, 2)
        for window in ({"kernel": 2, "stride": 2}, {"kernel": 3, "pad": 1}, {"global_pooling": 1}):
            for name in ("MaxPool", "AveragePool", "LpPool"):
                yield name, _example(pooled, order=order, **window)
        columns: dict[str, ArgumentValue] = {"kernel": 2, "pad": 1, "stride": 2, "order": order}
        image = _normal(1, 3, 4, 2)
        yield "Im2Col", _example(image, **columns)
        shape = (1, 12, 3, 2) if order == "NCHW" else (1, 2, 3, 8)
        yield "Col2Im", Example([_normal(*shape), image], wanted=(0,), arguments=columns)
    for mode in ("constant", "reflect", "edge"):
        for pads in ([1, -1], [-1, 0], [1, 0, 1, 1, 1, 0], [0, -1, 1, -1]):
            yield "Pad", _example(_normal(*(3, 4, 3)[: len(pads) // 2]), mode=mode, pads=pads)
    window = {"kernels": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1], "group": 2}
    yield "Conv", _example(_normal(2, 2, 4, 3), _normal(4, 1, 3, 2), _normal(4), **window)
    yield "Conv1D", _example(_normal(2, 2, 5), _normal(3, 2, 3), kernels=[3], dilations=[2])
    yield "ConvTranspose", _example(_normal(1, 2, 2, 3), _normal(2, 3, 2, 2), kernels=[2, 2], strides=[2, 1])
    yield "LC", _example(_normal(2, 2, 3, 3), _normal(2, 2, 2, 2, 2, 2), kernels=[2, 2])
    for flat in (0, 1):
        indexed: dict[str, ArgumentValue] = {"kernel": 2, "stride": 1, "flat_indices": flat}
        yield "MaxPoolWithIndex", Example([_apart(2, 2, 4, 3)], outputs=2, arguments=indexed)


def _units() -> Iterator[tuple[str, Example]]:
    state, step = _normal(1, 3, 2), np.array([1], np.int32)
    for lengths in (None, [3, 1, 2], [0, 0, 0]):
        given = [] if lengths is None else [np.array(lengths, np.int32)]
        for drop in (0, 1):
            arguments: dict[str, ArgumentValue] = {"sequence_lengths": len(given), "drop_states": drop}
            gates = _normal(1, 3, 8)
            yield (
                "LSTMUnit",
                Example([state, state, gates, *given, step], outputs=2, arguments={**arguments, "forget_bias": 0.5}),
            )
            yield "GRUUnit", Example([state, _normal(1, 3, 6), *given, step], arguments=arguments)


def examples() -> dict[str, list[Example]]:
    """Examples by operator type. Each family draws anew, so that an example more changes no others."""
    found: dict[str, list[Example]] = {}
    families = (
        _elementwise, _reductions, _shapes, _products, _windows, _normalizations, _losses, _recurrent, _stretched,
        _multiplied, _moved, _picked, _of_images, _units, _lists,
    )  # fmt: skip
    for family in families:
        _rng.bit_generator.state = np.random.default_rng(zlib.crc32(family.__name__.encode())).bit_generator.state
        for name, example in family():
            found.setdefault(name, []).append(example)
    return found
