"""Watching runs: observers, traces and their files."""
