"""Operators on CUDA devices. Importing this package registers them; it needs neither CuPy nor a device."""

from dagexec.ops.cuda import cudnn, loss, optimize
from dagexec.ops.cuda.activation import functions as activation
from dagexec.ops.cuda.activation import glu, logit, softmax
from dagexec.ops.cuda.activation import gradient as activation_gradient
from dagexec.ops.cuda.base import array_function, columns, copy
from dagexec.ops.cuda.communication import buckets, device_sum
from dagexec.ops.cuda.control import enforce, nan_check, watching
from dagexec.ops.cuda.control import operators as control
from dagexec.ops.cuda.conv import locally_connected
from dagexec.ops.cuda.conv import operators as conv_operators
from dagexec.ops.cuda.elementwise import arithmetic as elementwise
from dagexec.ops.cuda.elementwise import arithmetic_gradient as elementwise_gradient
from dagexec.ops.cuda.elementwise import bitwise as bits
from dagexec.ops.cuda.elementwise import cast, not_a_number, unary, unary_gradient
from dagexec.ops.cuda.elementwise import fused as fused_elementwise
from dagexec.ops.cuda.fill import dropout, range_fill
from dagexec.ops.cuda.fill import fillers as fill
from dagexec.ops.cuda.image import pad, spatial
from dagexec.ops.cuda.index import indexing as index
from dagexec.ops.cuda.index import indexing_gradient as index_gradient
from dagexec.ops.cuda.index import top_k
from dagexec.ops.cuda.normalization import batch_norm, channel_affine, standardization, unit_norm
from dagexec.ops.cuda.normalization import local_response as normalization
from dagexec.ops.cuda.pool import gradient as pool_gradient
from dagexec.ops.cuda.pool import pooling as pool
from dagexec.ops.cuda.product import products as product
from dagexec.ops.cuda.quantized import operators as quantized
from dagexec.ops.cuda.recurrent import layer as recurrent
from dagexec.ops.cuda.recurrent import units as recurrent_units
from dagexec.ops.cuda.reduction import axes as reduction
from dagexec.ops.cuda.reduction import gradient as reduction_gradient
from dagexec.ops.cuda.reduction import lp_norm, moments
from dagexec.ops.cuda.shape import concat, emptiness, slicing
from dagexec.ops.cuda.shape import reshaping as shape

__all__ = [
    "activation",
    "activation_gradient",
    "array_function",
    "batch_norm",
    "bits",
    "buckets",
    "cast",
    "channel_affine",
    "columns",
    "concat",
    "control",
    "conv_operators",
    "copy",
    "cudnn",
    "device_sum",
    "dropout",
    "elementwise",
    "elementwise_gradient",
    "emptiness",
    "enforce",
    "fill",
    "fused_elementwise",
    "glu",
    "index",
    "index_gradient",
    "locally_connected",
    "logit",
    "loss",
    "lp_norm",
    "moments",
    "nan_check",
    "normalization",
    "not_a_number",
    "optimize",
    "pad",
    "pool",
    "pool_gradient",
    "product",
    "quantized",
    "range_fill",
    "recurrent",
    "recurrent_units",
    "reduction",
    "reduction_gradient",
    "shape",
    "slicing",
    "softmax",
    "spatial",
    "standardization",
    "top_k",
    "unary",
    "unary_gradient",
    "unit_norm",
    "watching",
]
