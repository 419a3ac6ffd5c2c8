"""Islands: parts of a net that sessions of onnxruntime or OpenVINO compute, where they are faster.

`regions` finds connected parts and puts operators `Island` in their place, as `plans` say. `choice` compiles the
candidates, of which `mixing` finds one part by part; `comparing` measures which is fastest, and `guarantees` tests
whether its results keep what dagexec promises of its own kernels.
"""
