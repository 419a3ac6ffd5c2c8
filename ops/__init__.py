"""What operators compute: a module or small package per family.

Importing this package registers them all, except those of CUDA, which are registered when one is asked for.
"""

from dagexec.core.registry import register_when_asked
from dagexec.ops import communication, conv, loss, onednn, optimize, pool, quantized, recurrent, storage
from dagexec.ops.activation import functions as activation
from dagexec.ops.activation import glu, logit, softmax, softmax_gradient
from dagexec.ops.activation import gradient as activation_gradient
from dagexec.ops.base import array_function
from dagexec.ops.control import enforce, nan_check, queue, watching
from dagexec.ops.control import operators as control
from dagexec.ops.elementwise import arithmetic as elementwise
from dagexec.ops.elementwise import arithmetic_gradient as elementwise_gradient
from dagexec.ops.elementwise import bitwise as bits
from dagexec.ops.elementwise import cast, not_a_number, unary, unary_gradient, variadic_gradient
from dagexec.ops.elementwise import fused as fused_elementwise
from dagexec.ops.fill import byte_fill, dropout, range_fill
from dagexec.ops.fill import fillers as fill
from dagexec.ops.image import pad, space_to_batch, spatial, spatial_gradient, upsample_bilinear
from dagexec.ops.index import boolean_mask, ranges
from dagexec.ops.index import indexing as index
from dagexec.ops.index import indexing_gradient as index_gradient
from dagexec.ops.loss import criteria, ranking
from dagexec.ops.normalization import (
    batch_moments,
    batch_norm,
    batch_norm_gradient,
    channel_affine,
    standardization,
    standardization_gradient,
    unit_norm,
)
from dagexec.ops.normalization import local_response as normalization
from dagexec.ops.normalization import local_response_gradient as normalization_gradient
from dagexec.ops.product import fused as fused_product
from dagexec.ops.product import gradient as product_gradient
from dagexec.ops.product import products as product
from dagexec.ops.reduction import axes as reduction
from dagexec.ops.reduction import gradient as reduction_gradient
from dagexec.ops.reduction import lp_norm, moments
from dagexec.ops.shape import alias, concat, concat_gradient, emptiness, reorder, slicing, slicing_gradient
from dagexec.ops.shape import reshaping as shape
from dagexec.ops.shape import reshaping_gradient as shape_gradient
from dagexec.ops.sparse import features, id_lists, packed_sequence, partition, segments
from dagexec.ops.sparse import rowwise_quantized as rowwise_quantized

__all__ = [
    "activation",
    "activation_gradient",
    "alias",
    "array_function",
    "batch_moments",
    "batch_norm",
    "batch_norm_gradient",
    "bits",
    "boolean_mask",
    "byte_fill",
    "cast",
    "channel_affine",
    "communication",
    "concat",
    "concat_gradient",
    "control",
    "conv",
    "criteria",
    "dropout",
    "elementwise",
    "elementwise_gradient",
    "emptiness",
    "enforce",
    "features",
    "fill",
    "fused_elementwise",
    "fused_product",
    "glu",
    "id_lists",
    "index",
    "index_gradient",
    "logit",
    "loss",
    "lp_norm",
    "moments",
    "nan_check",
    "normalization",
    "normalization_gradient",
    "not_a_number",
    "onednn",
    "optimize",
    "packed_sequence",
    "pad",
    "partition",
    "pool",
    "product",
    "product_gradient",
    "quantized",
    "queue",
    "range_fill",
    "ranges",
    "ranking",
    "recurrent",
    "reduction",
    "reduction_gradient",
    "reorder",
    "rowwise_quantized",
    "segments",
    "shape",
    "shape_gradient",
    "slicing",
    "slicing_gradient",
    "softmax",
    "softmax_gradient",
    "space_to_batch",
    "spatial",
    "spatial_gradient",
    "standardization",
    "standardization_gradient",
    "storage",
    "unary",
    "unary_gradient",
    "unit_norm",
    "upsample_bilinear",
    "variadic_gradient",
    "watching",
]

register_when_asked("cuda", "dagexec.ops.cuda")
