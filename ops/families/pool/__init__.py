"""Pooling: the maximum, the mean and the p-norm of windows, and the gradient of each.

`window` reads the arguments and checks shapes for all of them. `reduction` combines the pixels of each window, and
`spreading` is its transpose: each pixel gets the sum over its windows. `phases` lays pixels out so that one tap of all
windows is one row. The operators are in `maximum`, `maximum_index`, `average` and `norm`, their
gradient makers in `makers`.
"""

from dagexec.ops.families.pool.window import pool_window

__all__ = ["pool_window"]
