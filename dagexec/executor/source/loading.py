"""load_model: models from every source."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard, Union, cast

from dagexec.core.io_access import IO
from dagexec.core.model import MakesModel, Model
from dagexec.core.proto import NetDef
from dagexec.errors import DagexecError, FeedError, ModelFormatError, SettingError
from dagexec.platform.garbage_collection import garbage_collection_paused
from dagexec.platform.lazy import LazyModule
from dagexec.platform.plugins import PluginGroup, taken
from dagexec.storage.net_file import TEXT_SUFFIXES, load_net, parse_message

if not TYPE_CHECKING:
    predictor = LazyModule("dagexec.frontend.predictor")
    caffe2 = LazyModule("dagexec.frontend.caffe2")
    onnx = LazyModule("onnx")
    onnx_frontend = LazyModule("dagexec.frontend.onnx")
    plan = LazyModule("dagexec.plans.plan")
    zoo = LazyModule("dagexec.zoo")
else:
    import onnx

    from dagexec import zoo
    from dagexec.frontend import caffe2, predictor
    from dagexec.frontend import onnx as onnx_frontend
    from dagexec.plans import plan

ModelSource = Union[str, os.PathLike[str], bytes, "onnx.ModelProto", NetDef, tuple[NetDef, NetDef], Model, MakesModel]

ZOO_PREFIX = "zoo:"
PLAN_SUFFIX = ".dagexec"
_SUFFIXES = (".onnx", ".pb", *TEXT_SUFFIXES, PLAN_SUFFIX, ".toml")

Frontend = Callable[[Path], Model]


def _frontend_of_plugin(name: str, found: object) -> Frontend:
    if f".{name}" in (*_SUFFIXES, *predictor.PREDICTOR_SUFFIXES):
        raise taken(name, "a kind of files")
    if not callable(found):
        raise SettingError(f"expected a function of a path that returns a dagexec.Model, found {found!r:.200}")
    return cast(Frontend, found)


PLUGINS = PluginGroup("frontends", _frontend_of_plugin)
"""Functions that read models, by the suffix of files without its dot."""


def is_plan(source: ModelSource) -> TypeGuard[str | os.PathLike[str]]:
    """True for the path of a plan that `dagexec build` or `Executor.save` has written, by its name."""
    return isinstance(source, str | os.PathLike) and os.fspath(source).endswith(PLAN_SUFFIX)


def load_model(
    source: ModelSource,
    *,
    allow_io: bool = False,
    foreign: bool = True,
    shapes: Mapping[str, Sequence[int | None]] | None = None,
    overridable: Collection[str] | None = None,
) -> Model:
    """The model that `source` names or holds.

    Args:
        source: the path of an .onnx file; the path of a folder with init_net.pb and predict_net.pb; the path of a
            single NetDef (.pb, .pbtxt) that needs no init net; that of a minidb of Caffe2's predictor exporter (.mdl,
            .minidb); that of a plan (.dagexec), for the model that it was made of; "zoo:NAME"; an onnx.ModelProto, or
            the bytes of an .onnx file, with all its data inside; a NetDef; an (init net, predict net) pair; a Model,
            which is returned as it is; a `dagexec.Pipeline`; or the path of a file that an installed package has a
            frontend for (docs/plugins.md).
        allow_io: its operators may read and write files and talk to other processes. Otherwise they may only read
            databases in the folder of the model's own files.
        foreign: nodes of an ONNX model that dagexec has no operators for are computed by onnxruntime, where it is
            installed, or else by onnx.reference (docs/onnx.md). With False such a model is refused.
        shapes: sizes of an ONNX model's inputs, by name, in place of those that it states, None for a size that stays
            open. All that depends on them alone is computed at once, and inputs of other sizes are refused.
        overridable: names of initializers of an ONNX model that runs may be fed others for. None for those that the
            standard says, which are inputs too in a file of IR version 4 or later; none of older files, which list all.

    Raises ModelFormatError for a missing file, an unknown zoo name or any other object, saying what was expected;
    FeedError for `shapes` of what is no input of an ONNX model, and for what is not `overridable`;
    otherwise what the frontend raises.
    """
    with garbage_collection_paused():
        if shapes or overridable is not None:
            model = _load_onnx(source, foreign, shapes, overridable)
        else:
            model = _load(source, foreign)
    return model.changed(allow_io=IO.ANY) if allow_io else model


def _load_onnx(
    source: ModelSource,
    foreign: bool,
    shapes: Mapping[str, Sequence[int | None]] | None,
    overridable: Collection[str] | None,
) -> Model:
    if isinstance(source, str | os.PathLike) and Path(source).suffix == ".onnx":
        return onnx_frontend.load_onnx(source, shapes, foreign=foreign, overridable=overridable)
    if isinstance(source, bytes):
        source = _message(source)
    if isinstance(source, onnx.ModelProto):
        return onnx_frontend.from_model_proto(source, shapes=shapes, foreign=foreign, overridable=overridable)
    raise FeedError(f"{'shapes' if shapes else 'overridable'}: given, and the source is no ONNX model")


def _load(source: ModelSource, foreign: bool) -> Model:
    if isinstance(source, Model):
        return source
    if isinstance(source, str) and source.startswith(ZOO_PREFIX):
        return zoo.build(source.removeprefix(ZOO_PREFIX))
    if isinstance(source, str | os.PathLike):
        return _load_path(source, foreign)
    if isinstance(source, NetDef):
        return caffe2.from_nets(None, source, name="net")
    if isinstance(source, tuple) and len(source) == 2 and all(isinstance(net, NetDef) for net in source):
        return caffe2.from_nets(*source, name="net")
    if isinstance(source, MakesModel):
        return source.as_model()
    if isinstance(source, bytes):
        source = _message(source)
    if isinstance(source, onnx.ModelProto):
        return onnx_frontend.from_model_proto(source, foreign=foreign)
    raise ModelFormatError(f"a {type(source).__name__} is no model; expected {_EXPECTED}")


def _message(content: bytes) -> onnx.ModelProto:
    return parse_message(content, onnx.ModelProto, "bytes of a model")


_EXPECTED = (
    "the path of an .onnx file, of a plan (.dagexec), of a .mdl of Caffe2's predictor exporter or of a folder with "
    "init_net.pb and predict_net.pb, an onnx.ModelProto or its bytes, a NetDef, an (init, predict) pair of NetDefs, "
    'a Model, a Pipeline, or "zoo:NAME"'
)


def _load_path(source: str | os.PathLike[str], foreign: bool) -> Model:
    if os.path.isdir(source):
        return caffe2.load_caffe2(source)
    if not os.path.exists(source):
        hint = f'; did you mean "{ZOO_PREFIX}{source}"?' if str(source) in zoo.names() else ""
        raise ModelFormatError(f"{source}: no such file or folder{hint}")
    if os.fspath(source).endswith(".onnx"):
        return onnx_frontend.load_onnx(source, foreign=foreign)
    path = Path(source)
    if path.suffix in (".pb", *TEXT_SUFFIXES):
        model = caffe2.from_nets(None, load_net(path), name=path.stem)
        return model.changed(folder=path.parent, allow_io=IO.READ_FOLDER)
    if path.suffix == PLAN_SUFFIX:
        return replace(plan.given_model(path), allow_io=IO.READ_FOLDER)
    if path.suffix in predictor.PREDICTOR_SUFFIXES:
        return predictor.load_predictor(path)
    if path.suffix == ".toml":
        raise ModelFormatError(f"{path}: no model; dagexec.load_pipeline reads descriptions of pipelines")
    return _load_by_plugin(path)


def _load_by_plugin(path: Path) -> Model:
    name = path.suffix.removeprefix(".")
    read = PLUGINS.find(name)
    if read is None:
        raise ModelFormatError(f"{path}: unknown kind of file; expected {_EXPECTED}{PLUGINS.problem(name)}")
    try:
        model = read(path)
    except (DagexecError, MemoryError):
        raise
    except Exception as error:  # whatever another package raises
        raise ModelFormatError(f"{path}: {type(error).__name__}: {error}") from error
    if not isinstance(model, Model):
        raise ModelFormatError(f"{path}: the frontend for .{name} returned a {type(model).__name__} and no Model")
    return model
