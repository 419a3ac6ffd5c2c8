"""Tests of the ranks that work together."""
