"""Memory that may be written and executed: oneDNN has some, and docs/security.md says how to run without."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.platform.test_odd_machines import can_forbid

ROOT = Path(__file__).parents[2]
[LAUNCHER] = re.findall(r"```python\n(# no_gain\.py.*?)```", (ROOT / "docs" / "security.md").read_text(), re.DOTALL)

PROGRAM = """
import json
import numpy as np
import dagexec
from dagexec.ops.engines.onednn.binding import library

with dagexec.compile("zoo:lenet") as executor:
    x = np.random.default_rng(0).standard_normal((2, 1, 28, 28)).astype(np.float32)
    result = executor.run({"data": x})["softmax"]
    with open("/proc/self/maps") as maps:
        both = [line for line in maps if line.split()[1].startswith("rwx")]
print(json.dumps({"both": both, "onednn": library() is not None, "result": result.tolist()}))
"""


def found(*launcher: str) -> Any:
    command = [*launcher, sys.executable, "-c", PROGRAM]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)


@pytest.mark.slow
@pytest.mark.skipif(not can_forbid(), reason="needs PR_SET_MDWE of Linux 6.3")
def test_a_process_that_may_not_execute_what_it_wrote_has_no_such_memory_and_computes() -> None:
    """The lines of the documentation, as a command; what is inherited by the program that it starts is seen to work."""
    usual, without = found(), found(sys.executable, "-c", LAUNCHER)
    assert bool(usual["both"]) == usual["onednn"]
    assert (without["both"], without["onednn"]) == ([], False)
    np.testing.assert_allclose(without["result"], usual["result"], rtol=1e-5, atol=1e-6)
