"""Linear models, support vectors, columns, labels and n-grams give what onnxruntime gives, on lone rows the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

import dagexec
from dagexec.devices.sim import simulated
from dagexec.errors import DagexecError, ModelFormatError
from tests.ops.tabular.drawn import random_rows
from tests.ops.tabular.models import Array, agrees, model_of

DTYPES = pytest.mark.parametrize("dtype", ["f", *(pytest.param(one, marks=pytest.mark.slow) for one in "dqi")])
ENGINES = pytest.mark.parametrize("optimize", [True, False], ids=["machine code", "NumPy"])
TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]


def numbers(random: np.random.Generator, count: int) -> list[float]:
    found: list[float] = random.standard_normal(count).astype(np.float32).tolist()
    return found


def texts(*rows: list[str]) -> Array:
    return np.array(rows, object)


@ENGINES
@DTYPES
@pytest.mark.parametrize("targets", [1, 3, 40])
@pytest.mark.parametrize("number", range(len(TRANSFORMS)))
def test_linear_models(number: int, targets: int, dtype: str, optimize: bool) -> None:
    random = np.random.default_rng(targets)
    x = (2 * random.standard_normal((9, 7))).astype(dtype)
    given = {"coefficients": numbers(random, 7 * targets), "intercepts": numbers(random, targets)}
    count, transform = max(2, targets), TRANSFORMS[number]
    names = {"classlabels_strings": [f"c{label}" for label in range(count)]}
    labels: dict[str, Any] = names if number % 2 else {"classlabels_ints": list(range(count))}
    agrees(model_of("LinearClassifier", x, 2, **given, **labels, post_transform=transform), x, optimize=optimize)
    if dtype == "f":
        model = model_of("LinearRegressor", x, **given, targets=targets, post_transform=transform)
        agrees(model, x, optimize=optimize)


@ENGINES
@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize(
    "transform", [*TRANSFORMS[:2], *(pytest.param(one, marks=pytest.mark.slow) for one in TRANSFORMS[2:])]
)
def test_support_vector_machines(transform: str, classes: int, kernel: str, optimize: bool) -> None:
    random = np.random.default_rng(classes)
    x = random.standard_normal((7, 5)).astype(np.float32)
    counts, pairs = [3, 5, 2, 4][:classes], classes * (classes - 1) // 2
    vectors = sum(counts)
    shared = {"kernel_type": kernel, "kernel_params": [0.25, 0.5, 2.0], "support_vectors": numbers(random, vectors * 5)}
    given = {"coefficients": numbers(random, (classes - 1) * vectors), "rho": numbers(random, pairs)}
    coupled = {"prob_a": [-1.5] * pairs, "prob_b": numbers(random, pairs)}
    for more in ({}, coupled):
        model = model_of("SVMClassifier", x, 2, **shared, **given, **more, vectors_per_class=counts,
                         classlabels_strings=[f"c{i}" for i in range(classes)], post_transform=transform)  # fmt: skip
        agrees(model, x, optimize=optimize)
    for one_class in (0, 1) if transform == "NONE" else ():
        model = model_of("SVMRegressor", x, **shared, coefficients=numbers(random, vectors), rho=[0.1],
                         n_supports=vectors, one_class=one_class)  # fmt: skip
        agrees(model, x, optimize=optimize)


@ENGINES
def test_linear_functions_of_classes_as_support_vector_machines(optimize: bool) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((7, 5)).astype(np.float32)
    for classes in (2, 3):
        model = model_of("SVMClassifier", x, 2, coefficients=numbers(random, classes * 5), kernel_type="LINEAR",
                         kernel_params=[0.0, 0.0, 0.0], rho=[0.3], classlabels_ints=list(range(classes)))  # fmt: skip
        agrees(model, x, optimize=optimize)


@ENGINES
@pytest.mark.parametrize("dtype", ["f", "d", "q", "i"])
def test_columns(dtype: str, optimize: bool) -> None:
    random = np.random.default_rng(1)
    x = (3 * random.standard_normal((6, 19))).astype(dtype)
    x[2] = 0
    agrees(model_of("Scaler", x, offset=numbers(random, 19), scale=numbers(random, 19)), x, optimize=optimize)
    agrees(model_of("Scaler", x, offset=[0.5], scale=[2.0]), x, optimize=optimize)
    for norm in ("MAX", "L1", "L2"):
        agrees(model_of("Normalizer", x, norm=norm), x, optimize=optimize)
    if dtype == "f":
        agrees(model_of("Binarizer", x, threshold=0.5), x, optimize=optimize)
        missing = random_rows(random, 6, 19)
        for replaced, values in ((float("nan"), numbers(random, 19)), (1.0, [0.25])):
            model = model_of("Imputer", x, imputed_value_floats=values, replaced_value_float=replaced)
            agrees(model, missing, optimize=optimize)
    if dtype == "q":
        model = model_of("Imputer", x, imputed_value_int64s=[7], replaced_value_int64=2)
        agrees(model, x, optimize=optimize)


KEYS: dict[str, Any] = {"strings": ["b", "a", "d"], "int64s": [5, 1, 7], "floats": [0.5, float("nan"), -2.0]}
X = {"strings": texts(["a", "z"], ["d", "b"]), "int64s": np.array([[1, 2], [7, 5]]),
     "floats": np.array([[np.nan, 1], [-2, 0.5]], np.float32)}  # fmt: skip


@pytest.mark.parametrize("values", KEYS)
@pytest.mark.parametrize("keys", KEYS)
def test_label_encoders_of_lists(keys: str, values: str) -> None:
    version = 2 if keys == "int64s" and values == "floats" else 4  # which onnxruntime has a kernel for
    given = {f"keys_{keys}": KEYS[keys], f"values_{values}": KEYS[values]}
    agrees(model_of("LabelEncoder", X[keys], version=version, **given), X[keys])


@pytest.mark.parametrize("values", ["S", "q", "f"])
@pytest.mark.parametrize("keys", ["S", "q", "f"])
def test_label_encoders_of_tensors(keys: str, values: str) -> None:
    def tensor(kind: str, numbers: list[int]) -> Any:
        if kind == "S":
            return helper.make_tensor("t", TensorProto.STRING, [len(numbers)], [f"s{n}".encode() for n in numbers])
        return numpy_helper.from_array(np.array(numbers, kind))

    x = texts(["s1", "s9"], ["s3", "s2"]) if keys == "S" else np.array([[1, 9], [3, 2]], keys)
    model = model_of("LabelEncoder", x, version=4, keys_tensor=tensor(keys, [1, 2, 3]),
                     values_tensor=tensor(values, [4, 5, 6]), default_tensor=tensor(values, [8]))  # fmt: skip
    agrees(model, x)


def test_the_first_label_encoder_and_categories() -> None:
    names, places = texts(["a", "q"], ["c", "b"]), np.array([[0, 1], [2, 7]])
    for x in (names, places):
        agrees(model_of("LabelEncoder", x, version=1, classes_strings=["a", "b", "c"], default_int64=9), x)
        model = model_of("CategoryMapper", x, version=1, cats_strings=["a", "b", "c"], cats_int64s=[0, 2, 5])
        agrees(model, x)
    agrees(model_of("OneHotEncoder", names, cats_strings=["a", "b", "c"]), names)
    for x in (places, places.astype(np.float32), places.astype(np.float64)):
        agrees(model_of("OneHotEncoder", x, cats_int64s=[0, 2]), x)
    strict = model_of("OneHotEncoder", places, cats_int64s=[0, 1, 2], zeros=0)
    with dagexec.compile(strict) as executor, pytest.raises(DagexecError, match="7 is no category"):
        executor.run({"x": places})


@pytest.mark.parametrize("mode", ["TF", "IDF", "TFIDF"])
def test_counts_of_n_grams(mode: str) -> None:
    random = np.random.default_rng(0)
    words = random.integers(0, 4, (3, 9))
    for skips in (0, 2):
        given: dict[str, Any] = {
            "mode": mode, "min_gram_length": 1, "max_gram_length": 3, "max_skip_count": skips,
            "ngram_counts": [0, 2, 6],
            "ngram_indexes": [3, 0, 4, 1, 2], "weights": numbers(random, 5), "domain": "",
        }  # fmt: skip
        pool = [1, 2, 0, 1, 3, 3, 1, 2, 3]
        agrees(model_of("TfIdfVectorizer", words, **given, pool_int64s=pool), words)
        named = np.array([[f"w{word}" for word in row] for row in words], object)
        agrees(model_of("TfIdfVectorizer", named, **given, pool_strings=[f"w{word}" for word in pool]), named)


def test_columns_picked_and_joined() -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    value = helper.make_tensor_value_info
    nodes = [
        helper.make_node("ArrayFeatureExtractor", ["x", "places"], ["picked"], domain="ai.onnx.ml"),
        helper.make_node("FeatureVectorizer", ["picked", "x"], ["y"], domain="ai.onnx.ml", inputdimensions=[2, 3]),
    ]
    places = numpy_helper.from_array(np.array([2, 0]), "places")
    graph = helper.make_graph(
        nodes, "net", [value("x", 1, [None, 3])], [value("y", 1, [None, 5])], [places]
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    np.testing.assert_array_equal(agrees(model, x)["y"], np.concatenate([x[:, [2, 0]], x], axis=1))
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([2, 3]), "places"))
    with dagexec.compile(model) as executor, pytest.raises(DagexecError, match="names a column that is none of 3"):
        executor.run({"x": x})


@pytest.mark.parametrize("labels", [{"classlabels_int64s": [3, 1]}, {"classlabels_strings": ["a", "ä"]}])
@pytest.mark.parametrize("device", ["cpu", "sim:0"])
def test_mappings_are_lists_of_dicts_that_the_caller_may_change(labels: dict[str, Any], device: str) -> None:
    x = np.array([[1, 2], [3, 4]], np.float32)
    model = model_of("ZipMap", x, version=1, **labels)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    [expected] = session.run(None, {"x": x})
    with simulated("sim:0"), dagexec.compile(model, device=device) as executor:
        first = executor.run({"x": x})["y"]
        assert first == expected
        first[0].clear()
        assert executor.run({"x": x})["y"] == expected


def test_texts_among_results_are_str_whoever_computes_them(tables_are_native_or_not: bool) -> None:
    x = np.array([[1, 0], [0, 1]], np.float32)
    model = model_of("LinearClassifier", x, 2, coefficients=[1.0, 0, 0, 1], intercepts=[0.0, 0], multi_class=1,
                     classlabels_strings=["ä", "b"])  # fmt: skip
    with dagexec.compile(model) as executor:
        for rows in (x, x[:1], x[::-1].copy()):
            found = executor.run({"x": rows})["y"]
            assert found.dtype == object
            assert found.tolist() == [["ä", "b"][row.argmax()] for row in rows]
        into = np.empty(2, object)
        executor.run({"x": x}, out={"y": into})
        assert into.tolist() == ["ä", "b"]


@pytest.fixture(params=[True, False], ids=["dagexec", "onnxruntime"])
def tables_are_native_or_not(request: pytest.FixtureRequest) -> bool:
    if not request.param:
        request.getfixturevalue("tables_are_foreign")
    return bool(request.param)


@pytest.mark.parametrize(
    ("op_type", "outputs", "attributes"),
    [
        ("LinearRegressor", 1, {"coefficients": [1.0], "intercepts": [0.0]}),
        ("LinearRegressor", 1, {"coefficients": [1.0, 2.0], "targets": -1}),
        ("LinearClassifier", 2, {"coefficients": [1.0, 2.0], "intercepts": [0.0, 1.0], "classlabels_ints": [1, 2]}),
        ("LinearClassifier", 2, {"coefficients": [1.0, 2.0], "classlabels_ints": [1, 2, 3]}),
        ("SVMRegressor", 1, {"coefficients": [1.0], "rho": [1.0], "n_supports": 3, "support_vectors": [1.0]}),
        ("SVMRegressor", 1, {"coefficients": [1.0, 2.0], "rho": [1.0, 2.0]}),
        ("SVMClassifier", 2, {"coefficients": [1.0] * 3, "rho": [1.0], "classlabels_ints": [1, 2],
                              "vectors_per_class": [1, -1], "support_vectors": [1.0]}),
        ("LabelEncoder", 1, {"keys_floats": [1.0, 2.0], "values_int64s": [1]}),
        ("LabelEncoder", 1, {"keys_floats": [1.0]}),
        ("Normalizer", 1, {"norm": "L9"}),
        ("ZipMap", 1, {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_attributes_that_do_not_fit_are_refused(op_type: str, outputs: int, attributes: dict[str, Any]) -> None:
    x = np.zeros((3, 2), np.float32)
    with (
        pytest.raises(ModelFormatError, match="the node"),
        dagexec.compile(model_of(op_type, x, outputs, **attributes)) as executor,
    ):
        executor.run({"x": x})
