"""The settings of traces and logs that clients of Triton ask for, and may not change: the server's file has them."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from dagexec.server.inference import RequestError
from dagexec.server.tensors import ProtocolError

Setting = bool | int | str

_logger = logging.getLogger("dagexec.server")


def trace_settings(telemetry: bool) -> dict[str, str | list[str]]:
    """Whether there is an OpenTelemetry span for each run; numbers are texts, as in Triton."""
    return {
        "trace_file": "",
        "trace_level": ["TIMESTAMPS" if telemetry else "OFF"],
        "trace_rate": "1",
        "trace_count": "-1",
        "log_frequency": "0",
        "trace_mode": "opentelemetry" if telemetry else "triton",
    }


def log_settings() -> dict[str, Setting]:
    """What the server logs, to its standard error."""
    enabled = _logger.isEnabledFor
    return {
        "log_file": "",
        "log_info": enabled(logging.INFO),
        "log_warning": enabled(logging.WARNING),
        "log_error": enabled(logging.ERROR),
        "log_verbose_level": int(enabled(logging.DEBUG)),
        "log_format": "default",
    }


def check_unchanged(settings: Mapping[str, object], asked: Mapping[str, object]) -> None:
    """Raise RequestError for what asks for other settings: 403, and 400 for those that there are not.

    None stands for the server's own.
    """
    for name, value in asked.items():
        if name not in settings:
            raise ProtocolError(f"unknown setting {name!r:.80}; there are {sorted(settings)}")
        if value is not None and value != settings[name] and [value] != settings[name] and value != [settings[name]]:
            raise RequestError(403, f"clients may not change settings of this server: {name} stays {settings[name]!r}")
