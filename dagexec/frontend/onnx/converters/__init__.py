"""Converters of nodes that are more than one operator under another name, a module a family, whatever their domain.

All modules here are imported with the frontend, for what they register (`converts` in `dagexec.frontend.onnx.node`).
"""
