"""ONNX files that other programs write, made here: a module for each family of exporters or sources.

A module's `recipes()` names its files without making them; making one needs the family's packages (the extra
`bench-models`), reading it again does not. Weights are random with a fixed seed, and sizes small: what is exported is
the graph that people have, not their weights.
"""

FAMILIES = ("packages", "scikit", "layers", "language", "vision", "derived")
"""The modules, in an order in which each comes after those whose files it reads."""
