"""The whole files that fuzzing damages: small ones, which together use every converter and format and most operators.

A seed is a few files in a folder, of which the one called `main` is what a user names. All content is made here, or
taken from the tables of other tests, so nothing depends on the machine but the keys of choices.
"""

from __future__ import annotations

import io
import json
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnx.parser
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper

from dagexec.core.arguments import make_argument
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError
from dagexec.executor.compile import build
from dagexec.executor.source.loading import load_model
from dagexec.options import CompileOptions
from dagexec.storage import Mode, open_database
from dagexec.storage.blob_file import write_blobs
from dagexec.training.backward import add_gradient_operators
from dagexec.training.checkpoint import save_checkpoint
from dagexec.training.safetensors_file import export_safetensors
from tests.compiler.passes.test_random_models import KINDS, PARAMETERS
from tests.frontend import test_onnx_operators, test_onnx_quantized, test_predictor
from tests.frontend.suite.cases import Case, all_cases, exclusions
from tests.fuzz.use import choices_model, plausible_choices
from tests.ops.gradient_examples import Example, examples
from tests.ops.running import operator_def

Array = npt.NDArray[Any]
Kind = Literal[
    "onnx", "caffe2", "predictor", "checkpoint", "minidb", "lmdb", "npz", "safetensors", "choices", "plan", "drawn"
]

_LARGEST = 60_000
"""Bytes: larger models of the onnx package are left out, as each case would take long."""

_MIXED = 60
"""Nets of mixed operators."""

_FILLS = {
    "float32": "GivenTensorFill", "float64": "GivenTensorDoubleFill", "int64": "GivenTensorInt64Fill",
    "int32": "GivenTensorIntFill", "bool": "GivenTensorBoolFill", "uint8": "GivenTensorUInt8Fill",
    "int16": "GivenTensorInt16Fill",
}  # fmt: skip


@dataclass(frozen=True)
class Seed:
    """A few files that belong together.

    Attributes:
        main: the file, or with "." the folder, that a user names.
        files: content by path within the folder.
        feeds: arrays for the inputs of a model whose file does not tell their shapes.
    """

    kind: Kind
    name: str
    main: str
    files: Mapping[str, bytes]
    feeds: Mapping[str, Array] = field(default_factory=dict)


DRAWN = Seed("drawn", "operators and nets", ".", {})


def make_seeds(*, with_suite: bool = True) -> list[Seed]:
    """All seeds, in an order that is always the same; `with_suite`, the onnx package's suite is among them."""
    folder = Path(tempfile.mkdtemp(prefix="dagexec-seeds-"))
    try:
        return [
            *_onnx_seeds(),
            *(_suite_seeds() if with_suite else ()),
            *_caffe2_seeds(),
            *_database_seeds(folder),
            *_array_seeds(folder),
            *_choices_seeds(),
            *_plan_seeds(folder),
            DRAWN,
        ]
    finally:
        shutil.rmtree(folder)


def _onnx_seeds() -> Iterator[Seed]:
    for table in (test_onnx_operators.CASES, test_onnx_quantized.CASES):
        for case in table:
            yield _onnx(str(case), test_onnx_operators.build(case)[0])
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for path in sorted(data.glob("*/*/model.onnx")):
        if path.stat().st_size < _LARGEST:
            yield Seed("onnx", path.parent.name, "model.onnx", {"model.onnx": path.read_bytes()})
    for name, text in _ONNX_TEXTS.items():
        yield _onnx(name, onnx.parser.parse_model(text))
    yield _onnx("branches", _branches())
    yield _external()


def _suite_seeds() -> Iterator[Seed]:
    """A node of every kind that ONNX has, with inputs that it takes."""
    excluded = exclusions()
    for case in all_cases():
        if case.kind == "node" and case.name not in excluded:
            yield _onnx(case.name, case.model, _arrays(case))


def _onnx(name: str, model: onnx.ModelProto, feeds: Mapping[str, Array] | None = None) -> Seed:
    return Seed("onnx", name, "model.onnx", {"model.onnx": model.SerializeToString(deterministic=True)}, feeds or {})


