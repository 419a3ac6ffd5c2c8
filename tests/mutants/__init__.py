"""Mutants of the scheduler, of numerics and of storage: each is a small mistake, and tests must see it.

    python -m tests.mutants                   # all of them, in a copy of the repository; `make mutants`
    python -m tests.mutants --only NAME

`scheduler`, `numerics` and `storage` list them, with the tests that look there; `trial` tries one. Mistakes in
synchronization are in `tests/planted`.
"""
