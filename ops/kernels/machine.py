"""What kernels are written for and run on: vectors and threads, as whoever uses them says."""

from __future__ import annotations

from dataclasses import dataclass

from dagexec.ops.kernels.team import Team, can_run

AVX2, AVX512 = 8, 16
"""float32 numbers in a vector: in 16 registers, with FMA; in 32."""


@dataclass(frozen=True)
class Machine:
    """Instruction set and threads.

    Attributes:
        lanes: float32 numbers in a vector: AVX512, AVX2, or fewer where there are no kernels.
        team: the threads that share work; None for the calling thread alone.
    """

    lanes: int
    team: Team | None = None

    @property
    def can_run(self) -> bool:
        """True where kernels can be written and run: the processor has AVX2 and FMA, and memory may be executed."""
        return self.lanes >= AVX2 and can_run()
