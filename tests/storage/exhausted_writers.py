"""Run as a program: writers during which one allocation of the interpreter fails, in a process of its own each time.

    python -m tests.storage.exhausted_writers POINTS WRITER...

The allocations are spread over all that a writer makes; 0 points: each one. Where a library that runs out of memory
ends the process, as protobuf does, what is left must be whole all the same. Prints what was wrong, and as JSON how the
writers ended.
"""

from __future__ import annotations

import _testcapi
import json
import logging
import os
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from dagexec.platform.disk import installed
from tests.storage.test_power_loss import Unsynchronized
from tests.storage.writers import WRITERS, Writer

ENDS = {0: "done", 2: "MemoryError", 3: "another error", 4: "of no use afterwards"}


def attempt(writer: Writer, folder: Path, number: int) -> int:
    """In a child: write version 2 while an allocation fails, look at it, and write version 3."""
    end = 0
    _testcapi.set_nomemory(number, number + 1)
    try:
        writer.write(folder, 2)
    except MemoryError:
        end = 2
    except BaseException:
        end = 3
    finally:
        _testcapi.remove_mem_hooks()
    found = writer.read(folder)
    if found not in ((1, 2) if end or writer.quiet else (2,)):
        return 4
    if end == 0:
        return 0
    writer.write(folder, 3)
    return end if writer.read(folder) == 3 and not list(folder.rglob(".*")) else 4


def ended(writer: Writer, folder: Path, number: int) -> str:
    """How a child ended."""
    child = os.fork()
    if not child:
        end = 4
        try:
            end = attempt(writer, folder, number)
        finally:
            os._exit(end)
    status = os.waitpid(child, 0)[1]
    return signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else ENDS[os.WEXITSTATUS(status)]


def exhausted(name: str, numbers: Iterable[int]) -> Counter[str]:
    """How the children ended whose allocations of these numbers failed."""
    writer = WRITERS[name]
    ends: Counter[str] = Counter()
    for number in numbers:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            writer.write(folder, 1)
            end = ended(writer, folder, number)
            ends[end] += 1
            if end == ENDS[4] or writer.read(folder) not in (1, 2, 3):
                print(f"{name}: allocation {number}: {end}")
    return ends


def allocations(name: str) -> int:
    """Allocations that a writer makes, to the power of 4 above."""
    number = 256
    while exhausted(name, range(number, number + 3))[ENDS[0]] < 3:  # some failures Python can do without
        number *= 4
    return number


def main(points: int, names: list[str]) -> None:
    logging.getLogger("dagexec").disabled = True
    total: Counter[str] = Counter()
    with installed(Unsynchronized()):
        for name in names or WRITERS:
            most = allocations(name)
            total += exhausted(name, range(1, most, max(1, most // points) if points else 1))
    print(json.dumps(total))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
