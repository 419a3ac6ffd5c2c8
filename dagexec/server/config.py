"""ServerConfig and ModelConfig: what is served and how, from a TOML file and the command line, checked once."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import field, fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field, InstanceOf

from dagexec.cluster import Autoscaling
from dagexec.errors import DagexecError, SettingError
from dagexec.executor.source.loading import ZOO_PREFIX, ModelSource
from dagexec.options import BatchPadding, CompileOptions
from dagexec.server.access import Certificates
from dagexec.server.described_pipeline import DESCRIPTION_KEYS, DescribedPipeline, check_python_steps
from dagexec.server.limits import Limits
from dagexec.server.validation import Count, File, Flag, Name, Real, Seconds, Text, Whole, check_keys, settings

__all__ = [
    "ClusterConfig",
    "GenerationConfig",
    "Limits",
    "ModelConfig",
    "SequenceConfig",
    "ServerConfig",
    "read_config",
]

MAX_QUEUED = 100
"""Requests that wait for a model, unless its configuration says otherwise."""

Port = Annotated[Whole, Field(ge=0, le=65535)]

FILES = ("certificate", "private_key", "client_certificates", "token_file")
"""Settings of the server that name a file, relative to the folder of theirs."""

_NOT_IN_FILES = frozenset(("calibration", "metrics", "pool", "progress", "run_times", "telemetry", "when_full"))


@settings
class ClusterConfig:
    """Replicas of a model on a Ray cluster; attributes are the arguments of `dagexec.cluster.deploy`."""

    replicas: Count = 1
    cores_per_replica: Count = 1
    max_outstanding: Count | None = None
    autoscaling: Autoscaling | None = None
    address: Text | None = None
    start_seconds: Seconds = 120.0
    answer_seconds: Seconds = 30.0


@settings
class SequenceConfig:
    """Sequences of a model's requests: each has a session, which holds memory between them.

    Attributes:
        states: the output that each input is fed in the next request of a sequence; by default what names tell.
        idle_seconds: after which a sequence without a request ends.
        max_open: sequences at one time; who begins another is refused.
        max_queued: requests of one sequence that may wait for those before them; beyond, they are refused.
    """

    states: Mapping[Text, Text] | None = None
    idle_seconds: Seconds = 60.0
    max_open: Count = 1000
    max_queued: Annotated[Whole, Field(ge=0)] = 100


@settings
class GenerationConfig:
    """How a model generates: each of its tokens is fed to its next run, in a session that keeps its caches.

    Attributes:
        input: is fed the prompt, then one token after another.
        output: the scores of the next token, the largest of which is taken, in the last row; or tokens, if it has whole
            numbers, the last of which is taken.
        mask: an input that is fed ones, as many as there are tokens so far, if the model has such.
        positions: an input that is fed the places of the tokens, counted from 0, if the model has such.
        stop: tokens after which there are no more.
        max_tokens: of one request, unless it asks for fewer.
    """

    input: Text
    output: Text
    mask: Text | None = None
    positions: Text | None = None
    stop: tuple[Whole, ...] = ()
    max_tokens: Count = 256


def _source(source: Any) -> Any:
    if isinstance(source, str | PathLike) and not str(source):
        raise ValueError("must name a file, a folder or zoo:NAME")
    return source


if TYPE_CHECKING:
    Source = ModelSource | None
    Options = CompileOptions
else:  # pydantic takes them as they are
    Source = Annotated[Any, AfterValidator(_source)]
    Options = InstanceOf[CompileOptions]


@settings
class ModelConfig:
    """A model to serve.

    Attributes:
        name: what clients call it.
        source: what `dagexec.compile` takes; or a folder with a folder for each version, named by a number, of which
            the one with the highest number is served (`Repository`). None for what an application adds ready to run.
        version: what clients call the version of a source without such folders.
        options: of `dagexec.compile`. Requests that find `max_queued` others waiting are refused.
        timeout: seconds that a request has at most, None for any time.
        priority: of its requests among those of all models, the highest first.
        priority_level: a request that asks for level p, where 1 is the most urgent, has `priority` increased by
            `priority_level` - p. With 1, the default, clients may only make way for others.
        cluster: replicas run the model on a Ray cluster, instead of an executor in the server's process.
        sequences: those of its requests, if it has states or caches.
        generation: how it generates; None if it does not.
    """

    name: Name
    source: Source
    version: Name = "1"
    options: Options = field(default_factory=lambda: CompileOptions(max_queued=MAX_QUEUED, when_full="reject"))
    timeout: Seconds | None = None
    priority: Whole = 0
    priority_level: Count = 1
    cluster: ClusterConfig | None = None
    sequences: SequenceConfig = field(default_factory=SequenceConfig)
    generation: GenerationConfig | None = None

    def changed(self, settings: Mapping[str, Any]) -> ModelConfig:
        """This configuration with other `settings`, as a file has them. Raises SettingError, which names the model."""
        try:
            return self._changed(dict(settings))
        except (DagexecError, TypeError, ValueError) as error:
            raise SettingError(f"model {self.name!r}: {error}") from error

    def _changed(self, settings: dict[str, Any]) -> ModelConfig:
        own = {one.name for one in fields(self)} - {"name", "options"}
        compiling = {one.name for one in fields(CompileOptions)} - _NOT_IN_FILES
        check_keys(settings, own | compiling)
        padding = settings.get("batch_padding")
        if padding is not None:
            settings["batch_padding"] = BatchPadding(**padding)
        compile_settings = {key: value for key, value in settings.items() if key in compiling}
        options = replace(self.options, **compile_settings) if compile_settings else self.options
        return replace(self, options=options, **{key: value for key, value in settings.items() if key in own})


@settings
class ServerConfig:
    """What a server serves, where, and up to which limits.

    Attributes:
        models: by name.
        name: of the server, in its metadata.
        host: the address to listen on.
        port: that of HTTP; 0 for any that is free.
        grpc_port: that of gRPC; 0 for any that is free, None for none.
        control: clients may load and unload models.
        control_settings: a client that loads a model may change its settings, within the limits.
        strict: a model that cannot be loaded at the start ends the server.
        drain_seconds: that running requests have when the server ends, or their model is replaced or unloaded.
        python_steps: pipelines of the file may have Python functions as stages, which are imported and called.
        telemetry: create an OpenTelemetry span for each run, under that which the client names (`traceparent`).
        page: serve a page at / that shows what the server does.
        shared_memory: keys of system shared memory that clients may register; `prefix*` for all that begin so.
        certificate, private_key: files in PEM with which the server speaks TLS, over HTTP and gRPC.
        client_certificates: a file with the authorities that sign clients' certificates, which all then need to have.
        token_file: a file with the token that requests have as `Authorization: Bearer TOKEN`, but for those of health.
        limits: of requests and connections.
    """

    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    name: Annotated[Text, Field(min_length=1)] = "dagexec"
    host: Annotated[Text, Field(min_length=1)] = "127.0.0.1"
    port: Port = 8000
    grpc_port: Port | None = None
    control: Flag = False
    control_settings: Flag = False
    strict: Flag = False
    drain_seconds: Annotated[Real, Field(ge=0)] = 30.0
    python_steps: Flag = False
    telemetry: Flag = False
    page: Flag = True
    shared_memory: tuple[Annotated[Text, Field(min_length=1)], ...] = ()
    certificate: File | None = None
    private_key: File | None = None
    client_certificates: File | None = None
    token_file: File | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Raises SettingError for certificates without their key."""
        if (self.certificate is None) != (self.private_key is None):
            raise SettingError("certificate and private_key are given together")
        if self.client_certificates is not None and self.certificate is None:
            raise SettingError("client_certificates need TLS: certificate and private_key")

    @property
    def certificates(self) -> Certificates | None:
        """Those for TLS, None without."""
        if self.certificate is None or self.private_key is None:
            return None
        return Certificates(self.certificate, self.private_key, self.client_certificates)

    def with_models(self, named: Sequence[str]) -> ServerConfig:
        """This configuration with models given as NAME=SOURCE, or as `zoo:NAME` alone. Raises SettingError."""
        models = dict(self.models)
        for text in named:
            name, equals, source = text.partition("=")
            if not equals:
                if not text.startswith(ZOO_PREFIX):
                    raise SettingError(f"{text!r:.80}: expected NAME=SOURCE, such as resnet=model.onnx")
                name, source = text.removeprefix(ZOO_PREFIX), text
            known = models.get(name)
            models[name] = ModelConfig(name=name, source=source) if known is None else replace(known, source=source)
        return replace(self, models=models)


