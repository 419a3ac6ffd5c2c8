"""What was decided when a net was prepared, to be kept in a file and given to nets of the same model elsewhere.

Weights are there as kernels read them, and each operator that had implementations to choose from has the names of those
that it chose, also by measuring: so results have the same bytes wherever they are given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dagexec.core.constant import Keeper
from dagexec.core.feeds import Array
from dagexec.core.tensor import Tensor
from dagexec.core.workspace import Workspace
from dagexec.platform.lazy import LazyModule
from dagexec.platform.records import dataclass
from dagexec.scheduler.nets.net import BaseNet

if not TYPE_CHECKING:
    onednn = LazyModule("dagexec.ops.engines.onednn.operator")
else:
    from dagexec.ops.engines.onednn import operator as onednn


@dataclass(frozen=True)
class Kept:
    """For all replicas of one model.

    Attributes:
        packed: what gives the packed forms of parameters, by name.
        chosen: of each operator in list order, implementations by geometry.
    """

    packed: Mapping[str, Keeper]
    chosen: Sequence[Mapping[str, str]]

    def give_packed(self, parameters: Workspace) -> None:
        """Have the constants among `parameters` take packed forms instead of making them."""
        for name, keeper in self.packed.items():
            value = parameters.get_blob(name).value if parameters.has_blob(name) else None
            if isinstance(value, Tensor) and value.constant is not None:
                value.constant.keep(keeper)

    def give_chosen(self, net: BaseNet) -> None:
        """Have the operators of `net` go on with what was chosen, where it is to be had."""
        for operator, names in zip(net.operators, self.chosen, strict=False):
            if names and isinstance(operator, onednn.OneDNNOperator):
                operator.names_for_all.update(names)


def packed_forms(parameters: Workspace) -> dict[str, dict[str, Array]]:
    """The parameters in the forms that kernels read, by name and form, as far as runs have asked for them."""
    tensors = ((name, parameters.get_blob(name).value) for name in parameters.blobs())
    constants = {name: value.constant for name, value in tensors if isinstance(value, Tensor) and value.constant}
    return {
        name: {form: array for form, array in constant.forms().items() if isinstance(form, str)}
        for name, constant in constants.items()
    }


def chosen_implementations(net: BaseNet) -> list[dict[str, str]]:
    """Of each operator in list order, what it chose, as far as it was prepared."""
    return [dict(one.names_for_all) if isinstance(one, onednn.OneDNNOperator) else {} for one in net.operators]
