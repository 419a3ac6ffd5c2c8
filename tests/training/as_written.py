"""Training nets as they are written: by the default engine, row by row, whoever creates them."""

from __future__ import annotations

from dagexec import NetDef


def as_written(net: NetDef) -> NetDef:
    """A copy that names no form."""
    found = NetDef()
    found.CopyFrom(net)
    del found.arg[:]
    return found
