"""What operators compute: a module or small package per family. Importing this package registers them all."""

from dagexec.ops import activation, control

__all__ = ["activation", "control"]
