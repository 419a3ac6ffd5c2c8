"""Operators on CUDA devices. Importing this package registers them; it needs neither CuPy nor a device."""

from dagexec.core.operator_index import import_modules

import_modules(__name__)
