"""Normalization of channels, groups and vectors."""
