"""Models that Caffe2's predictor exporter saved: one database with a MetaNetDef and the parameters (`.mdl`).

The record `!!META_NET_DEF` is a string, a MetaNetDef: its nets and lists of blobs have names that are constants of
Caffe2's. All other records are the parameters. The exporter's nets to load them and to make room for inputs and outputs
are not needed; what else they do, is done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TypeVar

from dagexec.core.io_access import IO
from dagexec.core.model import InputInfo, Model
from dagexec.core.proto import MetaNetDef, NetDef, OperatorDef
from dagexec.errors import ModelFormatError, StorageError
from dagexec.storage.blob_file import BlobFile, read_blob_file
from dagexec.storage.net_file import parse_message

T = TypeVar("T")

PREDICTOR_SUFFIXES = (".mdl", ".minidb")

META_NET_DEF, DB_READER = "!!META_NET_DEF", "!!PREDICTOR_DBREADER"
PREDICT_NET, PREDICT_INIT, GLOBAL_INIT = "PREDICT_NET_TYPE", "PREDICT_INIT_NET_TYPE", "GLOBAL_INIT_NET_TYPE"
PARAMETERS, INPUTS, OUTPUTS = "PARAMETERS_BLOB_TYPE", "INPUTS_BLOB_TYPE", "OUTPUTS_BLOB_TYPE"


def load_predictor(path: str | os.PathLike[str], db_type: str = "minidb") -> Model:
    """The model in the database at `path`; its operators may read databases in the folder of the file.

    Element types and shapes of inputs are unknown: the file has only those of one batch.
    Raises ModelFormatError, naming the file, when it cannot be read, is damaged, or lacks what it refers to.
    """
    place = Path(path)
    try:
        found = read_blob_file(db_type, place)
    except StorageError as error:
        raise ModelFormatError(f"{place}: not a model of a predictor: {error}") from None
    if META_NET_DEF not in found.strings:
        raise ModelFormatError(f"{place}: not a model of a predictor: record {META_NET_DEF!r} is missing")
    meta = parse_message(found.strings[META_NET_DEF], MetaNetDef, f"{place}: record {META_NET_DEF!r}")
    return _Predictor(place, meta, found).model()


class _Predictor:
    """What a database holds, as a model."""

    def __init__(self, path: Path, meta: MetaNetDef, found: BlobFile) -> None:
        self._path = path
        self._found = found
        self._nets = self._by_key("net", ((entry.key, entry.value) for entry in meta.nets))
        self._blobs = self._by_key("list of blobs", ((entry.key, list(entry.value)) for entry in meta.blobs))

    def _by_key(self, what: str, entries: Iterable[tuple[str, T]]) -> dict[str, T]:
        result: dict[str, T] = {}
        for key, value in entries:
            if key in result:
                raise self._damaged(f"{what} {key!r} is there twice")
            result[key] = value
        return result

    def _damaged(self, problem: str) -> ModelFormatError:
        return ModelFormatError(f"{self._path}: {problem}")

    def model(self) -> Model:
        """Net, parameters and what else the exporter's nets compute. Raises ModelFormatError."""
        net = self._nets.get(PREDICT_NET)
        if net is None or not net.op:
            raise self._damaged(f"net {PREDICT_NET!r} is missing or has no operators; there is nothing to run")
        inputs, outputs = (self._blobs.get(key, []) for key in (INPUTS, OUTPUTS))
        if not outputs:
            raise self._damaged(f"list of blobs {OUTPUTS!r} is missing or empty")
        kept = self._other_init_operators({*inputs, *outputs})
        self._check_parameters({blob for operator in kept for blob in operator.output})
        init = NetDef(name=f"{net.name}_init", op=kept) if kept else None
        return Model(
            net.name or self._path.stem,
            net,
            init,
            self._found.tensors,
            {name: InputInfo() for name in inputs},
            tuple(outputs),
            folder=self._path.parent,
            allow_io=IO.READ_FOLDER,
        )

    def _other_init_operators(self, fed: set[str]) -> list[OperatorDef]:
        """The operators of both init nets but those that load parameters or fill inputs and outputs, `fed`."""
        nets = [self._nets[key] for key in (GLOBAL_INIT, PREDICT_INIT) if key in self._nets]
        operators = [operator for net in nets for operator in net.op]
        others = (one for one in operators if DB_READER not in one.input)
        return [one for one in others if not one.output or not fed.issuperset(one.output)]

    def _check_parameters(self, computed: set[str]) -> None:
        there = self._found.tensors.keys() | computed
        missing = [name for name in self._blobs.get(PARAMETERS, []) if name not in there]
        if missing:
            raise self._damaged(f"{len(missing)} parameter(s) are missing, the first is {missing[0]!r}")
