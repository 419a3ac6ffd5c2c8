"""Requests, the queue in which they wait, and how their callers wait for them."""
