"""Operators that pad, move or interpolate pixels."""
