"""Mistakes in how chains are found, ordered, handed to workers and ended, and in how tensors share memory."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_POOL = "scheduler/run/pool.py"
_POOL_TESTS = (
    "tests/scheduler/run/test_pool.py",
    "tests/scheduler/run/test_pool_priority.py",
    "tests/scheduler/run/test_pool_order.py",
)
_DEATHS = ("tests/scheduler/run/test_pool_order.py", "tests/scheduler/run/test_pool_failures.py")
_GRAPH_TESTS = ("tests/core/test_graph.py", "tests/scheduler/plan/test_chains.py")

MUTANTS = (
    Mutant(
        "a worker no longer takes the most urgent chain",
        _POOL,
        "chain = heappushpop(ready, following) if ready else following",
        "chain = following",
        _POOL_TESTS,
    ),
    Mutant(
        "a worker that has no child to go on with takes the least urgent chain",
        _POOL,
        "            elif ready:\n                chain = heappop(ready)",
        "            elif ready:\n                chain = ready.pop()",
        _POOL_TESTS,
    ),
    Mutant(
        "a worker that enters a run takes the least urgent chain",
        _POOL,
        "chain = heappop(run.ready)\n            self._virtual_time",
        "chain = run.ready.pop()\n            self._virtual_time",
        _POOL_TESTS,
    ),
    Mutant(
        "a replaced worker wakes nobody",
        _POOL,
        "            worker.wake_up.leave()\n        self._wake_all()",
        "            worker.wake_up.leave()",
        _DEATHS,
    ),
    Mutant(
        "a woken worker stays on the idle list",
        _POOL,
        "helper = idle.pop()\n",
        "helper = idle[-1]\n",
        _POOL_TESTS,
    ),
    Mutant(
        "a run gives way to one of equal priority",
        _POOL,
        "first.priority <= run.priority",
        "first.priority < run.priority",
        _POOL_TESTS,
    ),
    Mutant(
        "a run gives way to none",
        _POOL,
        "first.priority <= run.priority",
        "first.priority >= run.priority",
        _POOL_TESTS,
    ),
    Mutant(
        "of equal priority the youngest run is served",
        _POOL,
        "(-run.priority, run.start_tag, run.order, run)",
        "(-run.priority, run.start_tag, -run.order, run)",
        _POOL_TESTS,
    ),
    Mutant(
        "any number of workers enter a run",
        "scheduler/run/run.py",
        "bool(self.ready) and self.active < self.width",
        "bool(self.ready)",
        _POOL_TESTS,
    ),
    Mutant(
        "whose turn it is does not depend on what a user had of the workers",
        _POOL,
        "(-run.priority, run.start_tag, run.order, run)",
        "(-run.priority, 0.0, run.order, run)",
        _POOL_TESTS,
    ),
    Mutant(
        "a submitted run wakes nobody",
        _POOL,
        "            if helper is not None:\n                helper.wake()\n        except BaseException:",
        "        except BaseException:",
        _POOL_TESTS,
    ),
    Mutant(
        "a woken worker does not find the run it was woken for",
        _POOL,
        "                if not run.listed:\n                    self._list(run)\n                release()\n",
        "                release()\n",
        _POOL_TESTS,
    ),
    Mutant(
        "chains that become ready while all workers are busy are found by none of them",
        _POOL,
        "                if ready and not run.listed:\n                    self._list(run)\n                release()",
        "                release()",
        _POOL_TESTS,
    ),
    Mutant(
        "a chain starts when one of its parents is done",
        _POOL,
        "                if not count:\n                    if following < 0:",
        "                if count >= 0:\n                    if following < 0:",
        _POOL_TESTS,
    ),
    Mutant(
        "a failed run goes on with its ready chains",
        "scheduler/run/run.py",
        "        self.interrupted = True\n        self.ready.clear()",
        "",
        ("tests/scheduler/run/test_pool.py",),
    ),
    Mutant(
        "the last error is kept, and not the first",
        "scheduler/run/run.py",
        "if self.error is None:\n            self.error = error",
        "if True:\n            self.error = error",
        (
            "tests/scheduler/run/test_pool.py",
            "tests/scheduler/run/test_pool_order.py",
            "tests/scheduler/nets/test_nets.py",
        ),
    ),
    Mutant(
        "the shortest path to the end goes first",
        "scheduler/plan/plan.py",
        "key=lambda number: (-levels[number], split[number][:1])",
        "key=lambda number: (levels[number], split[number][:1])",
        ("tests/scheduler/plan/test_plan.py",),
    ),
    Mutant(
        "an operator joins a chain on another device",
        "scheduler/plan/chains.py",
        " and graph.device(parent) == graph.device(index)",
        "",
        _GRAPH_TESTS,
    ),
    Mutant(
        "a write does not wait for the readers of what it overwrites",
        "dagexec/core/graph.py",
        "                add(reader, index, Hazard.WAR)",
        "                pass",
        _GRAPH_TESTS,
    ),
    Mutant(
        "a buffer is free while its last reader runs",
        "scheduler/memory/lifetime.py",
        "return self._last[:, np.newaxis] < self._first",
        "return self._last[:, np.newaxis] <= self._first",
        ("tests/scheduler/memory/test_memory.py",),
    ),
    Mutant(
        "a request of lower priority is served first",
        "dagexec/serving/requests.py",
        "-request.priority",
        "request.priority",
        ("tests/serving/test_requests.py",),
    ),
    Mutant(
        "a turn at what streams share follows the last turn only",
        "dagexec/core/exclusive.py",
        "                self._ends[stream] = event\n",
        "                self._ends = {stream: event}\n",
        ("tests/scheduler/run/test_device_ends.py",),
    ),
)
