"""Digests of what nets compute on our own kernels alone, of rows in two batches: `python -m tests.arm_bytes NET...`.

`tests/arm.py` compares those of an emulated 64-bit Arm with those of this processor, with AVX2.
"""

from __future__ import annotations

import hashlib
import json
import sys

import numpy as np

import dagexec


def digests(name: str) -> list[str]:
    """Of the first output of a net of the zoo, row by row: of each of three rows alone, and of all of them."""
    with dagexec.compile(f"zoo:{name}", num_workers=2, intra_op_threads=2, batch_invariant=True) as executor:
        source = np.random.default_rng(0)
        feeds = {
            key: source.standard_normal((3, *info.shape[1:])).astype(np.float32)
            for key, info in executor.inputs.items()
        }
        output = next(iter(executor.outputs))
        together = executor.run(feeds)[output]
        rows = [executor.run({key: value[row : row + 1] for key, value in feeds.items()})[output] for row in range(3)]
    return [hashlib.sha256(np.ascontiguousarray(one).tobytes()).hexdigest()[:16] for one in (*rows, together)]


if __name__ == "__main__":
    print(json.dumps({name: digests(name) for name in sys.argv[1:]}))
