"""Islands: parts of a net that sessions of onnxruntime or OpenVINO compute, where they are faster.

`regions` finds connected parts and puts operators `Island` in their place, `guarantees` tests whether results keep what
dagexec promises of its own kernels, and `comparing` measures which model is fastest.
"""
