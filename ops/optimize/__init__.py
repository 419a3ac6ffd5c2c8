"""Operators that optimisers are made of: the counter, learning rates, and update rules, dense and sparse."""

from dagexec.ops.optimize import adam, counter, learning_rate, momentum, weighted_sum

__all__ = ["adam", "counter", "learning_rate", "momentum", "weighted_sum"]
