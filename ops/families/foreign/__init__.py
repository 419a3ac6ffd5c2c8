"""Operators that other runtimes compute."""
