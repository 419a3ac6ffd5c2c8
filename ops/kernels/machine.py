"""What kernels are written for and run on, as whoever uses them says."""

from __future__ import annotations

import os
from functools import cache

from dagexec.ops.kernels.tables import can_run
from dagexec.platform.records import dataclass

AVX2, AVX512 = 8, 16
"""float32 numbers in a vector: in 16 registers, with FMA; in 32."""


@dataclass(frozen=True)
class Machine:
    """The instruction set.

    Attributes:
        lanes: float32 numbers in a vector: AVX512, AVX2, or fewer where there are no kernels.
    """

    lanes: int

    @property
    def can_run(self) -> bool:
        """True where kernels can be written and run: vectors are wide enough, and memory may be executed.

        `DAGEXEC_OWN_KERNELS=off` switches them off.
        """
        return self.lanes >= AVX2 and not are_switched_off() and can_run()


@cache
def are_switched_off() -> bool:
    """True where `DAGEXEC_OWN_KERNELS` says so."""
    return os.environ.get("DAGEXEC_OWN_KERNELS", "") == "off"
