"""The errors of CUDA's libraries, as CuPy raises them, and what the emulation finds besides."""

from __future__ import annotations

STATUS = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    35: ("cudaErrorInsufficientDriver", "CUDA driver version is insufficient for CUDA runtime version"),
    214: ("cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"),
    701: ("cudaErrorLaunchOutOfResources", "too many resources requested for launch"),
    702: ("cudaErrorLaunchTimeout", "the launch timed out and was terminated"),
    710: ("cudaErrorAssert", "device-side assert triggered"),
    716: ("cudaErrorMisalignedAddress", "misaligned address"),
    999: ("cudaErrorUnknown", "unknown error"),
    704: ("cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"),
    705: ("cudaErrorPeerAccessNotEnabled", "peer access has not been enabled"),
    719: ("cudaErrorLaunchFailure", "unspecified launch failure"),
    800: ("cudaErrorNotPermitted", "operation not permitted"),
    801: ("cudaErrorNotSupported", "operation not supported"),
    900: ("cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"),
    901: ("cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"),
    902: ("cudaErrorStreamCaptureMerge", "operation would result in a merge of separate capture sequences"),
    903: ("cudaErrorStreamCaptureUnmatched", "capture was not initiated in this stream"),
    904: ("cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"),
    905: ("cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"),
    906: (
        "cudaErrorStreamCaptureImplicit",
        "operation would make the legacy stream depend on a capturing blocking stream",
    ),
    907: ("cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"),
}


class CUDARuntimeError(RuntimeError):
    """An error of the CUDA runtime."""

    def __init__(self, status: int) -> None:
        name, text = STATUS.get(status, (f"cudaError{status}", "unrecognized error code"))
        super().__init__(f"{name}: {text}")
        self.status = status


class CUDADriverError(RuntimeError):
    """An error of the CUDA driver."""

    def __init__(self, status: int) -> None:
        name, text = STATUS.get(status, (f"cudaError{status}", "unrecognized error code"))
        super().__init__(f"{name.replace('cudaError', 'CUDA_ERROR_').upper()}: {text}")
        self.status = status


class NVRTCError(RuntimeError):
    """An error of NVRTC."""

    def __init__(self, status: int) -> None:
        super().__init__({6: "NVRTC_ERROR_COMPILATION (6)"}[status])
        self.status = status


class OutOfMemoryError(MemoryError):
    """The device has no memory left."""

    def __init__(self, size: int, total: int, limit: int = 0) -> None:
        super().__init__(f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes).")


class EmulationError(Exception):
    """What a GPU would not report, or do otherwise than is plainly meant."""


class RaceError(EmulationError):
    """Two pieces of work that nothing orders touched the same memory, and one of them wrote."""
