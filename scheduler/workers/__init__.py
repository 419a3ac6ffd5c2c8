"""The workers of executors: their own, those of a `Pool`, or those of the process."""
