"""read_graph: a file of a foreign graph, whichever of the known formats it has."""

from __future__ import annotations

import json
from pathlib import Path

from dagexec.analysis.foreign_graphs import chakra, fx, own
from dagexec.errors import ModelFormatError
from dagexec.platform.disk import reading
from dagexec.platform.files import reason
from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.scheduler.hazards.foreign import ForeignGraph

_MAX_BYTES = 1 << 30


def read_graph(path: Path) -> ForeignGraph:
    """The graph in the file `path`: of dagexec's own format, of torch.fx (`fx`), or a Chakra trace (`chakra`).

    Raises ModelFormatError, which names the file, and operator and field where one of them is wrong.
    """
    try:
        with reading(path) as file:
            content = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ModelFormatError(f"{path}: {reason(error)}") from None
    if len(content) > _MAX_BYTES:
        raise ModelFormatError(f"{path}: has more than {_MAX_BYTES:,} bytes")
    try:
        with garbage_collection_paused():
            return _parsed(path.stem, content)
    except ModelFormatError as error:
        raise ModelFormatError(f"{path}: {error}") from None


def _parsed(name: str, content: bytes) -> ForeignGraph:
    if content.lstrip()[:1] != b"{":
        return chakra.parse_protobuf(name, content)
    try:
        text = content.decode()
        found, end = json.JSONDecoder().raw_decode(text, len(text) - len(text.lstrip()))
    except json.JSONDecodeError as error:
        raise ModelFormatError(f"line {error.lineno}, column {error.colno}: no JSON: {error.msg}") from None
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        raise ModelFormatError(f"no JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelFormatError(f"expected an object, found {type(found).__name__}")
    if text[end:].strip():
        return chakra.parse_json_messages(name, text)
    if "operators" in found:
        return own.parse(name, found)
    if "fx" in found:
        return fx.parse(name, found)
    raise ModelFormatError("expected a field operators (dagexec) or fx (torch.fx), or several messages (Chakra)")
