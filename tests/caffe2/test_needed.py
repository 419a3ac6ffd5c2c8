"""What families of Caffe2's models need: the table in docs/caffe2.md is the one that follows from what is registered.

`python -m tests.caffe2.test_needed` prints it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import dagexec.ops  # registers the operators  # noqa: F401
from dagexec.core.registry import registered_operators
from dagexec.core.subnets import ONLY_IN_MESSAGES
from dagexec.frontend.caffe2_int8 import OPERATORS as INT8

PAGE = Path(__file__).parents[2] / "docs" / "caffe2.md"

FAMILIES: Mapping[str, str] = {
    "classic nets": """
        AveragePool Concat Conv ConvTranspose Dropout Elu FC Flatten InstanceNorm LRN LeakyRelu MatMul MaxPool PRelu
        Relu Reshape Selu Sigmoid Slice Softmax SpatialBN Split Sum Tanh Transpose LpPool ChannelShuffle GroupNorm
        LayerNorm ResizeNearest Clip BatchMatMul Add Sub Mul Div Scale MaxPoolWithIndex PadImage Squeeze ExpandDims""",
    "training": """
        Accuracy AveragedLoss CrossEntropy LabelCrossEntropy SoftmaxWithLoss SigmoidCrossEntropyWithLogits
        SquaredL2Distance L1Distance MSRAFill XavierFill GaussianFill UniformFill ConstantFill GivenTensorFill Iter
        AtomicIter LearningRate WeightedSum ScatterWeightedSum MomentumSGD MomentumSGDUpdate Adagrad Adam RmsProp Ftrl
        Lars YellowFin SparseAdagrad RowWiseSparseAdagrad SparseAdam RowWiseSparseAdam Adadelta Wngrad StopGradient
        Print Checkpoint Save Load""",
    "Detectron": """
        AffineChannel BBoxTransform BatchPermutation BoxWithNMSLimit CollectAndDistributeFpnRpnProposals
        CollectRpnProposals DistributeFpnProposals GenerateProposals HeatmapMaxKeypoint PSRoIPool ResizeNearest RoIAlign
        RoIAlignRotated RoIPool RoIPoolF SampleAs SelectSmoothL1Loss SigmoidCrossEntropyLoss SigmoidFocalLoss
        SmoothL1Loss SoftmaxFocalLoss SpatialNarrowAs SpatialSoftmaxWithLoss UpsampleNearest GroupSpatialSoftmax
        AffineChannelGradient""",
    "recurrent nets": """
        RecurrentNetwork RecurrentNetworkGradient rnn_internal_apply_link rnn_internal_accumulate_gradient_input
        LSTMUnit LSTMUnitGradient GRUUnit GRUUnitGradient SequenceMask ReversePackedSegs AddPadding RemovePadding
        GatherPadding PackSegments UnpackSegments CTCBeamSearchDecoder CTCGreedyDecoder""",
    "control": """
        If While Do CreateScope HasScope Not And Or EQ LT GT GE LE Copy Alias EnsureCPUOutput ConditionalSetAtomicBool
        CreateAtomicBool CheckAtomicBool CreateCounter ResetCounter RetrieveCount CountUp CountDown CheckCounterDone
        CreateMutex AtomicFetchAdd Conditional Where IsMemberOf""",
    "communication": """
        CreateCommonWorld CloneCommonWorld DestroyCommonWorld Allreduce Allgather Barrier Broadcast Reduce ReduceScatter
        SendTensor ReceiveTensor NCCLAllreduce NCCLBroadcast FileStoreHandlerCreate RedisStoreHandlerCreate StoreSet
        StoreGet StoreAdd StoreWait""",
    "data": """
        CreateDB DBExists TensorProtosDBInput ImageInput CreateBlobsQueue EnqueueBlobs DequeueBlobs SafeEnqueueBlobs
        SafeDequeueBlobs CloseBlobsQueue CreateRebatchingQueue EnqueueRebatchingQueue DequeueRebatchingQueue
        CloseRebatchingQueue CreateTreeCursor ResetCursor ReadNextBatch ReadRandomBatch ComputeOffset SortAndShuffle
        CheckDatasetConsistency Append AtomicAppend CreateTensorVector TensorVectorSize ConcatTensorVector
        CollectTensor PackRecords UnPackRecords TrimDataset CreateMap MapToKeyValue KeyValueToMap CreateTextFileReader
        TextFileReaderRead IntIndexCreate LongIndexCreate StringIndexCreate IndexGet IndexLoad IndexStore IndexFreeze
        IndexSize Unique UnsafeCoalesce ByteWeightDequant""",
    "sparse models": """
        SparseLengthsSum SparseLengthsMean SparseLengthsWeightedSum SparseLengthsPositionalWeightedSum
        SparseLengthsSum8BitsRowwise SparseLengthsWeightedSum8BitsRowwise SparseLengthsMean8BitsRowwise
        SparseLengthsSumFused8BitRowwise SparseLengthsWeightedSumFused8BitRowwise SparseLengthsMeanFused8BitRowwise
        SparseLengthsSumFused4BitRowwise SparseLengthsSumFused2BitRowwise FloatToFused8BitRowwiseQuantized
        Fused8BitRowwiseQuantizedToFloat FloatToRowwiseQuantized8Bits Rowwise8BitQuantizedToFloat LengthsSum LengthsMean
        LengthsMax LengthsWeightedSum LengthsToRanges LengthsToSegmentIds LengthsToWeights LengthsToOffsets LengthsTile
        LengthsTopK LengthsGather LengthsRangeFill LengthsPad LengthsSplit SegmentIdsToLengths SegmentIdsToRanges
        SegmentIdsToLengthWeights SortedSegmentSum SortedSegmentMean SortedSegmentRangeSum SortedSegmentRangeMean
        SortedSegmentRangeMax SortedSegmentRangeLogSumExp SortedSegmentRangeLogMeanExp UnsortedSegmentSum
        UnsortedSegmentMean UnsortedSegmentWeightedSum SparseSortedSegmentSum SparseSortedSegmentMean
        SparseUnsortedSegmentSum SparseUnsortedSegmentMean SparseToDense SparseToDenseMask BatchSparseToDense
        BatchDenseToSparse GatherRanges GatherRangesToDense MergeSingleScalarFeatureTensors MergeIdLists
        SparseDropoutWithReplacement IndexHash BatchOneHot BatchBucketOneHot Bucketize OneHot BatchGather Gather
        LambdaRankNdcg PiecewiseLinearTransform Quantile DotProduct CosineSimilarity PairWiseLoss
        MarginRankingCriterion""",
    "int8 nets of phones": """
        Int8Add Int8AddRelu Int8AveragePool Int8AveragePoolRelu Int8ChannelShuffle Int8Concat Int8Conv Int8ConvRelu
        Int8ConvTranspose Int8Dequantize Int8FC Int8Flatten Int8GivenIntTensorFill Int8GivenTensorFill Int8LeakyRelu
        Int8MaxPool Int8Quantize Int8Relu Int8Reshape Int8ResizeNearest Int8RoIAlign Int8Sigmoid Int8Slice Int8Softmax
        Int8Sum Int8SumRelu Int8Transpose""",
}
"""By family, the types of operators that its models have."""


def table() -> str:
    """A row a family: how many types its models need, how many of them are here, and which are not."""
    here = {*registered_operators(), *ONLY_IN_MESSAGES, *INT8}
    rows = ["| models | types | here | not here |", "|---|---|---|---|"]
    for family, names in FAMILIES.items():
        needed = dict.fromkeys(names.split())
        missing = sorted(name for name in needed if name not in here)
        listed = ", ".join(f"`{name}`" for name in missing)
        rows.append(f"| {family} | {len(needed)} | {len(needed) - len(missing)} | {listed} |")
    return "\n".join(rows)


def test_the_table_in_the_documents_is_what_is_registered() -> None:
    assert table() in PAGE.read_text(), f"docs/caffe2.md should have:\n{table()}"


if __name__ == "__main__":
    print(table())
