"""The version of dagexec, for whoever writes it down."""

try:
    from dagexec.platform._version import VERSION as _BUILT
except ModuleNotFoundError:  # a checkout of which nothing was built or installed
    _BUILT = "0.0.0"

VERSION: str = _BUILT
