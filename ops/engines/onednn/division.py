"""Which convolutions of oneDNN 3.1 divide their sums, so that the batch decides their bytes: from its source.

What no rule here says of an implementation is not assumed of it: it gets pieces.
"""

from __future__ import annotations

from dagexec.platform.processor import core_cache

_POINTWISE = {"brgconv_1x1:avx512_core": 480 << 10, "brgconv_1x1:avx2": 80 << 10}
MISREAD = 2
"""Columns of padding beside which `brgconv` may read pixels."""


def misreads(name: str, padding: int) -> bool:
    """True for a convolution that may take pixels for so many columns of padding; `edges` says why."""
    return name.startswith("brgconv:") and "amx" not in name and padding >= MISREAD


def adds_up_alike(name: str) -> bool:
    """True for a convolution whose sums have one order whatever rows it is given.

    `brgconv_1x1` of float32 adds up a block of input channels at once, and the size of the blocks follows from the
    number of channels alone (`select_ic_block` in src/cpu/x64/jit_brgemm_conv_utils.cpp) where the second cache has
    room for 80 vectors of channels, of 64 filters and 28 pixels, or with AVX2 for 40 of 32 filters. `brgconv` chooses
    how it cuts rows, channels and taps by estimates in which images count (`est_eff`), and the order of its
    sums follows (`ker_base` in jit_brgemm_conv.cpp: taps that some columns of a block lack come before or after the
    others).
    """
    return name in _POINTWISE and core_cache() >= _POINTWISE[name]
