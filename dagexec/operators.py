"""What an operator's author needs: schemas, the base class of implementations, gradients, and element types.

    @new_operator("Square", inputs=(1, 1), outputs=(1, 1), infer=same_as_input, doc="Y = X * X.")
    class Square(Operator):
        def prepare(self) -> Step:
            return partial(np.square, self.x(0), out=self.y(0))

`docs/adding-an-operator.md` walks through it, `dagexec.testing` has what its tests need.
"""

from dagexec.core.arguments import Arguments, ArgumentValue
from dagexec.core.dtypes import (
    ALL_TYPES,
    BFLOAT16,
    BOOL,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FLOAT_TYPES,
    INT8,
    INT16,
    INT32,
    INT64,
    NUMBER_TYPES,
    STRING,
    UINT8,
    UINT16,
    TypeMeta,
)
from dagexec.core.expressions import (
    Expression,
    absolute,
    clip,
    constant,
    exp,
    expm1,
    log,
    logistic,
    maximum,
    minimum,
    row_max,
    row_min,
    row_sum,
    select,
    sign,
    softplus,
    sqrt,
    square,
    tanh,
)
from dagexec.core.gradient import (
    GradientOperators,
    GradientRequest,
    SparseGradient,
    gradient_by,
    gradient_of,
    no_gradient,
    not_differentiable,
)
from dagexec.core.onnx_name import OnnxName
from dagexec.core.operator import Operator, Prepared, Step, in_sequence, nothing_to_do
from dagexec.core.registry import (
    new_operator,
    operator,
    operator_class,
    registered_engines,
    registered_operators,
    schema_of,
)
from dagexec.core.schema import (
    UNBOUNDED,
    Cost,
    OperatorCall,
    OpSchema,
    TensorType,
    any_to_first,
    first_to_first,
    memory_cost,
    one_to_one,
    same_as_input,
)
from dagexec.core.traits import ImageRole, LayerKind
from dagexec.ops.base.array_function import array_function
from dagexec.ops.base.blocks import Array, Scratch
from dagexec.ops.base.elementwise_operator import elementwise_operator
from dagexec.ops.base.passes import clip_pass, scalar_pass
from dagexec.ops.base.row_operator import row_operator
from dagexec.ops.engines.onednn.operator import OneDNNOperator
from dagexec.ops.families.optimize.sparse import SparseUpdate
from dagexec.ops.families.optimize.update import Changed, DenseUpdate, Parts, Piece, PieceRule, Rule, update_operator

__all__ = [
    "ALL_TYPES",
    "BFLOAT16",
    "BOOL",
    "FLOAT16",
    "FLOAT32",
    "FLOAT64",
    "FLOAT_TYPES",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "NUMBER_TYPES",
    "STRING",
    "UINT8",
    "UINT16",
    "UNBOUNDED",
    "ArgumentValue",
    "Arguments",
    "Array",
    "Changed",
    "Cost",
    "DenseUpdate",
    "Expression",
    "GradientOperators",
    "GradientRequest",
    "ImageRole",
    "LayerKind",
    "OneDNNOperator",
    "OnnxName",
    "OpSchema",
    "Operator",
    "OperatorCall",
    "Parts",
    "Piece",
    "PieceRule",
    "Prepared",
    "Rule",
    "Scratch",
    "SparseGradient",
    "SparseUpdate",
    "Step",
    "TensorType",
    "TypeMeta",
    "absolute",
    "any_to_first",
    "array_function",
    "clip",
    "clip_pass",
    "constant",
    "elementwise_operator",
    "exp",
    "expm1",
    "first_to_first",
    "gradient_by",
    "gradient_of",
    "in_sequence",
    "log",
    "logistic",
    "maximum",
    "memory_cost",
    "minimum",
    "new_operator",
    "no_gradient",
    "not_differentiable",
    "nothing_to_do",
    "one_to_one",
    "operator",
    "operator_class",
    "registered_engines",
    "registered_operators",
    "row_max",
    "row_min",
    "row_operator",
    "row_sum",
    "same_as_input",
    "scalar_pass",
    "schema_of",
    "select",
    "sign",
    "softplus",
    "sqrt",
    "square",
    "tanh",
    "update_operator",
]
