"""Compiling a model: passes that rewrite it, and choices of layouts, kernels and schedules."""
