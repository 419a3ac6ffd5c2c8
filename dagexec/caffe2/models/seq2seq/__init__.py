"""Sequences from sequences."""
