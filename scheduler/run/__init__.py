"""Executing a plan: the state of a run, worker threads, launches on streams, and how a run ends."""