def _arrays(case: Case) -> Mapping[str, Array]:
    """The inputs of a case of the suite that are arrays of numbers."""
    inputs, _ = next(case.data_sets())
    named = zip([value.name for value in case.model.graph.input], inputs, strict=False)
    return {name: array for name, array in named if isinstance(array, np.ndarray) and array.dtype.kind in "fiub"}


_HEADER = '<ir_version: 8, opset_import: ["" : 17]>'
_ONNX_TEXTS = {
    "block": _HEADER
    + """
    block (float[N, 4, 8, 8] x) => (float[N, 4] y) <
      float[4, 4, 3, 3] w = {WEIGHTS}, float[4] b = {0.1, 0.2, 0.3, 0.4}, float[4] s = {1, 2, 1, 2},
      float[4] m = {0, 0.5, 0, 0.5}, float[4] v = {1, 1, 2, 2}, int64[2] two = {0, -1}> {
      c = Conv <pads = [1, 1, 1, 1]> (x, w, b)
      n = BatchNormalization (c, s, b, m, v)
      r = Relu (n)
      p = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (r)
      q = AveragePool <kernel_shape = [2, 2], strides = [2, 2]> (x)
      both = Concat <axis = 1> (p, q)
      left, right = Split <axis = 1> (both)
      sum = Add (left, right)
      g = GlobalAveragePool (sum)
      f = Reshape (g, two)
      y = Softmax <axis = -1> (f)
    }""".replace("WEIGHTS", ", ".join(str((index % 7 - 3) / 8) for index in range(144))),
    "perceptron": _HEADER
    + """
    perceptron (float[2, 4] x) => (float[2, 3] y) <float[4, 3] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[3] b = {1,2,3}> {
      h = MatMul (x, w)
      a = Add (h, b)
      t = Tanh (a)
      e = Erf (t)
      k = Constant <value = float {0.5}> ()
      m = Mul (e, k)
      s = Sqrt (m)
      d = Div (a, s)
      c = Clip (d)
      i = Identity (c)
      y = Gemm <alpha = 2.0, transB = 0> (x, w, b)
    }""",
    "nested": _HEADER
    + """
    nested (bool c, float[3] x, int64 n) => (float[3] y, float[3] z) {
      y = If (c) <then_branch = t () => (float[3] a) {a = Relu (x)}, else_branch = e () => (float[3] b) {b = Neg (x)}>
      z = Loop (n, c, x) <body = l (int64 i, bool k, float[3] s) => (bool k2, float[3] s2)
        {k2 = Identity (k) s2 = Add (s, x)}>
    }""",
    "shapes": _HEADER
    + """
    shapes (float[2, 3, 4] x) => (float y) {
      s = Shape (x)
      i = Constant <value = int64[1] {2}> ()
      g = Gather (s, i)
      o = ConstantOfShape <value = float[1] {2}> (g)
      e = Expand (o, s)
      t = Transpose <perm = [0, 2, 1]> (x)
      m = MatMul (x, t)
      r = ReduceSum <keepdims = 0> (m)
      u = Cast <to = 6> (r)
      y = Cast <to = 1> (u)
    }""",
    "functions": """<ir_version: 9, opset_import: ["" : 17, "local" : 1]>
    functions (float[3] x) => (float[3] y) {y = local.twice (x)}
    <domain: "local", opset_import: ["" : 17]> twice (a) => (b) {b = Add (a, a)}""",
    "strings": '<ir_version: 8, opset_import: ["" : 17]> strings (string[2] x) => (string[2] y) {y = Identity (x)}',
}


