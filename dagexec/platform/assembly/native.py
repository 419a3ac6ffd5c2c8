"""The assemblers of this processor; those of x86-64 where there are none, whose code is then not run."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING

if platform.machine() in ("aarch64", "arm64") and not TYPE_CHECKING:
    from dagexec.platform.assembly.aarch64 import GeneralAssembler
    from dagexec.platform.assembly.aarch64_vectors import REGISTERS, REPEATED, Assembler
else:
    from dagexec.platform.assembly.x86_64 import GeneralAssembler
    from dagexec.platform.assembly.x86_64_vectors import REGISTERS, REPEATED, Assembler

__all__ = ["REGISTERS", "REPEATED", "Assembler", "GeneralAssembler"]
