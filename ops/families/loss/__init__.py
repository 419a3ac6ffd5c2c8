"""Losses and metrics: what a prediction costs against a label, a distribution or a vector, and how often it is right.

Every loss that has a gradient has its maker beside it.
"""
