"""Arguments that every operator may have: those that nets, passes and devices read, and those that are ignored.

All others must be in the schema of the operator, as an argument that nothing reads is probably misspelled.
"""

from __future__ import annotations

READ_BY_NETS = {
    "batch_invariant": "0: the bytes of a row may depend on the other rows of its batch (default 1)",
    "cold_weights": "0: oneDNN's kernels are measured with parameters that lie in the cache (default 1)",
    "cudnn_state": "engine CUDNN: the library state of the device that it takes turns at",
    "drawn_as": "data parallelism: the blob whose random numbers these are, on every device",
    "nan": "'any': a library's maxima may give a number for NaN (default 'kept')",
    "stream_group": "operators of one group run on one stream of the device",
    "threads": "of a session of another runtime: how many threads it computes with (default 1)",
    "zero_copy": "1: its pieces are written in their place in the first place (default 0)",
}
"""Names and help texts of arguments that dagexec itself gives to operators of any type."""

UNREAD = frozenset(
    {
        "allow_tf32", "convolution_transform_strategy", "cudnn_exhaustive_search", "deterministic", "device_id",
        "enable_tensor_core", "exhaustive_search", "float16_compute", "force_algo_dgrad", "force_algo_fwd",
        "force_algo_wgrad", "init_params", "net_position", "order", "run_once", "shared_buffer", "training_mode",
        "use_cudnn", "use_gpu_transform", "use_grad_hack", "use_nnpack", "ws_nbytes_limit",
    }
)  # fmt: skip
"""Ignored arguments of Caffe2's helpers: they choose an algorithm, or the order of channels for operators that work
with any."""
