"""`python -m dagexec.caffe2 SCRIPT.py ARGUMENTS`: runs a script of Caffe2's as it is.

`--simulated-gpus N` before the script has it find N GPUs, simulated ones.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from dagexec.caffe2 import install

USAGE = "usage: python -m dagexec.caffe2 [--simulated-gpus N] SCRIPT.py [ARGUMENT...]"


def main(arguments: list[str]) -> None:
    """Run the script that `arguments` name with those behind it, as `python` does."""
    simulated = None
    if arguments[:1] == ["--simulated-gpus"] and arguments[1:2] and arguments[1].isdigit():
        simulated = int(arguments[1])
        arguments = arguments[2:]
    if not arguments or arguments[0].startswith("-"):
        raise SystemExit(USAGE)
    install(simulated)
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
