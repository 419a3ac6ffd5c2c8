"""How nets run: plans and chains, steps, the worker pool, and the three nets (simple, dag, async_dag).

Locks, in the order they may be taken (a thread holding one takes only locks further down):

1. `BaseNet._run_lock` - one run of a net at a time. Held while the run lasts, by the thread that asked for it.
2. `blas_thread._lock` - guards the demands for one thread; taken when nets are made and closed. Reentrant, as a net
   collected as garbage may be closed at any point of a thread.
3. `Pool._lock` (`dagexec.scheduler.workers.pool`) and `SharedWorkers._lock` (`dagexec.scheduler.workers.place`) - guard
   who has a place on shared workers, and which these are. Threads are started under them, and joined under neither.
4. `WorkerPool.lock` - guards the pool's lists and the ready heaps, counts and state of every run on it. Held for a few
   assignments; no operator, callback or I/O runs under it, but policies choose (`Policy.choose`). The executor's
   (`dagexec.executor.dispatch.dispatcher`) guards where requests are; it and this one are never held together. Idle
   replicas give memory back under it.
5. `affinity._lock` - guards the set of cores that workers hold. Nothing else is taken under it.
6. `SharedBuffer._use` (`dagexec.core.shared_buffer`) - the one lock that is held while an operator computes, by those
   operators that share working memory. A worker holds none of the locks above while it runs an operator.
   On a device, the locks of turns (`dagexec.core.exclusive`), held while an operator is launched: that of the shared
   buffer first, then that of the library state.
7. `Drain._lock` - guards how many streams a run still waits for, and its timer.
8. Locks of streams and devices: `NetStreams._lock` and `DeviceStreams._lock` around what a net has leased; the core's
   table of runtimes and `DeviceRuntime._making`, under which runtimes and library states are made; and those inside
   a device's runtime: its pools, then a stream, then its driver (`dagexec.devices.sim`). No kernel and no callback of
   an event runs under one of them.
9. Locks around a table, under which nothing else is taken: `Workspace._lock`, `SharedBuffer._announce`,
   `LibraryState._table`, `ArenaBudget._lock`, `Constant._lock` (under which is computed what is derived from a constant
   tensor), `core.constant.letting_go` (held while the values of one go or come back), and that of the convolution
   choices; and the locks of observers, such as `Trace._lock`, `Lanes._lock`, `RunsUnderWay._lock` and
   `hazards.Detector._lock`, which are told of launches with a turn held.

A worker's wake-up and the gate of a waiting caller are semaphores, not locks: they are waited on with nothing held.
"""

from dagexec.core.workspace import register_net_type
from dagexec.scheduler.nets.async_dag import AsyncDAGNet
from dagexec.scheduler.nets.body import BodyNet
from dagexec.scheduler.nets.dag import DAGNet
from dagexec.scheduler.nets.simple import SimpleNet

for _net_class in (SimpleNet, DAGNet, AsyncDAGNet, BodyNet):
    register_net_type(_net_class.net_type, _net_class.from_definition)
