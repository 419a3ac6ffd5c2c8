"""Fuzzing: damaged files of every format that dagexec reads, loaded, compiled, inspected and run in worker processes.

    python -m tests.fuzz --cases 2000             # what CI runs; the commit decides which
    python -m tests.fuzz --case 1234 --keep folder # one case again, its files kept

`seeds` makes small whole files, `damage` and `messages` change them, `case` draws one case from its number, `use` does
with the files what users do, `worker` does so in a process with limits, and `runner` counts what came of it.
"""
