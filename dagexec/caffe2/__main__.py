"""`python -m dagexec.caffe2 SCRIPT.py ARGUMENTS`: runs a script of Caffe2's as it is."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from dagexec.caffe2 import install


def main(arguments: list[str]) -> None:
    """Run the script `arguments[0]` with the others, as `python` does."""
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit("usage: python -m dagexec.caffe2 SCRIPT.py [ARGUMENT...]")
    install()
    sys.argv[:] = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
