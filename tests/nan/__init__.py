"""NaN and infinities where NumPy has them: random nets, optimized and not, fed numbers at the ends of their type.

`python -m tests.nan` runs as many as are asked for; `test_nan.py` a few of them.
"""
