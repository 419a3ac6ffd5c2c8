"""A newcomer's walk: what README and tutorial say, in a fresh environment with the wheel and nothing of this checkout.

The programs of the pages run from top to bottom and print what the pages show. A server of that environment is asked by
clients that are installed elsewhere, and runs an operator of another package, installed beside it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from onnx import TensorProto, helper

from tests.held import PATIENCE
from tests.test_packaging import checkout, distributions  # noqa: F401 - fixtures

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

Step = tuple[str, str, str]
"""`shell` or `python`, what is run, and what it prints."""


def steps(text: str) -> Iterator[Step]:
    program = ""
    for language, body in BLOCK.findall(text):
        if language == "python":
            if program:
                yield "python", program, ""
            program = body
        elif program:
            yield "python", program, body
            program = ""
        else:
            for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                command, _, printed = part.partition("\n")
                yield "shell", command, printed
    if program:
        yield "python", program, ""


def agrees(shown: str, printed: str) -> bool:
    """`...` stands for any text; how wide the columns of a table are depends on the figures."""
    shown, printed = (re.sub(r" +", " ", text) for text in (shown, printed))
    pattern = ".*".join(re.escape(part.strip("\n")) for part in shown.strip().split("..."))
    return re.fullmatch(pattern, printed.strip(), re.DOTALL) is not None


def test_what_the_page_shows_is_told_from_what_it_does_not() -> None:
    assert agrees("a ...\nb", "a 1\nb\n")
    assert agrees("...\nb", "what\never\nb")
    assert not agrees("a ...\nb", "a 1\nc")
    assert not agrees("a", "a b")
    assert [step[:2] for step in steps("```\n$ one\n$ two\nout\n```\n```python\nx\n```\n")] == [
        ("shell", "one"),
        ("shell", "two"),
        ("python", "x\n"),
    ]


@pytest.fixture(scope="module")
def fresh(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """The programs of an environment with the wheel, what serving needs, and the package of examples/plugin."""
    folder = tmp_path_factory.mktemp("fresh")
    [wheel] = distributions.glob("*.whl")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, capture_output=True)
    install = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python", "install", "--quiet", "--no-compile"]
    subprocess.run([*install, f"{wheel}[serve,grpc]", ROOT / "examples" / "plugin"], check=True, capture_output=True)
    return folder / "bin"


def environment(fresh: Path) -> dict[str, str]:
    """Where the programs of that environment are the first, and nothing says that this checkout is to be imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DAGEXEC"))}
    return kept | {"PATH": f"{fresh}:{os.environ['PATH']}", "COLUMNS": "120"}


def ran(fresh: Path, folder: Path, *words: str) -> str:
    """What a program prints, the lines for people included; it ends well."""
    done = subprocess.run(
        words, cwd=folder, env=environment(fresh), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=4 * PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (words, done.stdout)
    return done.stdout


@pytest.mark.slow
def test_the_first_program_of_the_readme(fresh: Path, tmp_path: Path) -> None:
    program = next(body for language, body in BLOCK.findall((ROOT / "README.md").read_text()) if language == "python")
    shown = "17 runs with the same bytes, ... ms each"
    assert agrees(shown, ran(fresh, tmp_path, "python", "-c", program))
    assert "site-packages" in ran(fresh, tmp_path, "python", "-c", "import dagexec; print(dagexec.__file__)")


@pytest.mark.slow
def test_the_tutorial_does_what_it_says(fresh: Path, tmp_path: Path) -> None:
    walked = list(steps((ROOT / "docs" / "tutorial.md").read_text()))
    assert len(walked) > 10
    for kind, what, shown in walked:
        printed = ran(fresh, tmp_path, *(("bash", "-ec", what) if kind == "shell" else ("python", "-c", what)))
        assert agrees(shown, printed), f"{what}\nshows\n{shown}\nand printed\n{printed}"


X = np.linspace(-3, 3, 12, dtype=np.float32).reshape(2, 6)


def saturated() -> onnx.ModelProto:
    """A model with an operator of examples/plugin."""
    nodes = [
        helper.make_node("Relu", ["x"], ["first"]),
        helper.make_node("Saturate", ["first"], ["y"], domain="com.example", bound=0.5),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 6]) for name in "xy"]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.example", 1)]
    return helper.make_model(helper.make_graph(nodes, "saturated", ends[:1], ends[1:]), opset_imports=opsets)


@pytest.mark.slow
def test_foreign_clients_ask_a_server_with_a_plugin(fresh: Path, tmp_path: Path) -> None:
    listed = json.loads(ran(fresh, tmp_path, "dagexec", "plugins", "--json"))["plugins"]
    assert {one["package"] for one in listed if not one["problem"]} == {"dagexec-saturate"}
    onnx.save(saturated(), tmp_path / "model.onnx")
    np.savez(tmp_path / "in.npz", x=X)
    ran(fresh, tmp_path, "dagexec", "run", "model.onnx", "--input", "in.npz", "--output", "out.npz")
    expected = np.load(tmp_path / "out.npz")["y"]
    np.testing.assert_allclose(expected, 0.5 * np.tanh(np.maximum(X, 0).astype(np.float64) / 0.5), rtol=1e-5)
    command = ["dagexec", "serve", "m=model.onnx", "--port", "0", "--grpc-port", "0"]
    answers: list[Any] = []
    with subprocess.Popen(
        command, executable=fresh / "dagexec", cwd=tmp_path, env=environment(fresh), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            lines = []
            for line in process.stderr:
                lines.append(line)
                if " serving m (1) " in line:
                    break
            found = re.search(r"listening at http://(\S+), gRPC at (\S+)", "".join(lines))
            assert found is not None, lines
            for module, address in zip((over_http, over_grpc), found.groups(), strict=True):
                with module.InferenceServerClient(address) as client:
                    x = module.InferInput("x", [2, 6], "FP32")
                    x.set_data_from_numpy(X)
                    answers.append(client.infer("m", [x]).as_numpy("y"))
            request = {"inputs": [{"name": "x", "shape": [2, 6], "datatype": "FP32", "data": X.ravel().tolist()}]}
            answer = httpx.post(f"http://{found[1]}/v2/models/m/infer", json=request, timeout=PATIENCE).json()
            answers.append(np.float32(answer["outputs"][0]["data"]).reshape(2, 6))
            process.terminate()
            process.stderr.read()
            assert process.wait(PATIENCE) == 0
        finally:
            process.kill()
    assert [one.tobytes() for one in answers] == [expected.tobytes()] * 3
