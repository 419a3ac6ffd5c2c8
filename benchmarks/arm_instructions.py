"""What kernels for 64-bit Arm are made of: instructions of their innermost loops, and what a processor takes on paper.

`python -m benchmarks.arm_instructions` writes the code, which needs no such processor, and reads it with binutils'
disassembler. Nothing is run or timed. The bound is that of a processor that begins in each cycle at most four
instructions, among them two that multiply and add four numbers and two that load 16 bytes, as Arm's "Neoverse N1
Software Optimization Guide" has it; what instructions wait for, and the caches, are left out.
"""

from __future__ import annotations

import json
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

RESULT = Path(__file__).parent / "results" / "arm_instructions.json"

_PRODUCTS = ("fmla", "fmls")
_PER_CYCLE, _PRODUCTS_PER_CYCLE, _LOADS_PER_CYCLE = 4, 2, 2


def loops(meanings: list[str]) -> Iterator[Counter[str]]:
    """The instructions of each innermost loop, by name."""
    found = []
    for number, meaning in enumerate(meanings):
        jump = re.match(r"b(?:\.\w+)? .*?0x([0-9a-f]+)", meaning)
        if jump and int(jump[1], 16) // 4 < number:
            found.append((int(jump[1], 16) // 4, number))
    for first, last in found:
        if not any(first <= a and b <= last and (a, b) != (first, last) for a, b in found):
            yield Counter(meaning.split()[0] for meaning in meanings[first : last + 1])


def measures(loop: Counter[str]) -> dict[str, float]:
    """Numbers of instructions, and the share of the most products and sums that a processor does on paper."""
    count, products = sum(loop.values()), sum(loop[name] for name in _PRODUCTS)
    loads = sum(number * (2 if name == "ldp" else 1) for name, number in loop.items() if name.startswith("ld"))
    cycles = max(products / _PRODUCTS_PER_CYCLE, loads / _LOADS_PER_CYCLE, count / _PER_CYCLE)
    return {
        "instructions": count,
        "products_of_vectors": products,
        "loads_of_16_bytes": loads,
        "instructions_per_multiply_add": round(count / products / 4, 3),
        "share_of_roof_on_paper": round(products / _PRODUCTS_PER_CYCLE / cycles, 2),
    }


def kernels() -> dict[str, Callable[[], object]]:
    """What writes each kernel, by name."""
    from dagexec.ops.kernels.attention_kernels import product_kernel, softmax_kernel
    from dagexec.ops.kernels.direct_kernels import Row, row_kernel
    from dagexec.ops.kernels.dot_kernels import MOST_ROWS, dot_kernel, units_of_block
    from dagexec.ops.kernels.gate_product import GateProduct, Slot
    from dagexec.ops.kernels.panel_kernels import MAX_ROWS, VECTORS, panel_kernel

    rows, vectors, dots = MAX_ROWS[8], VECTORS[8], MOST_ROWS[8]
    gates = GateProduct(64, 64, tuple(Slot(number, adds=True) for number in range(4)), 8, 256, 256, 1024)
    packed = gates.most_rows
    depthwise = Row(8, 1, 1, 3, 1, 1, 1, 56, 56, 64, 1, 64, 8, 3, 1, True, ())
    first = Row(8, 64, 3, 3, 2, 1, 1, 224, 112, 3, 1, 64, 8, 3, 2, True, ())
    return {
        f"panels, {rows} rows x {vectors} vectors": lambda: panel_kernel(rows, vectors, 8, adds=False),
        f"panels, 1 row x {vectors} vectors": lambda: panel_kernel(1, vectors, 8, adds=False),
        f"inner products, {dots} rows": lambda: dot_kernel(dots, units_of_block(dots, 8), 8),
        "inner products, 1 row": lambda: dot_kernel(1, units_of_block(1, 8), 8),
        "attention's products, 4 rows x 3 vectors": lambda: product_kernel(4, 3, 8, has_passes=True, rest=0),
        "attention's products, 1 row x 6 vectors": lambda: product_kernel(1, 6, 8, has_passes=True, rest=0),
        f"gates of an LSTM, {packed} rows": lambda: gates.calls(0, 0, 0, packed, range(1)),
        "depthwise 3 x 3": lambda: row_kernel(depthwise),
        "3 channels, 3 x 3, stride 2": lambda: row_kernel(first),
        "softmax": lambda: softmax_kernel(True, 0, False, False, False, False, False),
    }


def main() -> None:
    """Write and print the results."""
    with mock.patch.object(platform, "machine", return_value="aarch64"):
        from dagexec.platform import machine_code
    with mock.patch.object(machine_code, "executable", return_value=0) as executable:
        makers = kernels()
        from tests.platform.assembly.listing import KINDS, disassembled

        found = {}
        for name, make in makers.items():
            make()
            meanings = [meaning for _, meaning in disassembled(KINDS["aarch64"], executable.call_args.args[0])]
            loop = max(loops(meanings), key=lambda one: sum(one[name] for name in _PRODUCTS))
            found[name] = measures(loop)
            print(f"{name:42}", *found[name].values())
    RESULT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
