"""What the fixture `cli` gives to tests of commands."""

from collections.abc import Callable

Cli = Callable[..., tuple[int, str, str]]
"""Runs `dagexec` with the given words in this process: exit status, standard output, standard error."""
