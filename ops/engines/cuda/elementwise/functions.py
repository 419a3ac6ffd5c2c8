"""Functions of one tensor on CUDA, and their gradients: a line each.

The first expression is y; it reads x and the operator's float arguments by name. The second is dx, where the gradient
is an operator of its own; it reads dy, and x or y. What needs more than that is in
`dagexec.ops.engines.cuda.activation`.
"""

from __future__ import annotations

from dagexec.ops.engines.cuda.base.pointwise import register_function

register_function("Exp", "exp(x)")
register_function("Log", "log(x)")
register_function("Sqrt", "sqrt(x)", "dy / (y * A(2))")
register_function("Cbrt", "cbrt(x)", "dy / (y * y * A(3))")
register_function("Sqr", "times(x, x)", "dy * (x * A(2))")
register_function("Negative", "negated(x)")
register_function("Abs", "magnitude(x)", "dy * sign_of(x)")
register_function("Sign", "sign_of(x)")
register_function("Floor", "floor(x)")
register_function("Ceil", "ceil(x)")
register_function("Round", "rint(x)")
register_function("Sin", "sin(x)", "dy * cos(x)")
register_function("Cos", "cos(x)", "dy * -sin(x)")
register_function("Tan", "tan(x)", "dy / (cos(x) * cos(x))")
register_function("Asin", "asin(x)", "dy / sqrt((A(1) - x) * (A(1) + x))")
register_function("Acos", "acos(x)", "dy / -sqrt((A(1) - x) * (A(1) + x))")
register_function("Atan", "atan(x)", "dy / (A(1) + x * x)")
register_function("Sinh", "sinh(x)", "dy * cosh(x)")
register_function("Cosh", "cosh(x)", "dy * sinh(x)")
register_function("Asinh", "asinh(x)", "dy / hypot(x, A(1))")
register_function("Acosh", "acosh(x)", "dy / (sqrt(x - A(1)) * sqrt(x + A(1)))")
register_function("Atanh", "atanh(x)", "dy / ((A(1) - x) * (A(1) + x))")
register_function("Not", "!x")
register_function("Scale", "scale * x")
register_function("Reciprocal", "A(1) / x", "dy * -(y * y)")
register_function("Rsqrt", "A(1) / sqrt(x)", "dy * (y * y * y * A(-0.5))")
register_function("Cube", "times(times(x, x), x)", "dy * (x * x * A(3))")
register_function("Erf", "erf(x)", "dy * (exp(-(x * x)) * A(1.12837916709551257390))")
register_function("Relu", "nan_max(x, A(0))", "y > A(0) ? dy : A(0)")
register_function("ReluN", "clipped(x, A(0), n)")
register_function("LeakyRelu", "leaky_relu(x, alpha)", "y >= A(0) ? dy : alpha * dy")
register_function("Elu", "elu(x, alpha)", "dy * (y > A(0) ? A(1) : y + alpha)")
register_function("Celu", "x > A(0) ? x : alpha * expm1(x / alpha)", "dy * (y > A(0) ? A(1) : y / alpha + A(1))")
register_function("Selu", "scale * elu(x, alpha)", "dy * (y > A(0) ? scale : y + scale * alpha)")
register_function("Sigmoid", "logistic(x)", "(A(1) - y) * y * dy")
register_function("Swish", "swish(x, alpha)", "swish_slope(alpha * x) * dy")
register_function("Mish", "mish(x)", "mish_slope(x) * dy")
register_function("Softplus", "softplus(x)", "-expm1(-y) * dy")
register_function("Softsign", "x / (A(1) + fabs(x))", "dy / (A(1) + fabs(x)) / (A(1) + fabs(x))")
register_function("Tanh", "tanh(x)", "(A(1) - y * y) * dy")
register_function("HardSigmoid", "hard_sigmoid(x, alpha, beta)", "alpha * (y > A(0) && y < A(1) ? dy : A(0))")
register_function(
    "HardSwish",
    "hard_swish(x)",
    "(hard_sigmoid(x, A(1.0 / 6), A(0.5)) + (x > A(-3) && x < A(3) ? x * A(1.0 / 6) : A(0))) * dy",
)
register_function(
    "Logit",
    "log(clipped(x, eps, A(1) - eps) / (A(1) - clipped(x, eps, A(1) - eps)))",
    "x >= eps && x <= A(1) - eps ? dy / (x * (A(1) - x)) : A(0)",
)
register_function("ThresholdedRelu", "x <= alpha ? A(0) : x", "y > A(0) ? dy : A(0)")
register_function("ReplaceNaN", "is_nan(x) ? value : x")
