"""Every example runs, as its own process, from a folder of its own; and so does the code in the documents."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

SAYS = {
    "run_a_model": "softmax: float32 (1, 1000",
    "compare_runtimes": "same bytes: True",
    "embed_in_asyncio": "as expected, cancelled: True\n{",
    "http_service": "1 run cancelled, no run left behind\ndrained and closed",
    "serve_a_pipeline": "and here: True\nloaded again, the same: True\ndrained, status 0",
    "serve_a_decoder": "length\nthe same tokens: True\ndrained, status 0",
    "write_an_operator": "[ 5. 13. 17.]",
    "draw_a_net": "operators in",
    "read_digits": "10 of 10 pages are read right",
    "conv_engines": "1 choice(s) loaded\nsame bytes: True",
    "train_a_net": "at least 95 of 100: True",
    "train_on_several_devices": "same bytes: True",
    "run_on_a_cluster": "320 answers, the bytes of one process: True\nreplicas that were lost: 1",
    "generate_text": "greedy: 115 995 722",
    "transcribe": "words: ",
    "detect_speech": "5000 frames of 1000 streams, probabilities of 0.",
    "train_char_lstm": "below 1.5 nats a character: True",
}

NEEDS_RAY = {"run_on_a_cluster"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, marks=[pytest.mark.ray] if path.stem == "run_on_a_cluster" else [], id=path.stem)
        for path in EXAMPLES
    ],
)
def test_the_example_runs_and_says_what_it_should(example: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "error"},
    )
    assert result.returncode == 0, result.stderr
    assert SAYS[example.stem] in result.stdout


def blocks(document: str) -> list[str]:
    """The Python blocks of a document."""
    text = (EXAMPLES[0].parent.parent / document).read_text()
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_the_embedding_example_of_the_readme_runs(tmp_path: Path) -> None:
    program = blocks("README.md")[0]
    assert sum(bool(line.strip()) for line in program.splitlines()) <= 15
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(r"17 runs with the same bytes, [\d.]+ ms each\n", result.stdout)


@pytest.mark.slow
def test_the_blocks_of_the_page_on_embedding_are_a_program_that_runs(tmp_path: Path) -> None:
    program = "\n".join(blocks("docs/embedding.md"))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "asyncio: 16 results\ntrio: 16 results\nthreads: 16 results\n" in result.stdout
    assert "left after the drain: 0" in result.stdout


@pytest.mark.slow
def test_the_blocks_of_the_page_on_training_are_a_program_that_runs(tmp_path: Path) -> None:
    program = "\n".join(blocks("docs/training.md"))
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    first, *_, last, classes = result.stdout.splitlines()
    assert float(last.split()[1]) < float(first.split()[1])
    assert classes.startswith("[")


@pytest.mark.slow
def test_the_first_block_of_the_page_on_gradients_gives_what_it_says(tmp_path: Path) -> None:
    program, excerpt = blocks("docs/gradients.md")
    compile(excerpt, "docs/gradients.md", "exec")
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("{'w': 'w_grad'}")
