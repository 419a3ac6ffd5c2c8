"""The stand-ins against the real CuPy, where that is installed: the same names, constants and parameters.

A device is not needed: CuPy's functions tell their parameters in the first line of their documentation.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dagexec.devices.cuda.cublas_library import __file__ as _library_file
from tests.cuda.emulated.installation import new_cupy
from tests.cuda.emulated.machine import Machine

try:
    REAL: Any = importlib.import_module("cupy")
except Exception as error:  # a CuPy that is installed but cannot be loaded is as none
    REAL, WHY = None, f"CuPy cannot be imported ({type(error).__name__}: {error})"
else:
    WHY = ""

pytestmark = pytest.mark.skipif(REAL is None, reason=WHY)

STAND_IN = new_cupy(Machine(record=False))
MODULES = ("runtime", "driver", "cublas", "nccl", "nvrtc")
CLASSES = (
    "Device", "Stream", "ExternalStream", "Event", "Graph", "Memory", "PinnedMemory", "UnownedMemory", "MemoryPointer",
    "PinnedMemoryPointer", "Module",
)  # fmt: skip
NOT_STAND_INS = {"CUDARuntimeError", "CUDADriverError", "CUBLASError", "NcclError", "NVRTCError"}


def real_module(name: str) -> Any:
    try:
        return importlib.import_module(f"cupy.cuda.{name}") if name == "nccl" else getattr(REAL.cuda, name)
    except ImportError as error:
        pytest.skip(f"cupy.cuda.{name} cannot be imported ({error})")


def public(thing: Any) -> Iterator[str]:
    """Names of what a stand-in offers."""
    for name in dir(thing):
        if not name.startswith("_") and not name.endswith("_machine"):
            yield name


def documented_parameters(function: Any) -> list[tuple[str, bool]] | None:
    """Names of the parameters of a real function, and whether each has a default; None where it does not say."""
    try:
        found = inspect.signature(function)
        return [
            (parameter.name, parameter.default is not parameter.empty)
            for parameter in found.parameters.values()
            if parameter.name not in ("self", "cls")
        ]
    except (TypeError, ValueError):
        pass
    first = (function.__doc__ or "").split("\n")[0]
    match = re.match(r"[\w.]+\((.*)\)", first)
    if match is None:
        return None
    pieces = [piece.strip() for piece in match.group(1).split(",") if piece.strip()]
    names = [(piece.split("=")[0].split()[-1].split(":")[0].strip("*"), "=" in piece) for piece in pieces]
    return [one for one in names if one[0] not in ("self", "cls", "")]


def parameters(function: Any) -> list[tuple[str, bool]]:
    """The same of a stand-in."""
    return [
        (parameter.name, parameter.default is not parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.name not in ("self", "cls")
    ]


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_nothing_that_the_real_one_has_not(name: str) -> None:
    real, stand_in = real_module(name), getattr(STAND_IN.cuda, name)
    missing = [one for one in public(stand_in) if not hasattr(real, one)]
    assert not missing
    for one in public(stand_in):
        value, found = getattr(stand_in, one), getattr(real, one)
        if isinstance(value, int | bool):
            assert value == found, f"{name}.{one}"
        elif callable(value) and one not in NOT_STAND_INS and inspect.isroutine(value):
            expected = documented_parameters(found)
            assert expected is not None, f"{name}.{one} does not say what it takes"
            assert parameters(value) == expected, f"{name}.{one}"


@pytest.mark.parametrize("name", [*CLASSES, "NcclCommunicator", "ndarray"])
def test_a_class_has_nothing_that_the_real_one_has_not(name: str) -> None:
    if name == "NcclCommunicator":
        real, stand_in = real_module("nccl").NcclCommunicator, STAND_IN.cuda.nccl.NcclCommunicator
    elif name in CLASSES:
        real, stand_in = getattr(REAL.cuda, name), getattr(STAND_IN.cuda, name)
    else:
        real, stand_in = getattr(REAL, name), getattr(STAND_IN, name)
    missing = [one for one in public(stand_in) if not hasattr(real, one)]
    assert sorted(set(missing) - {"ptr", "mem", "device_id"}) == []  # attributes that only instances have
    for one in public(stand_in):
        value = inspect.getattr_static(stand_in, one)
        found = getattr(real, one, None)
        if inspect.isfunction(value) and callable(found):
            expected = documented_parameters(found)
            if expected is not None and not any(parameter == "args" for parameter, _ in expected):
                given = [parameter for parameter, _ in parameters(value)]
                assert given == [parameter for parameter, _ in expected if parameter in given], f"{name}.{one}"


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("Stream", ["null", "non_blocking", "ptds", "priority"]),
        ("ExternalStream", ["ptr", "device_id"]),
        ("Event", ["block", "disable_timing", "interprocess"]),
        ("Memory", ["size"]),
        ("PinnedMemory", ["size", "flags"]),
        ("UnownedMemory", ["ptr", "size", "owner", "device_id"]),
        ("MemoryPointer", ["mem", "offset"]),
        ("Device", ["device"]),
    ],
)
def test_a_class_is_made_from_what_the_real_one_is_made_from(name: str, wanted: list[str]) -> None:
    real, stand_in = getattr(REAL.cuda, name), getattr(STAND_IN.cuda, name)
    texts = [(real.__init__.__doc__ or "").split("\n")[0], (real.__doc__ or "").split("\n")[0]]
    said = next(text for text in texts if "(" in text and "help(type" not in text)
    expected = [piece.strip().split("=")[0].split()[-1] for piece in said[said.index("(") + 1 : -1].split(",")]
    assert [one for one in expected if one != "self"] == wanted
    assert [one for one, _ in parameters(stand_in.__init__)] == wanted


def test_the_errors_are_made_as_the_real_ones_are() -> None:
    for status in (1, 2, 101, 400, 600, 700, 719, 900, 901, 904, 905, 906, 907):
        real, stand_in = REAL.cuda.runtime.CUDARuntimeError(status), STAND_IN.cuda.runtime.CUDARuntimeError(status)
        assert (str(real), real.status) == (str(stand_in), stand_in.status)
    for status in (1, 7, 13, 15):
        real, stand_in = REAL.cuda.cublas.CUBLASError(status), STAND_IN.cuda.cublas.CUBLASError(status)
        assert (str(real), real.status) == (str(stand_in), stand_in.status)


def test_queries_return_a_status_in_the_real_module_too() -> None:
    try:
        status = REAL.cuda.runtime.streamQuery(0)
    except Exception as error:
        pytest.fail(f"streamQuery raises {error!r}")
    assert isinstance(status, int)


def test_cublas_itself_can_be_loaded_and_has_every_function_that_is_called() -> None:
    from dagexec.devices.cuda.binding import cublas

    library = cublas()
    with open(_library_file) as file:
        called = set(re.findall(r"cublas\(\)\.(cublas\w+)\(", file.read()))
    assert called
    for name in called:
        assert getattr(library, name).argtypes, f"{name} has no types of parameters"
        assert hasattr(STAND_IN.library, name)


def test_kernels_are_launched_with_the_parameters_of_the_real_driver() -> None:
    names = [name for name, _ in parameters(STAND_IN.cuda.driver.launchKernel)]
    assert names == [name for name, _ in documented_parameters(REAL.cuda.driver.launchKernel) or ()]
