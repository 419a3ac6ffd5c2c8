"""Prints as JSON which operators NumPy computes in compiled networks of the zoo: for a process without oneDNN."""

from __future__ import annotations

import json
import sys

import numpy as np

import dagexec
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from tests.compiler.passes.models import feeds_for
from tests.compiler.test_compiled_nets import built, exact
from tests.ops.onednn.engine import fallbacks


def report(name: str) -> dict[str, object]:
    """Of a network: types of operators without another engine, why others are left to it, and the error."""
    model = built(name)
    with fallbacks() as reasons, dagexec.compile(model) as executor:
        found = executor.run(feeds_for(model))
        operators = executor.net().operators
        plain = sorted({one.definition.type for one in operators if not isinstance(one, OneDNNOperator)})
    wanted = exact(name)
    errors = [float(np.abs(found[blob] - one).max() / np.abs(one).max()) for blob, one in wanted.items()]
    return {"plain": plain, "reasons": reasons, "error": max(errors)}


if __name__ == "__main__":
    print(json.dumps({name: report(name) for name in sys.argv[1:]}))
