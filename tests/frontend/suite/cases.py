"""The cases of the suite, and what one of them comes to.

The suite is `onnx.backend.test` of the installed onnx package: models of one node with inputs and expected outputs,
small whole models, and models that PyTorch exported. Its "real" models must be downloaded; the package carries light
copies of them without weights, which tests/frontend/test_onnx.py runs.
"""

from __future__ import annotations

import contextlib
import tomllib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import onnx
import onnx.backend.test.loader
import onnx.numpy_helper
from onnx.backend.test.runner import Runner

import dagexec.onnx_backend
from dagexec.errors import DagexecError

KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")
EXCLUSIONS = Path(__file__).with_name("exclusions.toml")

_NAMES = (
    "FLOAT",
    "DOUBLE",
    "FLOAT16",
    "INT8",
    "UINT8",
    "INT16",
    "UINT16",
    "INT32",
    "UINT32",
    "INT64",
    "UINT64",
    "BOOL",
)
_ORDINARY = {getattr(onnx.TensorProto, name) for name in _NAMES}
_RANDOM = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")

Result = Literal["passed", "refused", "failed", "wrong", "broken"]
"""`refused`: an error before the run; `failed`: one in the run; `broken`: an error that is not dagexec's."""


@dataclass(frozen=True)
class Outcome:
    """What a case came to, and why."""

    result: Result
    reason: str = ""


@dataclass
class Case:
    """A model with inputs and the outputs expected of them.

    Attributes:
        name: in the suite.
        kind: the family of cases it belongs to.
        tolerances: relative and absolute, as the suite has them.
    """

    name: str
    kind: str
    tolerances: tuple[float, float]
    _case: Any

    @property
    def model(self) -> onnx.ModelProto:
        """Its model, read where it is in a file."""
        given = self._case.model
        return onnx.load(Path(self._case.model_dir) / "model.onnx") if given is None else given

    def data_sets(self) -> Iterator[tuple[list[Any], list[Any]]]:
        """Inputs, and expected outputs."""
        if self._case.data_sets is not None:
            for inputs, outputs in self._case.data_sets:
                yield [_array(value) for value in inputs], [_array(value) for value in outputs]
            return
        model = self.model
        for folder in sorted(Path(self._case.model_dir).glob("test_data_set_*")):
            yield _values(folder, "input", model.graph.input), _values(folder, "output", model.graph.output)

    def is_ordinary(self) -> bool:
        """Whether it is of the default domain, of types that NumPy has itself, and gives the same in each run."""
        model = self.model
        values = [value.type for value in (*model.graph.input, *model.graph.output)]
        types = {kind.tensor_type.elem_type for kind in values if kind.HasField("tensor_type")}
        domains = {node.domain for node in model.graph.node} | {opset.domain for opset in model.opset_import}
        is_random = any(node.op_type in _RANDOM for node in model.graph.node)
        return domains <= {"", "ai.onnx"} and types <= _ORDINARY and not is_random

    def run(self, device: str = "CPU", **options: Any) -> Outcome:
        """Compile for a device with these options, run, and compare as the suite does."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of overflows that cases are about
                prepared = dagexec.onnx_backend.prepare(self.model, device, **options)
        except DagexecError as error:
            return Outcome("refused", f"{type(error).__name__}: {error}")
        except Exception as error:
            return Outcome("broken", f"{type(error).__name__}: {error}")
        with prepared.executor:
            return self._run(prepared)

    def _run(self, prepared: dagexec.onnx_backend.PreparedModel) -> Outcome:
        relative, absolute = self.tolerances
        for inputs, expected in self.data_sets():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = prepared.run(inputs)
            except DagexecError as error:
                return Outcome("failed", f"{type(error).__name__}: {error}")
            except Exception as error:
                return Outcome("broken", f"{type(error).__name__}: {error}")
            try:
                require_similar(expected, found, relative, absolute)
            except Exception as error:
                return Outcome("wrong", str(error).strip())
        return Outcome("passed")


def require_similar(expected: Sequence[Any], found: Sequence[Any], relative: float, absolute: float) -> None:
    """As the suite's runner compares, which takes the rows of a sequence's arrays for arrays. Raises AssertionError."""
    assert len(found) == len(expected), f"{len(found)} outputs, expected {len(expected)}"
    for one, other in zip(expected, found, strict=True):
        assert isinstance(one, list) == isinstance(other, list), f"found {type(other)}, expected {type(one)}"
        if isinstance(one, list):
            require_similar(one, other, relative, absolute)
        elif one is None or other is None:
            assert one is other, f"found {other}, expected {one}"
        else:
            Runner.assert_similar_outputs([one], [other], relative, absolute)


def _values(folder: Path, what: str, infos: Sequence[onnx.ValueInfoProto]) -> list[Any]:
    paths = sorted(folder.glob(f"{what}_*.pb"), key=lambda path: int(path.stem.rpartition("_")[2]))
    return [_value(path, info) for path, info in zip(paths, infos, strict=False)]


def _value(path: Path, info: onnx.ValueInfoProto) -> Any:
    kind = info.type.WhichOneof("value")
    if kind == "tensor_type":
        return onnx.numpy_helper.to_array(onnx.TensorProto.FromString(path.read_bytes()))
    if kind == "sequence_type":
        return onnx.numpy_helper.to_list(onnx.SequenceProto.FromString(path.read_bytes()))
    return onnx.numpy_helper.to_optional(onnx.OptionalProto.FromString(path.read_bytes()))


def _array(value: Any) -> Any:
    return onnx.numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def all_cases() -> list[Case]:
    """Every case that needs no download, in the order of names within a family."""
    found = []
    for kind in KINDS:
        with contextlib.redirect_stdout(None), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of overflows while expected outputs are computed
            cases = onnx.backend.test.loader.load_model_tests(kind=kind)
        found += [
            Case(case.name, kind, (case.rtol, case.atol), case) for case in sorted(cases, key=lambda case: case.name)
        ]
    return found


def exclusions() -> dict[str, str]:
    """Names of cases that do not pass, and the reason of each."""
    groups = tomllib.loads(EXCLUSIONS.read_text())["group"]
    return {name: group["reason"] for group in groups for name in group["cases"]}
