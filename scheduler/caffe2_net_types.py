"""Caffe2's names of net types, and what runs a net of such a type here."""

from __future__ import annotations

import logging

from dagexec.errors import Caffe2Error

logger = logging.getLogger("dagexec")

NET_TYPES = {
    "": "simple",
    "simple": "simple",
    "async_simple": "simple",
    "simple_refcount": "simple",
    "rnn": "simple",
    "dag": "dag",
    "prof_dag": "dag",
    "parallel": "dag",
    "async_dag": "async_dag",
    "async_polling": "async_dag",
    "async_scheduling": "async_dag",
}
"""The net that stands for each type. All compute the same bytes."""

_logged: set[str] = set()


def net_type(name: str, owner: str) -> str:
    """The net for Caffe2's type `name`; the log says so where another name stands for it, once.

    Raises Caffe2Error for a type that is unknown, naming the net `owner`.
    """
    if name not in NET_TYPES:
        known = ", ".join(sorted(filter(None, NET_TYPES)))
        raise Caffe2Error(f"net {owner!r}: type {name!r} is unknown; known: {known}")
    mapped = NET_TYPES[name]
    if name and name != mapped and name not in _logged:
        _logged.add(name)
        logger.warning("net %r: a net of type %r runs as %r, with the same results", owner, name, mapped)
    return mapped
