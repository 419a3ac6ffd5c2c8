"""The real cuDNN without a device: libraries that stand for CUDA's, and a script that asks cuDNN for plans.

cuDNN ranks and builds plans from the description of a device alone, as long as CUDA's libraries can be loaded. The ones
made here by gcc say that there is a device, and load kernels without looking at them. Nothing can be executed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dagexec.devices.cuda.cudnn_graph import ConvGraph
from dagexec.devices.cuda.cudnn_plans import PlanOptions

_ROOT = Path(__file__).resolve().parents[2]

_DRIVER_NOTHING = """
cuCtxGetLimit cuCtxPopCurrent cuCtxPushCurrent cuCtxSetCurrent cuStreamGetCtx cuLinkCreate cuLinkAddData cuLinkComplete
cuLinkDestroy cuLaunchKernel cuLaunchCooperativeKernel cuLaunchKernelEx cuGetExportTable cuTensorMapEncodeIm2col
cuTensorMapEncodeTiled
"""
_DRIVER_DONE = "cuInit cuLibraryUnload cuModuleUnload cuKernelSetAttribute cuFuncSetAttribute"
_DRIVER_LOADED = """
cuLibraryLoadData cuLibraryLoadFromFile cuLibraryGetKernel cuKernelGetFunction cuModuleGetFunction cuModuleLoadData
cuModuleLoadDataEx cuDevicePrimaryCtxRetain cuCtxGetCurrent
"""
_RUNTIME_NOTHING = """
DeviceSynchronize EventCreate EventDestroy EventElapsedTime EventRecord EventSynchronize Free GetLastError
GetDriverEntryPointByVersion GraphAddChildGraphNode GraphAddMemcpyNode1D GraphAddMemsetNode GraphChildGraphNodeGetGraph
GraphCreate GraphDestroy GraphGetNodes GraphGetRootNodes GraphMemcpyNodeSetParams1D GraphMemsetNodeSetParams
GraphNodeGetDependentNodes GraphRetainUserObject KernelSetAttributeForDevice LaunchKernel LibraryGetKernel
LibraryLoadData LibraryUnload Malloc MemcpyAsync MemsetAsync PointerGetAttributes StreamBeginCapture StreamCreate
StreamDestroy StreamEndCapture StreamGetCaptureInfo StreamGetCaptureInfo_v2 StreamIsCapturing StreamSynchronize
ThreadExchangeStreamCaptureMode UserObjectCreate UserObjectRelease
"""
_DRIVER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>
static int something;
int cuDriverGetVersion(int* version) { *version = 12090; return 0; }
int cuDeviceGetCount(int* count) { *count = 1; return 0; }
int cuDeviceGet(int* device, int index) { *device = 0; return 0; }
int cuDeviceGetName(char* name, int length, int device) { strncpy(name, "described", length); return 0; }
int cuDeviceGetUuid(char* uuid, int device) { memset(uuid, 1, 16); return 0; }
int cuDeviceTotalMem(unsigned long long* size, int device) { *size = 80000000000ull; return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 75 ? MAJOR : attribute == 16 ? 108 : attribute == 10 ? 32 : attribute == 1 ? 1024 : 0;
    return 0;
}
int cuCtxGetDevice(int* device) { *device = 0; return 0; }
int cuGetErrorString(int error, const char** text) { *text = "not a device"; return 0; }
int cuGetErrorName(int error, const char** text) { *text = "not a device"; return 0; }
int cuKernelGetAttribute(int* value) { *value = 0; return 0; }
int cuOccupancyMaxPotentialClusterSize(int* size) { *size = 8; return 0; }
static int unknown(void) { return 999; }
int cuGetProcAddress_v2(const char* name, void** found, int version, unsigned long long flags, int* status) {
    *found = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
    if (!*found) *found = (void*)unknown;
    if (status) *status = 0;
    return 0;
}
int cuGetProcAddress(const char* name, void** found, int version, unsigned long long flags) {
    return cuGetProcAddress_v2(name, found, version, flags, 0);
}
"""
_RUNTIME = r"""
int cudaGetDevice(int* device) { *device = 0; return 0; }
int cudaRuntimeGetVersion(int* version) { *version = 12090; return 0; }
int cudaDeviceGetAttribute(int* value, int attribute, int device) {
    *value = attribute == 75 ? MAJOR : attribute == 16 ? 108 : 0;
    return 0;
}
const char* cudaGetErrorString(int error) { return "not a device"; }
const char* cudaGetErrorName(int error) { return "not a device"; }
"""

