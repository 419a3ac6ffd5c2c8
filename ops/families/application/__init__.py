"""Operators that call functions of the application."""
