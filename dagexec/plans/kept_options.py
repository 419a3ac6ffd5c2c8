"""Options of `dagexec.compile` in a plan: those that decided it, and those of running it, which may be others.

Objects of the application are not kept: pools, tracers, meters, policies, functions, and inputs for calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from numbers import Real
from typing import Any

from dagexec.errors import DagexecError
from dagexec.options import BatchPadding, CompileOptions
from dagexec.plans.container import DamagedError, count, flag, items, maybe, record, text
from dagexec.scheduler.nets.options import NET_TYPES

Read = Callable[[object], Any]


def _number(value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    raise DamagedError(f"expected a number, found {value!r:.80}")


def _texts(value: object) -> list[str]:
    return list(map(text, items(value)))


def net_type_of(value: object) -> str:
    """`value`, if it is a net type. Raises DamagedError."""
    if value in NET_TYPES:
        return text(value)
    raise DamagedError(f"net type {value!r:.80}; expected one of {', '.join(NET_TYPES)}")


def _map_of(read: Read) -> Read:
    def of(value: object) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise DamagedError(f"expected an object, found {value!r:.80}")
        return {name: read(one) for name, one in value.items()}

    return of


def _counts(value: object) -> list[int]:
    return list(map(count, items(value)))


def _argument(value: object) -> object:
    one = value[0] if isinstance(value, list) and value else value
    same = not isinstance(value, list) or all(type(other) is type(one) for other in value)
    if same and isinstance(one, int | float | str):
        return value
    raise DamagedError(f"expected an argument of operators, found {value!r:.80}")


def _padding(value: object) -> BatchPadding:
    axes, mask, sizes = record(value, ("axes", "mask", "sizes"))
    return BatchPadding(_map_of(count)(axes), text(mask), _counts(sizes))


def _shapes_or_flag(value: object) -> object:
    return value if isinstance(value, bool) else _map_of(_counts)(value)


def _or_none(read: Read) -> Read:
    return lambda value: maybe(read, value)


_DECIDED: Mapping[str, Read] = {
    "optimize": flag,
    "dtype": text,
    "layout": _or_none(text),
    "nan": text,
    "batch_invariant": flag,
    "passes": _texts,
    "without_passes": _texts,
    "keep": _texts,
    "shapes": _or_none(_map_of(_counts)),
    "operator_arguments": _or_none(_map_of(_argument)),
    "islands": _or_none(text),
    "foreign": flag,
    "net_type": _or_none(text),
    "device": _or_none(text),
}
_RUNNING: Mapping[str, Read] = {
    "num_workers": _or_none(count),
    "intra_op_threads": _or_none(count),
    "replicas": _or_none(count),
    "preparation_bytes": _or_none(count),
    "max_queued": _or_none(count),
    "when_full": text,
    "max_batch": count,
    "max_wait": _number,
    "batch_axes": _or_none(_map_of(count)),
    "batch_padding": _or_none(_padding),
    "any_length": flag,
    "session_bytes": _or_none(count),
    "warm_start": _shapes_or_flag,
}
_KEPT = {**_DECIDED, **_RUNNING}

DECIDED = frozenset(_DECIDED) | {"calibration"}
"""Options that a plan was made with; with others the model is compiled anew."""

RUNNING = frozenset(one.name for one in fields(CompileOptions)) - DECIDED - {"tuning_seconds", "library_states"}
"""Options that whoever opens a plan may give."""


def options_record(options: CompileOptions) -> dict[str, object]:
    """The options that are kept."""
    return {name: _plain(getattr(options, name)) for name in _KEPT}


def options_of(found: object) -> CompileOptions:
    """The options of a record; nothing is measured when they are used to compile anew. Raises DamagedError."""
    values = record(found, _KEPT)
    try:
        return CompileOptions(
            tuning_seconds=0.0, **{name: _KEPT[name](value) for name, value in zip(_KEPT, values, strict=True)}
        )
    except DagexecError as error:
        raise DamagedError(f"its options: {error}") from None


def _plain(value: object) -> object:
    """An option as JSON has it."""
    if isinstance(value, BatchPadding):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    if isinstance(value, Real) and not isinstance(value, int | float):
        return value.item() if hasattr(value, "item") else float(value)  # NumPy's numbers
    return value
