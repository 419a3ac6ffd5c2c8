"""What callers of a model may feed, which blobs they may fetch, and which arrays may take the results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy.typing as npt

from dagexec.binding.parameters import Parameters
from dagexec.binding.replicas import Replicas
from dagexec.core.feeds import Feeds, HeldMemory, as_arrays, check_out, named_feeds, result_names
from dagexec.core.model import Model
from dagexec.core.spelling import did_you_mean
from dagexec.errors import FeedError
from dagexec.executor.requests.call import Call
from dagexec.options import CompileOptions


class Interface:
    """Of one executor.

    Attributes:
        needed: the required inputs.
        keep: the blobs that are there after a run; None for all.
    """

    def __init__(self, model: Model, source: Model, options: CompileOptions) -> None:
        """`source` is the model before compilation; no array of `model` is kept, as packed ones may be freed."""
        self._name = model.name
        self._outputs = model.outputs
        self._source = source
        self.needed = source.needed_inputs()
        self.keep = frozenset((*options.keep, *model.outputs, *model.inputs)) if options.optimize else None
        self._parameter_memory: HeldMemory | None = None  # made when it is first asked for

    def asked(
        self,
        feeds: Feeds | npt.ArrayLike,
        call: Call,
        replicas: Replicas,
        parameters: Parameters,
    ) -> tuple[Feeds, Sequence[str]]:
        """The feeds by name, as arrays where `out` has to be apart from them, and what to fetch. Raises FeedError."""
        name = self._name
        named = named_feeds(name, feeds, self.needed)
        names = self._outputs if call.outputs is None else self._fetchable(call.outputs, replicas)
        if call.out is None:
            return named, names
        if self._parameter_memory is None:
            self._parameter_memory = HeldMemory({**self._source.parameters, **parameters.held()})
        arrays = as_arrays(name, named)
        check_out(name, call.out, names, arrays, self._parameter_memory)
        return arrays, names

    def _fetchable(self, outputs: Iterable[str], replicas: Replicas) -> tuple[str, ...]:
        net = self._name
        names = result_names(net, outputs)
        for name in names:
            lost = self.keep is not None and name not in self.keep
            if lost and any(name in operator.output for operator in self._source.program.op):
                raise FeedError(
                    f"net {net!r}: output {name!r} is not kept, as the net was rewritten for speed; "
                    f"compile(..., keep=[{name!r}]) keeps it, and optimize=False every blob"
                )
            workspace = replicas.parameters if lost else replicas.members[0].workspace
            if not workspace.has_blob(name):
                hint = did_you_mean(name, self._outputs)
                raise FeedError(f"net {net!r}: output {name!r} is not a blob of this net{hint}")
        return names
