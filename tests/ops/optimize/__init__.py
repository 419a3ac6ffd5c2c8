"""Tests of the operators that optimisers are made of."""
