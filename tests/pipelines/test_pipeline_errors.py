"""What does not fit together is refused where it is said, with pipeline, stage, input, expected and found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dagexec
import dagexec.errors
from dagexec.core.dtypes import FLOAT32, INT64
from dagexec.errors import PipelineError
from tests.pipelines.layers import adding, dense

A, B = dense("a", 8, 16), dense("b", 16, 16)


def build(say: Callable[[dagexec.Pipeline, Any], object]) -> None:
    p = dagexec.Pipeline("p")
    say(p, p.input("x", "float32", ("N", 8)))
    p.as_model()


def identity(x: Any) -> Any:
    return x


REFUSED: dict[str, Callable[[dagexec.Pipeline, Any], object]] = {
    r"stage 'B': input 'x' expects float32\[\?, 16\], found float32\[N, 8\] from input 'x'": lambda p, x: p.stage(
        "B", B, x=x
    ),
    r"stage 'S': input 'x' expects float32\[\?, 8\], found float32\[N, 16\] from stage 'A', output 'y'": (
        lambda p, x: p.stage("S", A, x=p.stage("A", A, x=x))
    ),
    r"stage 'A': input 'x' expects float32\[\?, 8\], found int64\[N, 8\] from stage 'S', output 'S'": (
        lambda p, x: p.stage("A", A, x=p.python("S", identity, x, "int64[N, 8]"))
    ),
    r"stage 'A': input 'x' is missing, expected float32\[\?, 8\]; given: \[\]": lambda p, _: p.stage("A", A),
    r"stage 'A': the model has no input 'z'; it has \['x'\]": lambda p, x: p.stage("A", A, x=x, z=x),
    r"stage 'A': input 'x' is given twice": lambda p, x: p.stage("A", A, {"x": x}, x=x),
    r"stage 'A': the model has 2 inputs, so name them: \['first', 'second'\]": lambda p, x: p.stage(
        "A", adding("m", 8), x
    ),
    r"stage 'A' exists already": lambda p, x: (p.stage("A", A, x), p.stage("A", A, x)),
    r"input 'x' exists already": lambda p, _: p.input("x"),
    r"'a/b' is no name of a stage: expected a text without '/'": lambda p, x: p.stage("a/b", A, x),
    r"stage 'A' has no output 'z'; it has \['y'\]": lambda p, x: p.stage("A", A, x)["z"],
    r"stage 'S' has 2 outputs, so say which: \['first', 'twice'\]": lambda p, x: p.output(
        "y", p.stage("S", adding("m", 8), first=x, second=x)
    ),
    r"outputs \['twice'\] of stage 'S' are read by no stage and are no outputs; drop=\['twice'\] leaves them out": (
        lambda p, x: p.output("y", p.stage("S", adding("m", 8), first=x, second=x)["first"])
    ),
    r"outputs \['S'\] of stage 'S' are read by no stage": lambda p, x: (
        p.python("S", identity, x, "float32[N, 8]"), p.output("y", p.stage("A", A, x))
    ),
    r"drop: the model has no outputs \['z'\]; it has \['y'\]": lambda p, x: p.stage("A", A, x, drop=["z"]),
    r"input 'z' is read by no stage": lambda p, x: (p.input("z"), p.output("y", p.stage("A", A, x))),
    r"it has no outputs": lambda p, x: p.stage("A", A, x),
    r"output 'y' exists already: A/y": lambda p, x: (p.output("y", a := p.stage("A", A, x)), p.output("y", a)),
    r"output 'x' has the name of an input": lambda p, x: p.output("x", p.stage("A", A, x)),
    r"'A/y' is the name of something in stage 'A'": lambda p, x: p.output("A/y", p.stage("A", A, x)),
    r"output 'y': 'x' is of another pipeline": lambda p, _: p.output("y", dagexec.Pipeline("q").input("x")),
    r"output 'y': expected an input of the pipeline or an output of a stage, found 3": lambda p, _: p.output("y", 3),
    r"stage 'A': a pipeline cannot be a stage of itself": lambda p, x: p.stage("A", p, x),
    r"stage 'S': expected a function, found 3": lambda p, x: p.python("S", 3, x, "float32[N]"),
    r"stage 'S': 'float32' is no type": lambda p, x: p.python("S", identity, x, "float32"),
    r"stage 'S': data type 'flat32' is unknown": lambda p, x: p.python("S", identity, x, "flat32[N]"),
    r"stage 'S': it declares no outputs": lambda p, x: p.python("S", identity, x, {}),
    r"stage 'S': takes declares 2 inputs, and there are 1": lambda p, x: p.python(
        "S", identity, x, "float32[N]", takes=["float32[N]", "float32[N]"]
    ),
    r"stage 'S': input '0' expects float32\[N\], found float32\[N, 8\] from input 'x'": lambda p, x: p.python(
        "S", identity, x, "float32[N]", takes=["float32[N]"]
    ),
    r"stage 'S': seconds must be a number of at least 0, found -1": lambda p, x: p.python(
        "S", identity, x, "float32[N]", seconds=-1
    ),
    r"stage 'S': the model has a Save, which reaches beyond its net": lambda p, x: p.stage(
        "S",
        dagexec.Model(
            "m",
            dagexec.NetDef(op=[dagexec.op("Save", ["x"], [], db="f", db_type="minidb")]),
            inputs={"x": dagexec.InputInfo(FLOAT32, (8,))},
        ),
        x,
    ),
    r"input 'z': -1 is no size": lambda p, _: p.input("z", "float32", (3, -1)),
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_a_pipeline_that_does_not_fit_is_refused(message: str) -> None:
    with pytest.raises(PipelineError, match=rf"^pipeline '[pq]': .*{message}"):
        build(REFUSED[message])


def test_shapes_that_a_model_cannot_take_are_refused_when_the_stage_is_added() -> None:
    add = dagexec.NetDef(name="add", op=[dagexec.op("Add", ["a", "b"], "y")])
    info = dagexec.InputInfo(FLOAT32, None)
    model = dagexec.Model("add", add, inputs={"a": info, "b": info}, outputs=("y",))
    p = dagexec.Pipeline("p")
    a, b = p.input("a", "float32[2, 3]"), p.input("b", "float32[2, 4]")
    with pytest.raises(PipelineError, match=r"pipeline 'p': stage 'add': the model cannot take.*float32\[2, 4\]"):
        p.stage("add", model, a=a, b=b)


def test_sizes_of_the_same_name_are_the_same_in_a_step() -> None:
    p = dagexec.Pipeline("p")
    a, b = p.input("a", "float32[2]"), p.input("b", "float32[3]")
    with pytest.raises(PipelineError, match=r"stage 'S': input of 'b' expects float32\[M\] with M = 2, found float32"):
        p.python("S", np.add, [a, b], "float32[M]", takes=["float32[M]", "float32[M]"])


def test_sizes_that_are_open_pass_through_models() -> None:
    p = dagexec.Pipeline("p")
    x = p.input("x", "float32", ("N", None, 4))
    double = dagexec.NetDef(
        name="n", op=[dagexec.op("Concat", ["x", "x"], ["y", "_sizes"], axis=1), dagexec.op("Shape", "x", "sizes")]
    )
    info = {"x": dagexec.InputInfo(FLOAT32, (None, None, 4))}
    stage = p.stage("double", dagexec.Model("n", double, inputs=info, outputs=("y", "sizes")), x)
    assert str(stage["y"].spec) == "float32[N, ?, 4]"
    assert stage["sizes"].spec == dagexec.TensorSpec(INT64, (3,))


def test_a_pipeline_that_is_a_model_cannot_be_changed() -> None:
    p = dagexec.Pipeline("p")
    p.output("y", p.stage("A", A, p.input("x")))
    p.as_model()
    with pytest.raises(PipelineError, match="cannot be changed any more"):
        p.stage("B", A, p.input("z"))


def test_a_description_of_a_pipeline_is_no_model(tmp_path: Any) -> None:
    (tmp_path / "p.toml").write_text("")
    with pytest.raises(dagexec.errors.ModelFormatError, match="load_pipeline reads descriptions"):
        dagexec.load_model(tmp_path / "p.toml")
