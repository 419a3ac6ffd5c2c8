"""CUDA devices: `cuda:N` behind the interface of `dagexec.core.runtime`, on CuPy.

`binding` reaches the libraries; `runtime`, `stream`, `event`, `memory` are the device; `context` is how operators reach
it; `kernels` compiles and launches. Nothing is imported here: of a process without CUDA, nothing is needed.
"""