def _branches() -> onnx.ModelProto:
    """A recurrent layer, two ways to give parameters, a type in another field, and metadata."""
    drawn = np.random.default_rng(3)
    weights = [
        numpy_helper.from_array(drawn.standard_normal(shape).astype(np.float32), name)
        for name, shape in (("w", (1, 8, 3)), ("r", (1, 8, 2)), ("b", (1, 16)))
    ]
    typed = helper.make_tensor("k", TensorProto.FLOAT16, [2], [0.5, 2.0])
    nodes = [
        helper.make_node("LSTM", ["x", "w", "r", "b"], ["h", "hn", "cn"], hidden_size=2, name="recurrent"),
        helper.make_node("Cast", ["k"], ["k32"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["hn", "k32"], ["y"], doc_string="scaled"),
        helper.make_node("Constant", [], ["f"], value_floats=[1.0, 2.0]),
        helper.make_node("Add", ["f", "y"], ["z"]),
    ]
    graph = helper.make_graph(
        nodes, "branches", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 1, 3])],
        [helper.make_empty_tensor_value_info(name) for name in ("z", "h")], [*weights, typed],
        value_info=[helper.make_tensor_value_info("y", TensorProto.FLOAT, ["a", "b", 2])],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    helper.set_model_props(model, {"author": "nobody"})
    return model


def _external() -> Seed:
    values = np.arange(12, dtype=np.float32)
    tensor = numpy_helper.from_array(values.reshape(3, 4), "w")
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "weights.bin", "offset": "16", "length": "48"}.items():
        tensor.external_data.add(key=key, value=value)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, size]) for name, size in (("x", 3), ("y", 4)))
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "external", [x], [y], [tensor])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    files = {"model.onnx": model.SerializeToString(deterministic=True), "weights.bin": bytes(16) + values.tobytes()}
    return Seed("onnx", "external", "model.onnx", files)


def _caffe2_seeds() -> Iterator[Seed]:
    for op_type, found in examples().items():
        for number, example in enumerate(found):
            name = f"{op_type}-{number}"
            for gradients in (False, True):
                with suppress(DagexecError):  # examples of some kinds have no gradient as one net
                    yield _caffe2(f"{name}-gradient" if gradients else name, *_nets(op_type, example, gradients))
    yield _caffe2("training", *_training_net())
    yield _caffe2("text", *_training_net(), text=True)
    for number in range(_MIXED):
        yield _caffe2(f"mixed-{number}", *_mixed_net(random.Random(number)))
    for name, operator in _io_operators().items():
        yield _caffe2(name, NetDef(), NetDef(name=name, op=[operator], external_input=["x"]), {"x": np.ones(3)})
    yield Seed("predictor", "exported", "model.mdl", {"model.mdl": test_predictor.file_of(test_predictor.exported())})
    fixtures = Path(__file__).resolve().parents[1] / "fixtures" / "caffe2"
    for folder in ("group_depthwise", "nhwc", "train_adam", "train_sgd"):
        files = {path.name: path.read_bytes() for path in sorted((fixtures / folder).glob("*.pb"))}
        with np.load(fixtures / folder / "inputs.npz") as arrays:
            yield Seed("caffe2", folder, ".", files, {name: arrays[name] for name in arrays.files})


def _caffe2(name: str, init: NetDef, predict: NetDef, feeds: Mapping[str, Array], *, text: bool = False) -> Seed:
    if text:
        nets = {"init_net.pbtxt": init, "predict_net.pbtxt": predict}
        return Seed(
            "caffe2", name, ".", {k: text_format.MessageToString(net).encode() for k, net in nets.items()}, feeds
        )
    files = {"predict_net.pb": predict.SerializeToString(deterministic=True)}
    if not init.op:
        return Seed("caffe2", name, "predict_net.pb", files, feeds)
    files["init_net.pb"] = init.SerializeToString(deterministic=True)
    return Seed("caffe2", name, ".", files, feeds)


