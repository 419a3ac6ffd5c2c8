"""Nets built in Python, layer by layer, with their parameters. Training them is the matter of `dagexec.training`."""
