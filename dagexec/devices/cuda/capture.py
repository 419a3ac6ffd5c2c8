"""CudaCapture: what a few streams of a CUDA device are requested, as a CUDA graph that one launch replays.

The capture begins on the first stream, the others join it by waiting for an event of its start, and at the end the
first waits for each of them: so all of it is one graph. Replayed, the graph is launched on the first stream, after what
is on the others, which wait for its end.

The mode of the capture is "relaxed". In the stricter modes CUDA ends a capture when a thread asks for memory or looks
at an event meanwhile, which our own threads and libraries may do for work beside it. What must not be asked of
a stream that is captured (to be waited for, looked at, to call the host) is refused by the streams themselves, and by
CUDA in every mode.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from dagexec.core.stream import EventState, Kernel
from dagexec.devices.cuda.captured_work import CapturedWork
from dagexec.devices.cuda.device import CudaDevice, NativeEvent
from dagexec.devices.cuda.memory import captures
from dagexec.devices.cuda.stream import CudaStream
from dagexec.errors import DeviceError

logger = logging.getLogger("dagexec")


class CudaCapture:
    """What was captured. Keeps all that the graph uses: its kernels, with the memory that they work on, and its events.

    Its events are INITIALIZED after the capture; a replay records them, all at the end of the graph.
    """

    def __init__(self, runtime: CudaDevice, streams: Sequence[CudaStream]) -> None:
        """Raises DeviceError when there is no stream, or when one is captured already or has failed."""
        if not streams:
            raise DeviceError(f"{runtime.device}: a capture needs a stream")
        for stream in streams:
            if stream.capture is not None:
                raise DeviceError(f"{stream.name} is already being captured; captures cannot be nested")
            if stream.failure is not None:
                raise DeviceError(f"{stream.name} cannot be captured: {stream.failure.label} has failed on it")
        self._runtime = runtime
        self._streams = tuple(streams)
        self._work = CapturedWork(runtime)
        self._marks: list[NativeEvent] = []  # of the start and the ends
        self._is_open = False
        self._graph = 0
        self._executable = 0

    def __len__(self) -> int:
        """Number of launches."""
        return len(self._work.kernels)

    def begin(self) -> None:
        """Take what is asked of the streams."""
        runtime, (first, *others) = self._runtime, self._streams
        api = runtime.api
        start = self._mark()
        with runtime.guard():
            try:
                with captures.begin():
                    api.streamBeginCapture(first.pointer, api.streamCaptureModeRelaxed)
                    self._is_open = True
                    for stream in self._streams:
                        stream.capture = self._work
                api.eventRecord(start.pointer, first.pointer)
                for stream in others:
                    api.streamWaitEvent(stream.pointer, start.pointer)
            except Exception as error:
                self.cancel()
                raise runtime.device_failed(error, "the start of a capture").error from error

    def end(self) -> tuple[int, int]:
        """Leave the streams alone; then `replay` can be called. Raises DeviceError for what cannot be captured.

        The graph of CUDA and what executes it, to be destroyed by the caller.
        """
        runtime, (first, *others) = self._runtime, self._streams
        api = runtime.api
        with runtime.guard():
            try:
                for stream in others:
                    mark = self._mark()
                    api.eventRecord(mark.pointer, stream.pointer)
                    api.streamWaitEvent(first.pointer, mark.pointer)
                self._leave()
                self._executable = api.graphInstantiate(self._graph)
            except Exception as error:
                self.cancel()
                raise runtime.device_failed(error, f"a capture of {len(self)} launches").error from error
        return self._graph, self._executable

    def cancel(self) -> None:
        """Leave the streams alone and forget what was captured: something failed within."""
        runtime = self._runtime
        with runtime.guard():
            try:
                self._leave()
            except Exception as error:  # CUDA has ended it already, for the reason that is being raised
                logger.debug("%s: a capture was given up: %s", runtime.device, str(error))
            if self._graph:
                runtime.api.graphDestroy(self._graph)
                self._graph = 0

    def _leave(self) -> None:
        """End the capture, of CUDA as of the streams. A second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        first = self._streams[0]
        with captures.end():
            try:
                self._graph = self._runtime.api.streamEndCapture(first.pointer)
            finally:
                for stream in self._streams:
                    stream.capture = None
                for event, _times, _native in self._work.events.values():
                    event.stream = None

    def _mark(self) -> NativeEvent:
        mark = self._runtime.natives.take()
        self._marks.append(mark)
        return mark

    def detach(self) -> None:
        """Replays use the first stream alone, and record no event."""
        self._marks += [native for _event, _times, native in self._work.events.values()]
        self._work.events.clear()
        self._streams = self._streams[:1]

    def replay(self) -> None:
        """Launch it again. Raises DeviceError inside the capture, and for an event of a replay that is not done."""
        if self._is_open:
            raise DeviceError("a capture can only be replayed after it has ended")
        if not self._executable:
            raise DeviceError(f"{self._runtime.device}: there is nothing to replay: the capture was abandoned")
        for event, _times, _native in self._work.events.values():
            if event.query() is EventState.SCHEDULED:
                raise DeviceError(f"event of {event.owner} must be reset before a replay records it")
        first, *others = self._streams
        for stream in others:
            if stream.failure is not None:
                first.fail(stream.failure)
            if not stream.is_idle:
                first.wait_for(stream.mark())
        step = partial(self._runtime.api.graphLaunch, self._executable, first.pointer)
        first.launch(Kernel(step, f"a capture of {len(self)} launches"))
        end, failure = first.mark(), first.failure
        for stream in others:
            if failure is not None:
                stream.fail(failure)
            stream.wait_for(end)
        for event, times, _native in self._work.events.values():
            event.placed(times, end, failure)
            if times.stream.observer is not None:
                times.stream.observer.recorded(times.stream, event)