def _nets(op_type: str, example: Example, gradients: bool) -> tuple[NetDef, NetDef, dict[str, Array]]:
    """One operator whose first input is fed; the others are filled by the init net. With its gradients, if asked."""
    names = [f"x{index}" for index in range(len(example.inputs))]
    outputs = [names[example.inplace[k]] if k in example.inplace else f"y{k}" for k in range(example.outputs)]
    init, predict = NetDef(name="init"), NetDef(name=op_type, external_input=names)
    predict.op.append(operator_def(op_type, names, outputs, **example.arguments))
    arrays = [array.astype(np.float32) if array.dtype == np.float64 else array for array in example.inputs]
    for name, array in zip(names[1:], arrays[1:], strict=True):
        init.op.append(_filled(name, array))
        init.external_output.append(name)
    if gradients:
        given = [name for name, array in zip(names, arrays, strict=True) if array.dtype == np.float32]
        add_gradient_operators(predict, {outputs[0]: None}, wanted=given)
    return init, predict, dict(zip(names[:1], arrays[:1], strict=True))


def _filled(name: str, array: Array) -> OperatorDef:
    return operator_def(_FILLS[array.dtype.name], [], [name], shape=list(array.shape), values=array.ravel().tolist())


def _training_net() -> tuple[NetDef, NetDef, dict[str, Array]]:
    """A step of training with a shared blob, control inputs, a mutex, devices and several kinds of arguments."""
    init, net = NetDef(name="init"), NetDef(name="step", external_input=["x", "w", "b", "rate", "iter"], type="dag")
    init.op.append(operator_def("XavierFill", [], ["w"], shape=[3, 4]))
    init.op.append(operator_def("ConstantFill", [], ["b"], shape=[3], value=0.5))
    init.op.append(operator_def("ConstantFill", [], ["rate"], shape=[1], value=-0.1))
    init.op.append(operator_def("ConstantFill", [], ["iter"], shape=[1], value=0, dtype=10))
    init.op.append(operator_def("CreateMutex", [], ["mutex"]))
    for number, operator in enumerate(init.op):
        operator.device_option.random_seed = number
    net.external_input.append("mutex")
    net.op.append(operator_def("AtomicIter", ["mutex", "iter"], ["iter"]))
    net.op.append(operator_def("FC", ["x", "w", "b"], ["y"]))
    net.op.append(operator_def("Relu", ["y"], ["y"]))
    net.op.append(operator_def("AveragedLoss", ["y"], ["loss"]))
    gradients = add_gradient_operators(net, {"loss": None})
    for name in ("w", "b"):
        net.op.append(operator_def("WeightedSum", [name, "one", str(gradients[name]), "rate"], [name]))
    init.op.append(operator_def("ConstantFill", [], ["one"], shape=[1], value=1.0))
    net.external_input.append("one")
    net.op[-1].control_input.append("loss")
    net.op[1].engine = "DEFAULT"
    net.op[1].name = "layer"
    net.num_workers = 2
    net.arg.append(make_argument("note", "text"))
    net.external_output.append("loss")
    return init, net, {"x": np.ones((2, 4), np.float32)}


def _mixed_net(rng: random.Random) -> tuple[NetDef, NetDef, dict[str, Array]]:
    """Operators that passes fold, fuse and turn, one after another and side by side; what is not read is returned."""
    net = NetDef(name="mixed", external_input=["x"])
    net.op.append(operator_def("Abs", ["x"], ["a"]))
    blobs = ["a"]
    for number in range(rng.randint(4, 10)):
        made = rng.choice(KINDS)([rng.choice(blobs[-3:]) for _ in range(3)], f"b{number}")
        if all(len(set(one.input)) == len(one.input) or one.output[0] not in one.input for one in made):
            net.op.extend(made)
            blobs.append(f"b{number}")
    read = {name for operator in net.op for name in operator.input}
    used = [name for name in PARAMETERS if name in read]
    init = NetDef(name="init", op=[_filled(name, PARAMETERS[name]) for name in used], external_output=used)
    net.external_input.extend(used)
    net.external_output.extend(name for name in blobs if name not in read)
    return init, net, {"x": np.random.default_rng(7).standard_normal((2, 4, 6, 6)).astype(np.float32)}


