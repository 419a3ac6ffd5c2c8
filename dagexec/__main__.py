"""`python -m dagexec` is the `dagexec` command."""

from dagexec.cli import main

main()
