"""Every example runs, as its own process, from a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

SAYS = {
    "run_a_model": "softmax: float32 (1, 1000",
    "compare_runtimes": "same bytes: True",
    "embed_in_asyncio": "16 results",
    "write_an_operator": "[ 5. 13. 17.]",
    "draw_a_net": "operators in",
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
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
