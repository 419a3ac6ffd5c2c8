"""Operators on CUDA devices. Importing this package registers them; it needs neither CuPy nor a device.

The classes for the host, whose schemas they take, are imported first.
"""

from dagexec.core.operator_index import import_modules, load_all

load_all()
import_modules(__name__)
