"""Update operators on CUDA: one kernel for the parameter and all its state, dense or of the rows that indices name.

Learning rates, weights and the iteration are read on the device.
"""

from dagexec.ops.cuda.optimize import clipping, dense, scatter, sparse, weighted_sum, yellowfin

__all__ = ["clipping", "dense", "scatter", "sparse", "weighted_sum", "yellowfin"]
