"""Operators on signals: discrete Fourier transforms, windows, and filters of frequencies."""
