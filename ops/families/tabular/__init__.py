"""Operators of classical machine learning on tables, those of ONNX's domain ai.onnx.ml: trees, linear models, support
vector machines, and what prepares columns and names classes.
"""
