"""Kernels of our own: machine code for x86-64 that is written at run time, without a compiler.

What computes is here, and what it is written with: `assembler` writes instructions, `machine_code` makes them
executable, `tables` makes steps of tables of calls, `sharing` says in how many pieces. Engines decide where it serves,
and hand in what it runs on (`machine.Machine`). Where it cannot run, they compute by other means.
"""
