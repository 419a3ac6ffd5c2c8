"""Assemblers, each of the few instructions that code written at run time uses, for one abstract machine.

The machine has 15 general registers and a stack, vectors of float32 numbers, and conditions; `instructions.py` names
them. Each processor has two modules, one of general registers and jumps, and one of vectors: `x86_64.py`, whose
docstrings say what each method does, and `aarch64.py`. `native.py` has those of this processor.
"""
