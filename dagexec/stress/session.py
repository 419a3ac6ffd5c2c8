"""A session: cases one after another until the time is up, a number of them has run, or one has failed."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator

from dagexec.core.device import Device
from dagexec.core.runtime import runtime_of
from dagexec.platform.records import dataclass
from dagexec.stress.case import Case, case_seeds, make_case
from dagexec.stress.report import Defect, StressReport
from dagexec.stress.runner import CaseFailedError, deviations_where_nothing_happens, run_case
from dagexec.stress.watchdog import stacks, watched


@dataclass(frozen=True)
class SessionOptions:
    """The options of a session.

    Attributes:
        seed: decides which cases.
        seconds: no case is started after so many; None for no limit.
        cases: the most cases; None for no limit.
        device, net_type: fixed for all cases; None leaves it to the case.
        case: run this case alone, again and again.
        hang_seconds: a case that takes longer hangs.
    """

    seed: int = 0
    seconds: float | None = 60.0
    cases: int | None = None
    device: str | None = None
    net_type: str | None = None
    case: int | None = None
    hang_seconds: float = 60.0


class Session:
    """Runs cases and counts; `report` may be asked for at any time."""

    def __init__(self, options: SessionOptions) -> None:
        """Raises DeviceError or SchemaError for a device or a net type that does not exist."""
        self._options = options
        place = Device.parse(options.device or "cpu")
        runtime_of(place)
        self._device = str(place)
        make_case(0, options.device, options.net_type)
        self._tried: Counter[str] = Counter()
        self._start = time.perf_counter()

    def run(
        self, progress: Callable[[StressReport], object], on_hang: Callable[[StressReport], object]
    ) -> StressReport:
        """Run cases. `progress` is told after each; `on_hang`, of a case that hangs, and must end the process."""
        for case in self._cases():
            with watched(self._options.hang_seconds, lambda case=case: on_hang(self._hung(case))):  # type: ignore[misc]
                try:
                    self._tried.update(run_case(case))
                except CaseFailedError as error:
                    return self._report(Defect.of(case, str(error)))
                except Exception:
                    return self._report(Defect.of(case, f"the case itself raised:\n{traceback.format_exc()}"))
            progress(self._report())
        return self._report()

    def _cases(self) -> Iterator[Case]:
        options = self._options
        seeds = case_seeds(options.seed)
        while True:
            count = self._tried["cases"]
            if options.cases is not None and count >= options.cases:
                return
            if options.seconds is not None and time.perf_counter() - self._start >= options.seconds:
                return
            seed = options.case if options.case is not None else seeds.getrandbits(32)
            yield make_case(seed, options.device, options.net_type)

    def _hung(self, case: Case) -> StressReport:
        problem = (
            f"the case has not ended after {self._options.hang_seconds} seconds\n{deviations_where_nothing_happens()}"
            f"stacks of all threads:\n{stacks()}"
        )
        return self._report(Defect.of(case, problem))

    def _report(self, defect: Defect | None = None) -> StressReport:
        return StressReport(
            seed=self._options.seed,
            device=self._device,
            net_type=self._options.net_type,
            seconds=time.perf_counter() - self._start,
            tried=dict(self._tried),
            defect=defect,
        )
