"""Losses and metrics on CUDA."""

from dagexec.ops.cuda.loss import accuracy, averaged, cross_entropy, rows, softmax

__all__ = ["accuracy", "averaged", "cross_entropy", "rows", "softmax"]
