"""What is computed for one example of a batch does not depend on the others.

`operators.py` has small cases of every operator that says so (`OpSchema.rows`), `networks.py` whole networks, and
`comparison.py` runs examples together and alone. `python -m tests.rows` compares all of them, under several instruction
sets.
"""
