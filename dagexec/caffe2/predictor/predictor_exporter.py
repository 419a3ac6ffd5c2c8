"""A trained net in a database, with its parameters, and back: `save_to_db`, `prepare_prediction_net`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dagexec.caffe2 import workspace
from dagexec.caffe2.creation import CreateOperator
from dagexec.caffe2.failures import failing_as_caffe2
from dagexec.caffe2.net import Net
from dagexec.caffe2.predictor import predictor_constants as names
from dagexec.caffe2.references import BlobReference
from dagexec.core.proto import DeviceOption, MetaNetDef, NetDef
from dagexec.errors import Caffe2Error
from dagexec.export.caffe2 import predictor_message
from dagexec.storage.blob_file import write_blobs

__all__ = ["PredictorExportMeta", "load_from_db", "prepare_prediction_net", "save_to_db"]


class PredictorExportMeta:
    """What is saved: a net, and which blobs are its parameters, its inputs and its outputs.

    Attributes:
        predict_net: the net.
        parameters, inputs, outputs: names of blobs.
        shapes: of inputs and outputs, as they are before the first run; of those that are named.
        name: of the model; by default that of the net.
        extra_init_net, global_init_net: what is run besides, before the first run.
    """

    def __init__(
        self,
        predict_net: Any,
        parameters: Iterable[Any],
        inputs: Iterable[Any],
        outputs: Iterable[Any],
        shapes: Mapping[Any, Sequence[int]] | None = None,
        name: str = "",
        extra_init_net: Any = None,
        global_init_net: Any = None,
        net_type: str | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Raises Caffe2Error for a blob that is named twice, and for parameters that are inputs."""
        self.predict_net = _message(predict_net)
        self.parameters, self.inputs, self.outputs = (
            [str(blob) for blob in blobs] for blobs in (parameters, inputs, outputs)
        )
        self.shapes = {str(blob): list(shape) for blob, shape in (shapes or {}).items()}
        self.name = name or self.predict_net.name
        self.extra_init_net = None if extra_init_net is None else _message(extra_init_net)
        self.global_init_net = None if global_init_net is None else _message(global_init_net)
        self.predict_net.name = self.name
        if net_type is not None:
            self.predict_net.type = net_type
        if num_workers is not None:
            self.predict_net.num_workers = num_workers
        read = [*self.parameters, *self.inputs]
        twice = sorted({blob for blob in read if read.count(blob) > 1})
        twice += sorted({blob for blob in self.outputs if self.outputs.count(blob) > 1})
        if twice:
            raise Caffe2Error(f"model {self.name!r}: blobs {twice} are named twice among parameters, inputs or outputs")

    def message(self) -> MetaNetDef:
        """The nets and the lists of blobs, as the file has them."""
        return predictor_message(
            self.predict_net,
            self.parameters,
            self.inputs,
            self.outputs,
            shapes=self.shapes,
            predict_init=self.extra_init_net.op if self.extra_init_net is not None else (),
            global_init=self.global_init_net.op if self.global_init_net is not None else (),
        )


def save_to_db(db_type: str, db_destination: str, predictor_export_meta: PredictorExportMeta) -> None:
    """Write a net, and the parameters that the current workspace has, to a new database.

    Raises Caffe2Error for a parameter that is not there, and where the database cannot be written.
    """
    meta = predictor_export_meta
    arrays = {blob: workspace.FetchBlob(blob) for blob in meta.parameters}
    empty = sorted(blob for blob, array in arrays.items() if isinstance(array, bytes))
    if empty:
        raise Caffe2Error(f"model {meta.name!r}: parameters {empty} are no tensors")
    with failing_as_caffe2(f"save_to_db of {meta.name!r}"):
        write_blobs(
            db_type,
            db_destination,
            arrays.items(),
            strings={names.META_NET_DEF: meta.message().SerializeToString()},
        )


def load_from_db(filename: str, db_type: str, device_option: DeviceOption | None = None) -> MetaNetDef:
    """The nets in a database, which operators of a device may be put on, with its reader in the current workspace.

    Raises Caffe2Error where there is no such database, or none of a predictor.
    """
    reader = BlobReference(names.PREDICTOR_DBREADER)
    record = BlobReference(names.META_NET_DEF)
    workspace.RunOperatorOnce(CreateOperator("CreateDB", [], reader, db=filename, db_type=db_type))
    workspace.RunOperatorOnce(CreateOperator("Load", reader, record))
    with failing_as_caffe2(f"load_from_db of {filename!r}"):
        meta = MetaNetDef.FromString(workspace.FetchBlob(record))
    if device_option is not None:
        for operator in (operator for entry in meta.nets for operator in entry.value.op):
            operator.device_option.CopyFrom(device_option)
    return meta


def prepare_prediction_net(filename: str, db_type: str, device_option: DeviceOption | None = None) -> Net:
    """The net in a database, made in the current workspace, where its parameters are, too; to be fed and run."""
    nets = {entry.key: entry.value for entry in load_from_db(filename, db_type, device_option).nets}
    workspace.RunNetOnce(nets[names.GLOBAL_INIT_NET_TYPE])
    workspace.RunNetOnce(nets[names.PREDICT_INIT_NET_TYPE])
    net = Net(nets[names.PREDICT_NET_TYPE])
    workspace.CreateNet(net)
    return net


def _message(net: Any) -> NetDef:
    """A copy of a net's message."""
    made = NetDef()
    made.CopyFrom(net.Proto() if hasattr(net, "Proto") else net)
    return made
