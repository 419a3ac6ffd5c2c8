"""OperatorWithBodies: the base of operators that run nets, which builds a body of each (`dagexec.core.body`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import cast

from dagexec.core.blob import Blob
from dagexec.core.body import NET_TYPE, Body, InferredBody
from dagexec.core.node import Node
from dagexec.core.operator import Operator
from dagexec.core.program import Program, program_of
from dagexec.core.registry import sub_nets_of
from dagexec.core.schema import OperatorCall
from dagexec.core.workspace import Workspace
from dagexec.errors import DagexecError, OperatorError, RunCancelledError, RunTimeoutError, SchemaError


class OperatorWithBodies(Operator):
    """Base of operators that run nets.

    Attributes:
        captured: how many of the last inputs the bodies read by themselves.
        given, results: by argument, the blobs of what the operator hands a body, and of what an execution results in.
    """

    reads_strided = True
    writes_strided = True

    def __init__(self, definition: Node, workspace: Workspace, *, index: int = -1, net: str = "") -> None:
        """Build the bodies. Raises SchemaError for nets that do not fit, and what `Workspace.build_net` raises."""
        super().__init__(definition, workspace, index=index, net=net)
        names = self.arguments.strings("captured")
        self.captured = len(names)
        if self.captured > len(self.input_blobs):
            raise SchemaError(f"{self.label}: {self.captured} captured names, but only {len(self.input_blobs)} inputs")
        outside = dict(zip(names, self.input_blobs[len(self.input_blobs) - self.captured :], strict=True))
        self.given: dict[str, tuple[Blob, ...]] = {}
        self.results: dict[str, tuple[Blob, ...]] = {}
        self.bodies = {name: self._build(name, workspace, outside) for name in self.schema.sub_nets}

    def _build(self, argument: str, workspace: Workspace, outside: Mapping[str, Blob]) -> Body:
        net = self.arguments.net(argument)
        if net is None:
            raise SchemaError(f"{self.label}: argument {argument!r}, the net it runs, is missing")
        definition = sub_nets_of(self.definition, self.schema).get(argument) or program_of(net)
        self._check_writes(argument, definition, outside)
        inside = Workspace(root_folder=workspace.root_folder, allow_io=workspace.allow_io)
        for name, blob in outside.items():
            inside.link_blob(name, blob)
        formal = [name for name in definition.external_input if name not in outside]
        self.given[argument] = tuple(inside.create_local_blob(name) for name in formal)
        body = cast(Body, inside.build_net(definition, NET_TYPE))
        self.results[argument] = tuple(inside.get_blob(name) for name in definition.external_output)
        return body

    def _check_writes(self, argument: str, definition: Program, outside: Mapping[str, Blob]) -> None:
        """Raise SchemaError for a body that writes what it is given."""
        fixed = {*outside, *definition.external_input}
        for operator in definition.op:
            written = fixed.intersection(operator.output)
            if written:
                raise SchemaError(
                    f"{self.label}: {argument} writes {min(written)!r}, an input, which a body leaves as it is"
                )

    def infer_by_bodies(self, call: OperatorCall) -> InferredBody | None:
        """The output types and estimated seconds; None where only a run can tell them.

        `call.values` has the inputs that decide what is executed, where shapes decide them.
        """
        return None

    def expect(self, argument: str, given: int, results: int) -> None:
        """Raise SchemaError unless a body takes and gives so many values."""
        found = len(self.given[argument]), len(self.results[argument])
        if found != (given, results):
            raise SchemaError(
                f"{self.label}: {argument} must take {given} values besides those it captures, and give {results}; "
                f"it takes {found[0]} and gives {found[1]}"
            )

    @contextmanager
    def naming(self, where: str) -> Iterator[None]:
        """Within it, an error of a body says which operator runs the body, and `where` it was."""
        try:
            yield
        except (RunCancelledError, RunTimeoutError):
            raise
        except DagexecError as error:
            raise self.failed(where, error) from error

    def failed(self, where: str, error: DagexecError) -> OperatorError:
        """The error for one that a body raised."""
        inner, worker = (error.operator, error.worker) if isinstance(error, OperatorError) else ("", "")
        place = f"{self.label}, {where}"
        return OperatorError(
            f"{place}: {error}",
            net=error.net if isinstance(error, OperatorError) else "",
            operator=f"{place}, {inner}" if inner else place,
            worker=worker,
        )
