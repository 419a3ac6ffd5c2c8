"""Executor: a compiled model that serves the requests of many callers in a process.

`dagexec.server` is what answers requests from the network with executors.
"""
