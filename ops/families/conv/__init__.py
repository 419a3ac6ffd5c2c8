"""Convolution: one problem, an algorithm a module, an operator type a module.

- `problem`: the arrays of a convolution, and what an Algorithm is; `column_blocks`, `product`: what algorithms share.
- Algorithms: `one_by_one`, `depthwise` and `im2col` for the default engine; `choice` picks one, `search` measures them.
- Operators: `convolution`, `fused` (with post-ops), `gradient`, `transposed`, `locally_connected` and `unrolled`
  (Im2Col, Col2Im).
- `makers`: the gradient maker of each.
"""
