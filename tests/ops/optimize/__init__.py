"""Tests of the operators that optimizers are made of."""