def _io_operators() -> dict[str, OperatorDef]:
    """Operators that would write files here and elsewhere, and read some; a model from a file may not."""
    return {
        "writes": operator_def("Save", ["x"], [], db="written.minidb", db_type="minidb", absolute_path=1),
        "writes outside": operator_def("Save", ["x"], [], db="../written.minidb", db_type="minidb"),
        "reads": operator_def("Load", [], ["y"], db="predict_net.pb", db_type="minidb", absolute_path=1),
        "opens": operator_def("CreateDB", [], ["y"], db="predict_net.pb", db_type="minidb"),
        "looks": operator_def("DBExists", [], ["y"], db_name="predict_net.pb", db_type="minidb"),
    }


def _read(path: Path) -> dict[str, bytes]:
    """The files of a database: one, or those of a folder."""
    paths = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return {str(file.relative_to(path.parent)): file.read_bytes() for file in paths}


def _database_seeds(folder: Path) -> Iterator[Seed]:
    drawn = np.random.default_rng(5)
    strings = np.empty(2, np.object_)
    strings[:] = [b"one", b"two"]
    arrays: dict[str, Array] = {
        "w": drawn.standard_normal((3, 4)).astype(np.float32),
        "half": drawn.standard_normal(5).astype(np.float16),
        "count": np.arange(6, dtype=np.int64).reshape(2, 3),
        "flag": np.array([True, False]),
        "bytes": np.arange(7, dtype=np.uint8),
        "double": np.array(2.5),
        "text": strings,
    }
    for db_type in ("minidb", "lmdb"):
        kind: Kind = "minidb" if db_type == "minidb" else "lmdb"
        for chunk in (-1, 4):
            path = folder / f"blobs{chunk}.{db_type}"
            write_blobs(db_type, path, arrays.items(), strings={"note": b"hello"}, chunk_size=chunk)
            yield Seed(kind, f"blobs{chunk}", path.name, _without_lock(_read(path)))
        path = folder / f"records.{db_type}"
        with open_database(db_type, path, Mode.NEW) as database, database.transaction() as transaction:
            for number in range(40):
                transaction.put(b"%04d" % number, bytes(number * 7))
        yield Seed(kind, "records", path.name, _without_lock(_read(path)))
        workspace = Workspace()
        for name, array in arrays.items():
            workspace.feed_blob(name, array)
        path = save_checkpoint(workspace, list(arrays), folder / db_type, 7, db_type=db_type, extra={"a": "b"})
        yield Seed("checkpoint", db_type, path.name, _without_lock(_read(path)))


def _without_lock(files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if not name.endswith("lock.mdb")}


def _array_seeds(folder: Path) -> Iterator[Seed]:
    for name, save in {"plain": np.savez, "packed": np.savez_compressed}.items():
        buffer = io.BytesIO()
        save(buffer, x=np.ones((1, 8, 8, 8), np.float32))
        yield Seed("npz", name, "feeds.npz", {"feeds.npz": buffer.getvalue()})
    arrays = {"x": np.ones((2, 4), np.float32), "label": np.array([1, 0], np.int32), "é": np.zeros((), np.float64)}
    workspace = Workspace()
    for name, array in (*arrays.items(), ("half", np.ones(3, np.float16)), ("flags", np.ones(3, np.bool_))):
        workspace.feed_blob(name, array)
    names = [*arrays, "half", "flags"]
    export_safetensors(workspace, names, folder / "w.safetensors", metadata={"format": "np"})
    yield Seed("safetensors", "some", "w.safetensors", _read(folder / "w.safetensors"))


def _choices_seeds() -> Iterator[Seed]:
    content = {"format": "dagexec choices", "version": 1, "choices": dict(plausible_choices())}
    yield Seed("choices", "plausible", "choices.json", {"choices.json": json.dumps(content).encode()})


def _plan_seeds(folder: Path) -> Iterator[Seed]:
    """Compiled models: images, products, strings, and states that a run changes."""
    models = {
        name: load_model(onnx.parser.parse_model(_ONNX_TEXTS[name])) for name in ("block", "perceptron", "strings")
    }
    for name, model in {"images": choices_model(), **models}.items():
        path = folder / "net.dagexec"
        build(model, path, CompileOptions(shapes={}, warm_start=False)).close()
        yield Seed("plan", name, path.name, _read(path))
