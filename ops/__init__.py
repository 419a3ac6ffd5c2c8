"""What operators compute: `families`, a package a family, and `engines`, other ways of
computing them; `kernels` is machine code of our own, `base` what families share.

A module registers its operators when it is imported, which is when one of them is first asked for
(`dagexec.core.operator_index`); those of CUDA all at once. What needs a package that may be missing is imported where
it is used.
"""

from dagexec.core.registry import register_when_asked

register_when_asked("cuda", "dagexec.ops.engines.cuda")