def read_config(path: Path) -> ServerConfig:
    """The configuration in a TOML file; sources are relative to its folder. Raises SettingError, naming the file."""
    try:
        with path.open("rb") as file:
            tables = tomllib.load(file)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingError(f"{path}: {error}") from error
    try:
        return _config(tables, path.parent)
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error


def _config(tables: Mapping[str, Any], folder: Path) -> ServerConfig:
    check_keys(tables, {"server", "limits", "models", "pipelines"})
    server, models = _table(tables, "server"), _table(tables, "models")
    check_keys(server, {one.name for one in fields(ServerConfig)} - {"models", "limits"})
    served = {name: _model(name, _table(models, name), folder) for name in models}
    for pipeline in _pipelines(tables, folder, python_steps=server.get("python_steps") is True):
        if pipeline.name in served:
            raise SettingError(f"there are two models or pipelines {pipeline.name!r}")
        served[pipeline.name] = pipeline
    for one in FILES:
        if isinstance(server.get(one), str) and server[one]:
            server[one] = folder / server[one]
    return ServerConfig(**server, limits=Limits(**_table(tables, "limits")), models=served)


def _pipelines(tables: Mapping[str, Any], folder: Path, *, python_steps: bool) -> list[ModelConfig]:
    """Those of a list of tables: each describes a pipeline, and has the settings of a model besides its source."""
    listed = tables.get("pipelines", [])
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise SettingError("pipelines must be a list of tables: [[pipelines]]")
    found = []
    for table in listed:
        description = {key: value for key, value in table.items() if key in DESCRIPTION_KEYS}
        settings = {key: value for key, value in table.items() if key not in DESCRIPTION_KEYS}
        plain = ModelConfig(name=table.get("name", ""), source=DescribedPipeline(description, folder))
        if "source" in settings:
            raise SettingError(f"pipeline {plain.name!r}: it has stages in place of a source")
        if not python_steps:
            check_python_steps(description)
        found.append(plain.changed(settings))
    return found


def _table(tables: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = tables.get(name, {})
    if not isinstance(table, dict):
        raise SettingError(f"{name} must be a table")
    return table


def _model(name: str, table: Mapping[str, Any], folder: Path) -> ModelConfig:
    source = table.get("source")
    if not isinstance(source, str):
        raise SettingError(f"model {name!r}: source is missing: a file, a folder or zoo:NAME")
    if not source.startswith(ZOO_PREFIX):
        source = str(folder / source)
    return ModelConfig(name=name, source=source).changed({**table, "source": source})
