"""Operators that watch or direct a run."""
