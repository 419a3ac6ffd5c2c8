"""Operators on CUDA devices. Importing this package registers them; it needs neither CuPy nor a device."""

from dagexec.core.registry import import_modules

import_modules(__path__, __name__)
