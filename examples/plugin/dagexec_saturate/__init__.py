"""A plugin of dagexec: what it adds is in the modules that the entry points of its package name."""
