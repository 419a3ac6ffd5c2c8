"""The vocabulary of all assemblers: registers, conditions, and instructions on vectors.

Registers are named by their roles, as RISC-V's calling convention does: A0 to A5 are the arguments of a function,
RESULT its result, T0 and T1 are anybody's, S0 to S5 are as the caller left them when it returns, SP is the stack's.
"""

from __future__ import annotations

RESULT, A3, A2, S0, SP, S1, A1, A0, A4, A5, T0, T1, S2, S3, S4, S5 = range(16)
"""Numbers of the general registers: those of RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI and R8 to R15."""

BELOW, NOT_BELOW, ZERO, NOT_ZERO, LESS, NOT_LESS, NOT_GREATER, GREATER = 0x2, 0x3, 0x4, 0x5, 0xC, 0xD, 0xE, 0xF
"""Conditions of jumps: for unsigned numbers, for the last result, for signed numbers. The last bit negates."""

Instruction = int
"""An instruction on vectors, of a target and two operands."""

(ADD, MUL, SUB, MIN, MAX, DIV, SQRT, SCALE_BY_POWER) = range(8)
(FMA, SUBTRACT_PRODUCT, HORNER, SUBTRACT_FROM, MULTIPLY_ADD, SUBTRACT_SCALED) = range(8, 14)
(ADD_INTEGERS, SUBTRACT_INTEGERS, AND, AND_NOT, OR, TO_INTEGER, FROM_INTEGER) = range(14, 21)
(UNPACK_LOW, UNPACK_HIGH, SHUFFLE, PERMUTE_HALVES, PERMUTE, SUB_DOUBLES) = range(21, 27)
"""MIN and MAX give the right operand where one is NaN. AND_NOT is the right operand without the bits of the left.

FMA adds the product to the target, SUBTRACT_PRODUCT subtracts it; HORNER multiplies the target by the left and adds the
right, MULTIPLY_ADD multiplies the target by the right and adds the left, SUBTRACT_FROM subtracts the product of target
and left from the right, SUBTRACT_SCALED that of target and right from the left: all round once. SCALE_BY_POWER, of
AVX-512, multiplies by a power of 2. SQRT, TO_INTEGER and FROM_INTEGER have a right operand alone; TO_INTEGER gives the
nearest one, of NaN one that is 0 once shifted left by 9 bits or more, and is not defined beyond 32 bits.

UNPACK_LOW to PERMUTE_HALVES reorder the elements of two vectors, within each four of them but for PERMUTE_HALVES;
SHUFFLE takes two of the left and two of the right, by two bits each of a number, PERMUTE_HALVES halves of both. PERMUTE
gives the elements of the right by the indices in the left. SUB_DOUBLES subtracts float64 numbers, for which AVX-512
needs a bit that AVX2 ignores.
"""

EQUAL_TO, LESS_THAN, AT_MOST, IS_NAN = 0x00, 0x11, 0x12, 0x03
"""Comparisons of vectors: equal, less, less or equal (false for NaN), and NaN on one side."""
