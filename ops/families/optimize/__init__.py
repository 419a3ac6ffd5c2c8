"""Operators that optimizers are made of: the counter, learning rates, and update rules, dense and sparse."""
