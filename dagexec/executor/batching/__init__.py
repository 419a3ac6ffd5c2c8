"""Requests that run together: which may be joined, padded and split again, and runs of several blocks of rows."""
