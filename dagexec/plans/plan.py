"""Plan: a compiled model in a file, with the model as it was given and what has to be the same where it is opened.

The file has both models whole. The one as given is there to be compiled anew where the plan does not fit, and costs
nothing where it does: what is not read of a mapped file takes no memory. Parameters that both have are there once.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dagexec.binding.kept import Kept
from dagexec.core.device import CPU
from dagexec.core.model import Model
from dagexec.errors import DagexecError, PlanError
from dagexec.ops.engines.onednn.binding import engine_library
from dagexec.options import CompileOptions
from dagexec.plans.container import Container, DamagedError, Sections, count, flag, record, text
from dagexec.plans.kept_options import net_type_of, options_of, options_record
from dagexec.plans.records import (
    Array,
    check_parameters,
    chosen_of,
    chosen_record,
    forms_record,
    keepers_of,
    model_of,
    model_record,
)
from dagexec.platform.processor import blas_core, numpy_instruction_set
from dagexec.platform.records import dataclass
from dagexec.platform.version import VERSION
from dagexec.scheduler.plan.copies import names_devices

_PLAN = ("made_with", "options", "is_calibrated", "net_type", "cores", "compiled", "packed", "chosen", "given")


@dataclass(frozen=True)
class Plan:
    """What compiling decided.

    Attributes:
        given: the model before it was compiled.
        compiled: the model that runs.
        packed: its parameters in the forms that kernels read, by name and form (`Constant.forms`).
        chosen: implementations of its operators, in list order, by geometry.
        options: as they were asked for, with what they left open.
        net_type: what was chosen for it.
        cores: that there were then.
        is_calibrated: ranges for int8 were found with inputs, which are not kept.
    """

    given: Model
    compiled: Model
    packed: Mapping[str, Mapping[str, Array]]
    chosen: Sequence[Mapping[str, str]]
    options: CompileOptions
    net_type: str
    cores: int
    is_calibrated: bool = False


def made_with() -> dict[str, str]:
    """What decides, beside model and options, what compiling gives: versions, and what the processor has."""
    found = engine_library()
    return {
        "dagexec": VERSION,
        "NumPy": np.__version__,
        "oneDNN": "none" if found is None else found.described(),
        "machine": f"{platform.machine()} {sys.byteorder}-endian",
        "NumPy's instruction set": numpy_instruction_set(),
        "BLAS": blas_core() or "none",
    }


def write_plan(path: Path, plan: Plan) -> None:
    """Put the plan at `path`, as a whole; the same plan gives the same bytes.

    Raises OutputError, and PlanError for what no file can keep: functions of the application, parts in other runtimes,
    and models on devices.
    """
    _check_kept(plan)
    sections = Sections()
    content = {
        "made_with": made_with(),
        "options": options_record(plan.options),
        "is_calibrated": plan.is_calibrated,
        "net_type": plan.net_type,
        "cores": plan.cores,
        "compiled": model_record(plan.compiled, sections),
        "packed": forms_record(plan.packed, sections),
        "chosen": chosen_record(plan.chosen),
        "given": model_record(plan.given, sections),
    }
    sections.write(path, content)


def _check_kept(plan: Plan) -> None:
    model = plan.compiled
    what = f"net {model.name!r} cannot be kept in a plan: "
    if model.python_steps:
        raise PlanError(f"{what}it calls functions of the application, of which a file has nothing")
    if plan.options.default_device != CPU or names_devices(model.program):
        raise PlanError(f"{what}it runs on devices, and plans are for the host")
    islands = [operator.name or operator.type for operator in model.program.op if operator.type == "Island"]
    if islands:
        raise PlanError(f"{what}{islands[0]} is an island, which only the process that made it trusts")
    try:
        json.dumps(options_record(plan.options))
    except TypeError as error:
        raise PlanError(f"{what}its options: {error}") from None


@dataclass(frozen=True)
class PlanFile:
    """A plan that may be in the same place for other processes, too.

    Attributes:
        path: of the file.
        identity: the hash of what it says, which has the hashes of all that is in it.
    """

    path: Path
    identity: str

    def is_here(self) -> bool:
        """True when this process finds that plan there."""
        try:
            return KeptPlan(self.path).file.identity == self.identity
        except DagexecError:
            return False


class KeptPlan:
    """A plan in a file that is open.

    Attributes:
        file: where it is.
        options: those of the plan.
        is_calibrated, net_type, cores: as `Plan` has them.
    """

    def __init__(self, path: Path, *, mapped: bool = True) -> None:
        """Check all but the models; see `Container`. Raises ModelFormatError, and ResourceError without memory."""
        self._container = Container(path, mapped=mapped)
        self.file = PlanFile(path.absolute(), self._container.identity)
        try:
            made, options, calibrated, net_type, cores, self._compiled, self._packed, self._chosen, self._given = (
                record(self._container.plan, _PLAN)
            )
            if not isinstance(made, dict):
                raise DamagedError(f"it does not say what it was made with: {made!r:.80}")
            self._made_with: Mapping[str, str] = {name: text(value) for name, value in made.items()}
            self.options = options_of(options)
            self.is_calibrated, self.cores = flag(calibrated), count(cores)
            self.net_type = net_type_of(net_type)
        except DamagedError as error:
            raise self._container.damaged(error) from None

    def misfit(self) -> str | None:
        """Why the plan is not for this process, in words; None where it is."""
        here = made_with()
        for name in dict.fromkeys((*here, *self._made_with)):
            was, found = self._made_with.get(name, "nothing"), here.get(name, "nothing")
            if was != found:
                return f"it was made with {name} {was}, found {found}"
        return None

    def compiled(self) -> Model:
        """The model that runs. Arrays are read when somebody asks for them, and hashes of large ones are not compared.

        Raises ModelFormatError.
        """
        try:
            return model_of(self._compiled, self._container)
        except DamagedError as error:
            raise self._container.damaged(error) from None

    def kept(self) -> Kept:
        """How the net was prepared. Hashes of large packed weights were not compared. Raises ModelFormatError."""
        try:
            return Kept(keepers_of(self._packed, self._container), chosen_of(self._chosen))
        except DamagedError as error:
            raise self._container.damaged(error) from None

    def given(self) -> Model:
        """The model as it was given; its arrays are read when somebody asks for them. Raises ModelFormatError."""
        try:
            return model_of(self._given, self._container)
        except DamagedError as error:
            raise self._container.damaged(error) from None

    def checked_given(self) -> Model:
        """The model as it was given, all bytes of which are those that were written. Raises ModelFormatError."""
        try:
            check_parameters(self._given, self._container)
        except DamagedError as error:
            raise self._container.damaged(error) from None
        found = self.given()
        return found.changed(parameters=dict(found.parameters))


def given_model(path: Path) -> Model:
    """The model that a plan was made of, with all its bytes checked. Raises ModelFormatError."""
    return KeptPlan(path).checked_given()
