"""How do I add an operator of my own?

A -+
   +-> Hypotenuse -> C
B -+
"""

from functools import partial

import numpy as np

import dagexec
from dagexec.operators import FLOAT_TYPES, Operator, OperatorCall, Step, TensorType, new_operator, one_to_one


def infer_hypotenuse(call: OperatorCall) -> list[TensorType]:
    """Both inputs have one float type and one shape, and so has the output."""
    call.require_types(0, *FLOAT_TYPES)
    call.require_same_type()
    call.require_shape(1, call.inputs[0].shape, "the shape of A")
    return [call.inputs[0]]


@new_operator(
    "Hypotenuse",
    infer=infer_hypotenuse,
    doc="C = sqrt(A^2 + B^2), element by element.",
    input_names=("A", "B"),
    output_names=("C",),
    inplace=one_to_one,
)
class Hypotenuse(Operator):
    """One pass of `np.hypot`."""

    def prepare(self) -> Step:
        """A step that computes into the output's memory."""
        return partial(np.hypot, self.x(0), self.x(1), out=self.y(0))


def main() -> None:
    """Run it in a net, Caffe2 style."""
    workspace = dagexec.Workspace()
    workspace.feed_blob("a", np.array([3, 5, 8], np.float32))
    workspace.feed_blob("b", np.array([4, 12, 15], np.float32))
    net = dagexec.NetDef(name="triangles")
    net.op.append(dagexec.op("Hypotenuse", ["a", "b"], ["c"]))
    workspace.create_net(net, net_type="dag", num_workers=2).run()
    print(workspace.fetch_blob("c"))
    workspace.delete_net("triangles")


if __name__ == "__main__":
    main()