_COMMON = {
    "version": 1, "maxGridSize": [2147483647, 65535, 65535], "maxBlockSize": [1024, 1024, 64], "regsPerBlock": 65536,
    "memoryBusWidth": 5120, "warpSize": 32, "maxSharedMemoryPerBlock": 49152, "reservedSharedMemoryPerBlock": 1024,
    "maxRegistersPerSM": 65536, "pciDeviceId": 0, "maxCtasPerSM": 32, "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048, "isTccDriver": 0, "supportCoopLaunch": 1, "driverVer": 12090, "cudaDeviceId": 0,
}  # fmt: skip
DEVICES = {
    "sm_90": _COMMON | {
        "deviceVer": 900, "deviceName": "NVIDIA H100 80GB HBM3", "multiProcessorCount": 132, "smClockRateKHz": 1980000,
        "memClockRateKHz": 2619000, "l2CacheSize": 52428800, "maxSharedMemoryPerBlockOptin": 232448,
        "totalGlobalMem": 85000000000, "sharedMemPerSM": 233472, "maxSharedMemoryPerSM": 233472,
    },
    "sm_80": _COMMON | {
        "deviceVer": 800, "deviceName": "NVIDIA A100-SXM4-80GB", "multiProcessorCount": 108, "smClockRateKHz": 1410000,
        "memClockRateKHz": 1593000, "l2CacheSize": 41943040, "maxSharedMemoryPerBlockOptin": 166912,
        "totalGlobalMem": 85000000000, "sharedMemPerSM": 167936, "maxSharedMemoryPerSM": 167936,
    },
}  # fmt: skip
"""What cuDNN is told of a device."""


@cache
def interpreter() -> tuple[str, bool] | None:
    """A Python that has nvidia-cudnn-frontend, and whether it is this one: or that which DAGEXEC_CUDNN_PYTHON names."""
    if importlib.util.find_spec("cudnn") is not None:
        return sys.executable, True
    named = os.environ.get("DAGEXEC_CUDNN_PYTHON", "")
    return (named, False) if named else None


def build_libraries(folder: Path, device: str) -> None:
    """Make libcuda.so.1 and libcudart.so.12 in `folder`. Raises CalledProcessError when gcc fails."""
    driver = [_DRIVER]
    driver += [f"int {name}(void) {{ return 999; }}" for name in _DRIVER_NOTHING.split()]
    driver += [f"int {name}(void) {{ return 0; }}" for name in _DRIVER_DONE.split()]
    driver += [f"int {name}(void** made) {{ *made = &something; return 0; }}" for name in _DRIVER_LOADED.split()]
    runtime = [_RUNTIME, *(f"int cuda{name}(void) {{ return 999; }}" for name in _RUNTIME_NOTHING.split())]
    major = str(DEVICES[device]["deviceVer"])[0]
    for name, lines in (("libcuda.so.1", driver), ("libcudart.so.12", runtime)):
        source = folder / f"{name}.c"
        source.write_text(f"#define MAJOR {major}\n" + "\n".join(lines))
        command = ["gcc", "-w", "-shared", "-fPIC", str(source), "-o", str(folder / name), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)


def ask(
    folder: Path, device: str, requests: Sequence[tuple[ConvGraph, PlanOptions]], timeout: float = 600
) -> list[dict[str, Any]]:
    """For each request what the real cuDNN says of it for `device`, in a process of its own.

    `engines`: how many there are, `plan` and `workspace` of the first that can be built, and what comes of it when it
    is `executed` without a handle; or `refused`, why there is none.
    """
    found = interpreter()
    assert found is not None
    build_libraries(folder, device)
    (folder / "requests").write_bytes(pickle.dumps((DEVICES[device], list(requests))))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "DAGEXEC_CHOICES": "off"}
    environment["CUDNN_FRONTEND_CUDART_LIB_NAME"] = str(folder / "libcudart.so.12")
    paths = [str(_ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if not found[1]:
        paths.append(sysconfig.get_path("purelib"))
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [found[0], "-m", "tests.cuda.deviceless", str(folder)]
    result = subprocess.run(command, env=environment, cwd=_ROOT, capture_output=True, text=True, timeout=timeout)
    if result.returncode:
        raise RuntimeError(f"cuDNN cannot be asked: {result.stderr[-2000:]}")
    answers: list[dict[str, Any]] = json.loads((folder / "answers").read_text())
    return answers


def _executed(plan: Any) -> str:
    """What comes of executing a plan with a handle that is none."""
    import cudnn

    handle = SimpleNamespace(native=cudnn.Handle(0, 0, 0))
    try:
        plan.execute({number: number << 20 for number in range(1, 6)}, 1 << 30, handle)
    except Exception as error:
        return f"{'direct' if plan.direct else 'not direct'}: {type(error).__name__}: {error}"
    return "done"


def _answer(folder: Path) -> None:
    """The other process."""
    import cudnn

    from dagexec.devices.cuda.cudnn_plans import built, planned

    device, requests = pickle.loads((folder / "requests").read_bytes())
    description = cudnn.create_device_properties(json.dumps(device))
    answers = []
    for graph, options in requests:
        try:
            native = planned(graph, options, device_property=description)
            plan = built(native, options.limit)
            count, nbytes = native.get_execution_plan_count(), plan.workspace_nbytes
            answers.append({"engines": count, "workspace": nbytes, "plan": plan.engine, "executed": _executed(plan)})
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            answers.append({"refused": f"{type(error).__name__}: {error}"[:300]})
    (folder / "answers").write_text(json.dumps(answers))


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
