"""What operators compute: a package a family, and packages of the engines `onednn` and `cuda`.

Importing this package registers all operators, except those of CUDA, which are registered when one is requested. It
finds their modules in its folders, so that a new one is listed nowhere. What needs a package that may be missing is
imported where it is used.
"""

from dagexec.core.registry import import_modules, register_when_asked

import_modules(__path__, __name__, but=(f"{__name__}.cuda", f"{__name__}.onednn.declared"))
register_when_asked("cuda", "dagexec.ops.cuda")
