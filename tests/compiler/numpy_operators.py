"""Prints as JSON which operators NumPy computes in compiled networks, of the zoo and others: for a process without
oneDNN."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping

import numpy as np
from onnx import ModelProto

import dagexec
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from tests.compiler.family_nets import NETS, Array, Feeds
from tests.compiler.passes.models import feeds_for
from tests.compiler.test_compiled_nets import built, exact
from tests.ops.onednn.engine import fallbacks


def report(name: str) -> dict[str, object]:
    """Of a network: types of operators without another engine, why others are left to it, and the error.

    Sums of integers, which sizes and places are, do not count.
    """
    model, feeds = NETS[name]() if name in NETS else (built(name), feeds_for(built(name)))
    with fallbacks() as reasons, dagexec.compile(model) as executor:
        found = executor.run(feeds)
        operators = executor.net().operators
        plain = sorted({one.definition.type for one in operators if not isinstance(one, OneDNNOperator)})
    reasons = [reason for reason in reasons if not reason.endswith("in int64")]
    wanted = by_numpy(model, feeds) if name in NETS else exact(name)
    errors = [float(np.abs(found[blob] - one).max() / np.abs(one).max()) for blob, one in wanted.items()]
    return {"plain": plain, "reasons": reasons, "error": max(errors)}


def by_numpy(model: ModelProto, feeds: Feeds) -> Mapping[str, Array]:
    """The network's results by NumPy, operator by operator as they are in the file."""
    with dagexec.compile(model, optimize=False) as executor:
        assert not any(isinstance(one, OneDNNOperator) for one in executor.net().operators)
        return executor.run(feeds)


if __name__ == "__main__":
    print(json.dumps({name: report(name) for name in sys.argv[1:]}))
