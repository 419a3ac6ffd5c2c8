"""Every operator has a class for CUDA, or stands in the list of those that are the host's, with the reason."""

from __future__ import annotations

import pytest

import dagexec.ops  # registers the operators  # noqa: F401
from dagexec.core.registry import operator_module, registered_engines, registered_operators

COUNTERS = "a counter, a rate, a lock: a few bytes that the host decides by"
QUEUES = "queues hand tensors from one thread of the host to another"
FILES = "files and databases are read and written by the host"
DATA = "tables of records are data of the host until a batch is copied"
CONTROL = "the host decides what runs, and holds values that are no tensors"
PROCESSES = "processes meet through the host (MPI)"
STEPS = "of nets of steps that Caffe2 makes for itself"
ONNX = "of ONNX files, which are run on the host"
TABLES = "models on tables, texts and mappings among them, are run on the host"

HOST = {
    "AtomicFetchAdd": COUNTERS,
    "AtomicIter": COUNTERS,
    "CheckAtomicBool": COUNTERS,
    "CheckCounterDone": COUNTERS,
    "ConditionalSetAtomicBool": COUNTERS,
    "CountDown": COUNTERS,
    "CountUp": COUNTERS,
    "CreateAtomicBool": COUNTERS,
    "CreateCounter": COUNTERS,
    "CreateMutex": COUNTERS,
    "Iter": COUNTERS,
    "LearningRate": COUNTERS,
    "ResetCounter": COUNTERS,
    "RetrieveCount": COUNTERS,
    **dict.fromkeys(
        (
            "AveragePut",
            "IncrementPut",
            "StdDevPut",
            "StatRegistryCreate",
            "StatRegistryExport",
            "StatRegistryUpdate",
            "TimerBegin",
            "TimerEnd",
            "TimerGet",
            "TimerGetAndEnd",
        ),
        COUNTERS,
    ),
    "rnn_internal_accumulate_gradient_input": STEPS,
    "rnn_internal_apply_link": STEPS,
    "CloseBlobsQueue": QUEUES,
    "CreateBlobsQueue": QUEUES,
    "DequeueBlobs": QUEUES,
    "EnqueueBlobs": QUEUES,
    "SafeDequeueBlobs": QUEUES,
    "SafeEnqueueBlobs": QUEUES,
    **dict.fromkeys(
        ("CreateRebatchingQueue", "EnqueueRebatchingQueue", "DequeueRebatchingQueue", "CloseRebatchingQueue"), QUEUES
    ),
    **dict.fromkeys(
        [
            "CreateTreeCursor",
            "ResetCursor",
            "ReadNextBatch",
            "ReadRandomBatch",
            "ComputeOffset",
            "SortAndShuffle",
            "CheckDatasetConsistency",
            "Append",
            "AtomicAppend",
            "TrimDataset",
            "PackRecords",
            "UnPackRecords",
            "UnsafeCoalesce",
            "CreateTensorVector",
            "CollectTensor",
            "ConcatTensorVector",
            "TensorVectorSize",
            "CreateMap",
            "KeyValueToMap",
            "MapToKeyValue",
            "IntIndexCreate",
            "LongIndexCreate",
            "StringIndexCreate",
            "IndexGet",
            "IndexLoad",
            "IndexStore",
            "IndexFreeze",
            "IndexSize",
        ],
        DATA,
    ),
    "CreateTextFileReader": FILES,
    "TextFileReaderRead": FILES,
    "ImageInput": FILES,
    "Checkpoint": FILES,
    "CreateDB": FILES,
    "DBExists": FILES,
    "Load": FILES,
    "Save": FILES,
    "Snapshot": FILES,
    "TensorProtosDBInput": FILES,
    "Allgather": PROCESSES,
    "Allreduce": PROCESSES,
    "Barrier": PROCESSES,
    "Broadcast": PROCESSES,
    "CloneCommonWorld": PROCESSES,
    "CreateCommonWorld": PROCESSES,
    "DestroyCommonWorld": PROCESSES,
    "FileStoreHandlerCreate": PROCESSES,
    "NCCLBroadcast": "a few copies, for parameters at the start",
    "ReceiveTensor": PROCESSES,
    "RedisStoreHandlerCreate": PROCESSES,
    "Reduce": PROCESSES,
    "ReduceScatter": PROCESSES,
    "SendTensor": PROCESSES,
    "StoreAdd": PROCESSES,
    "StoreGet": PROCESSES,
    "StoreSet": PROCESSES,
    "StoreWait": PROCESSES,
    "ConcatFromSequence": CONTROL,
    "CopyValue": CONTROL,
    "If": CONTROL,
    "Loop": CONTROL,
    "Optional": CONTROL,
    "OptionalGetElement": CONTROL,
    "OptionalHasElement": CONTROL,
    "Scan": CONTROL,
    "SequenceAt": CONTROL,
    "SequenceConstruct": CONTROL,
    "SequenceEmpty": CONTROL,
    "SequenceErase": CONTROL,
    "SequenceInsert": CONTROL,
    "SequenceLength": CONTROL,
    "SplitToSequence": CONTROL,
    "Island": "sessions of other runtimes are opened on the processor",
    "Python": "a function of the application works on arrays of NumPy",
    "OnnxSession": "sessions of other runtimes are opened on the processor",
    **dict.fromkeys(
        ("AddFixedPoint", "AveragePoolFixedPoint", "RequantizeFixedPoint", "SoftmaxOfBytes"),
        "of Caffe2's int8 nets, which are for processors of phones",
    ),
    "DynamicQuantLSTM": "of dynamically quantized ONNX files, which are for processors",
    "SparseDropoutWithReplacement": "the host draws how many identifiers there are",
    "APMeter": "rows of former runs are kept by the host",
    "GivenTensorStringFill": "strings are not tensors of a device",
    "BitCast": ONNX,
    "CenterCropPad": ONNX,
    "CumProd": ONNX,
    "CumSum": ONNX,
    "DepthToSpace": ONNX,
    "Einsum": ONNX,
    "GatherElements": ONNX,
    "GatherND": ONNX,
    "Hardmax": ONNX,
    "IsInf": ONNX,
    "LeftShift": ONNX,
    "OneHotAxis": ONNX,
    "ReverseSequence": ONNX,
    "RightShift": ONNX,
    "ScatterElements": ONNX,
    "ScatterND": ONNX,
    "SpaceToDepth": ONNX,
    "TensorScatter": ONNX,
    "TileAxes": ONNX,
    "Trilu": ONNX,
    "ArrayFeatureExtractor": TABLES,
    "Binarizer": TABLES,
    "CastMap": TABLES,
    "CategoryMapper": TABLES,
    "DictVectorizer": TABLES,
    "FeatureVectorizer": TABLES,
    "Imputer": TABLES,
    "LabelEncoder": TABLES,
    "LinearClassifier": TABLES,
    "LinearRegressor": TABLES,
    "Normalizer": TABLES,
    "OpenLength": "only executors on the host have lengths that vary",
    **dict.fromkeys(("OpenCaches", "CachedAttention", "CloseCaches"), "caches of sessions are memory of the host"),
    "EmbeddingBag": "passes make it for the host alone, of a Loop",
    "PaddedRows": "passes make it for the host alone, of what a run picks",
    "OneHotEncoder": TABLES,
    "SVMClassifier": TABLES,
    "SVMRegressor": TABLES,
    "Scaler": TABLES,
    "TfIdfVectorizer": TABLES,
    "TreeEnsemble": TABLES,
    "TreeEnsembleClassifier": TABLES,
    "TreeEnsembleRegressor": TABLES,
    "ZipMap": TABLES,
}

OPERATORS = [name for name in registered_operators() if operator_module(name).startswith("dagexec.ops")]
"""Those of the project: tools and tests of this process may have registered others."""


def test_the_operators_of_the_project_are_found() -> None:
    assert len(OPERATORS) > 480


@pytest.mark.parametrize("operator_type", OPERATORS)
def test_an_operator_runs_on_cuda_or_is_the_hosts(operator_type: str) -> None:
    on_cuda = bool(registered_engines(operator_type, "cuda"))
    if operator_type in HOST:
        assert not on_cuda, f"{operator_type} has a class for CUDA: take it off the list"
    else:
        assert on_cuda, f"{operator_type} has no class for CUDA, and no reason is given"


def test_the_list_names_operators_that_are_there() -> None:
    assert sorted(set(HOST) - set(registered_operators())) == []
