"""The address of an array is the one that `ndarray.ctypes` tells."""

from __future__ import annotations

import numpy as np

from dagexec.platform.addresses import address_of


def test_addresses_of_arrays_of_all_kinds() -> None:
    whole = np.zeros((5, 6, 7), np.float32)
    arrays = [
        whole,
        whole[1:, ::-2, 3],
        whole.T,
        whole[:0],
        whole.view(np.uint8),
        np.zeros((), np.bool_),
        np.broadcast_to(np.ones(1), (3, 4)),
        np.zeros(3, object),
        np.zeros(4, "V3"),
        np.array(["a", "bc"]),
        np.frombuffer(b"bytes", np.uint8),
        np.rec.array([(1, 2.0)], "i4,f8"),
    ]
    assert [address_of(one) for one in arrays] == [one.ctypes.data for one in arrays]
