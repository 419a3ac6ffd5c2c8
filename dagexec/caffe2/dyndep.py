"""`InitOpsLibrary`, which loads a library of operators into Caffe2's process; dagexec cannot, and says so."""

from __future__ import annotations

from dagexec.errors import Caffe2Error


def InitOpsLibrary(name: str, trigger_lazy: bool = True) -> None:
    """Raises Caffe2Error: such a library is machine code for Caffe2's own classes."""
    raise Caffe2Error(
        f"InitOpsLibrary({name!r}): a library of Caffe2's operators cannot be loaded, since it is machine code for "
        f"Caffe2's own classes; write the operator with dagexec.operators, in Python (docs/adding-an-operator.md)"
    )


def GetImportedOpsLibraries() -> set[str]:
    """None: no library can be loaded."""
    return set()
