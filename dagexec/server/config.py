"""ServerConfig and ModelConfig: what is served and how, from a TOML file and the command line, checked once."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, fields, replace
from numbers import Real
from os import PathLike
from pathlib import Path
from typing import Any

from dagexec.cluster import Autoscaling
from dagexec.core.spelling import did_you_mean
from dagexec.errors import DagexecError, SettingError
from dagexec.executor.source.loading import ZOO_PREFIX, ModelSource
from dagexec.options import BatchPadding, CompileOptions
from dagexec.platform.records import dataclass
from dagexec.server.access import Certificates
from dagexec.server.described_pipeline import DESCRIPTION_KEYS, DescribedPipeline, check_python_steps
from dagexec.server.limits import Limits

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

FILES = ("certificate", "private_key", "client_certificates", "token_file")
"""Settings of the server that name a file, relative to the folder of theirs."""

_NOT_IN_FILES = frozenset(("calibration", "metrics", "pool", "progress", "run_times", "telemetry", "when_full"))


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Replicas of a model on a Ray cluster; attributes are the arguments of `dagexec.cluster.deploy`."""

    replicas: int = 1
    cores_per_replica: int = 1
    max_outstanding: int | None = None
    autoscaling: Autoscaling | None = None
    address: str | None = None
    start_seconds: float = 120.0
    answer_seconds: float = 30.0

    def __post_init__(self) -> None:
        """Raises SettingError for what is out of range."""
        for what in ("replicas", "cores_per_replica", "max_outstanding"):
            count = getattr(self, what)
            if (count is not None or what != "max_outstanding") and (not _is_whole(count) or count < 1):
                raise SettingError(f"{what} must be 1 or more, not {count!r:.80}")
        if self.address is not None and not isinstance(self.address, str):
            raise SettingError(f"address must be a text, not {self.address!r:.80}")
        for what in ("start_seconds", "answer_seconds"):
            seconds = getattr(self, what)
            if not _is_real(seconds) or not 0 < seconds < math.inf:
                raise SettingError(f"{what} must be more than 0, not {seconds!r:.80}")


@dataclass(frozen=True, kw_only=True)
class SequenceConfig:
    """Sequences of a model's requests: each has a session, which holds memory between them.

    Attributes:
        states: the output that each input is fed in the next request of a sequence; by default what names tell.
        idle_seconds: after which a sequence without a request ends.
        max_open: sequences at one time; who begins another is refused.
        max_queued: requests of one sequence that may wait for those before them; beyond, they are refused.
    """

    states: Mapping[str, str] | None = None
    idle_seconds: float = 60.0
    max_open: int = 1000
    max_queued: int = 100

    def __post_init__(self) -> None:
        """Raises SettingError for what is out of range."""
        states = self.states
        if states is not None and not (isinstance(states, Mapping) and _are_texts([*states, *states.values()])):
            raise SettingError(f"states must name an output for each input, not {states!r:.80}")
        if not _is_real(self.idle_seconds) or not 0 < self.idle_seconds < math.inf:
            raise SettingError(f"idle_seconds must be more than 0, not {self.idle_seconds!r:.80}")
        for what, least in (("max_open", 1), ("max_queued", 0)):
            count = getattr(self, what)
            if not _is_whole(count) or count < least:
                raise SettingError(f"{what} must be {least} or more, not {count!r:.80}")


@dataclass(frozen=True, kw_only=True)
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

    input: str
    output: str
    mask: str | None = None
    positions: str | None = None
    stop: Sequence[int] = ()
    max_tokens: int = 256

    def __post_init__(self) -> None:
        """Raises SettingError for what is out of range."""
        for what in ("input", "output", "mask", "positions"):
            name = getattr(self, what)
            if not isinstance(name, str) and (name is not None or what in ("input", "output")):
                raise SettingError(f"{what} must be a name, not {name!r:.80}")
        if not isinstance(self.stop, Sequence) or not all(map(_is_whole, self.stop)):
            raise SettingError(f"stop must be a list of tokens, not {self.stop!r:.80}")
        if not _is_whole(self.max_tokens) or self.max_tokens < 1:
            raise SettingError(f"max_tokens must be 1 or more, not {self.max_tokens!r:.80}")


@dataclass(frozen=True, kw_only=True)
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

    name: str
    source: ModelSource | None
    version: str = "1"
    options: CompileOptions = field(default_factory=lambda: CompileOptions(max_queued=MAX_QUEUED, when_full="reject"))
    timeout: float | None = None
    priority: int = 0
    priority_level: int = 1
    cluster: ClusterConfig | None = None
    sequences: SequenceConfig = field(default_factory=SequenceConfig)
    generation: GenerationConfig | None = None

    def __post_init__(self) -> None:
        """Raises SettingError for what is out of range."""
        _check_name("model", self.name)
        _check_name("version", self.version)
        if isinstance(self.source, str | PathLike) and not str(self.source):
            raise SettingError("source must name a file, a folder or zoo:NAME")
        if self.timeout is not None and (not _is_real(self.timeout) or not 0 < self.timeout < math.inf):
            raise SettingError(f"timeout must be more than 0 seconds, not {self.timeout!r:.80}")
        if not _is_whole(self.priority):
            raise SettingError(f"priority must be a whole number, not {self.priority!r:.80}")
        if not _is_whole(self.priority_level) or self.priority_level < 1:
            raise SettingError(f"priority_level must be 1 or more, not {self.priority_level!r:.80}")

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
        if (cluster := settings.get("cluster")) is not None:
            settings["cluster"] = _cluster(cluster)
        for name, kind in (("sequences", SequenceConfig), ("generation", GenerationConfig)):
            if name in settings:
                table = _table(settings, name)
                check_keys(table, {one.name for one in fields(kind)})
                settings[name] = kind(**table)
        compile_settings = {key: value for key, value in settings.items() if key in compiling}
        options = replace(self.options, **compile_settings) if compile_settings else self.options
        return replace(self, options=options, **{key: value for key, value in settings.items() if key in own})


@dataclass(frozen=True, kw_only=True)
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
        shared_memory: keys of system shared memory that clients may register; `prefix*` for all that begin so.
        certificate, private_key: files in PEM with which the server speaks TLS, over HTTP and gRPC.
        client_certificates: a file with the authorities that sign clients' certificates, which all then need to have.
        token_file: a file with the token that requests have as `Authorization: Bearer TOKEN`, but for those of health.
        limits: of requests and connections.
    """

    models: Mapping[str, ModelConfig] = field(default_factory=dict)
    name: str = "dagexec"
    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int | None = None
    control: bool = False
    control_settings: bool = False
    strict: bool = False
    drain_seconds: float = 30.0
    python_steps: bool = False
    telemetry: bool = False
    shared_memory: Sequence[str] = ()
    certificate: Path | None = None
    private_key: Path | None = None
    client_certificates: Path | None = None
    token_file: Path | None = None
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        """Raises SettingError for what is out of range."""
        if not isinstance(self.name, str) or not self.name:
            raise SettingError(f"name must be a text, not {self.name!r:.80}")
        if not isinstance(self.host, str) or not self.host:
            raise SettingError(f"host must be an address, not {self.host!r:.80}")
        for name in ("port", "grpc_port"):
            port = getattr(self, name)
            if port is None and name == "grpc_port":
                continue
            if not _is_whole(port) or not 0 <= port < 1 << 16:
                raise SettingError(f"{name} must be from 0 to 65535, not {port!r:.80}")
        for flag in ("control", "control_settings", "strict", "python_steps", "telemetry"):
            if not isinstance(getattr(self, flag), bool):
                raise SettingError(f"{flag} must be true or false, not {getattr(self, flag)!r:.80}")
        for name in FILES:
            path = getattr(self, name)
            if path is not None and (not isinstance(path, str | PathLike) or not str(path)):
                raise SettingError(f"{name} must be a file, not {path!r:.80}")
            object.__setattr__(self, name, None if path is None else Path(path))
        if (self.certificate is None) != (self.private_key is None):
            raise SettingError("certificate and private_key are given together")
        if self.client_certificates is not None and self.certificate is None:
            raise SettingError("client_certificates need TLS: certificate and private_key")
        if isinstance(self.shared_memory, str) or not _are_texts(self.shared_memory) or "" in self.shared_memory:
            raise SettingError(f"shared_memory must be a list of keys, not {self.shared_memory!r:.80}")
        object.__setattr__(self, "shared_memory", tuple(self.shared_memory))
        if not _is_real(self.drain_seconds) or not 0 <= self.drain_seconds < math.inf:
            raise SettingError(f"drain_seconds must be 0 or more, not {self.drain_seconds!r:.80}")

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
    limits = _table(tables, "limits")
    check_keys(server, {one.name for one in fields(ServerConfig)} - {"models", "limits"})
    check_keys(limits, {one.name for one in fields(Limits)})
    served = {name: _model(name, _table(models, name), folder) for name in models}
    for pipeline in _pipelines(tables, folder, python_steps=server.get("python_steps") is True):
        if pipeline.name in served:
            raise SettingError(f"there are two models or pipelines {pipeline.name!r}")
        served[pipeline.name] = pipeline
    for one in FILES:
        if isinstance(server.get(one), str) and server[one]:
            server[one] = folder / server[one]
    return ServerConfig(**server, limits=Limits(**limits), models=served)


def _pipelines(tables: Mapping[str, Any], folder: Path, *, python_steps: bool) -> list[ModelConfig]:
    """Those of a list of tables: each describes a pipeline, and has the settings of a model besides its source."""
    listed = tables.get("pipelines", [])
    if not isinstance(listed, list) or not all(isinstance(table, dict) for table in listed):
        raise SettingError("pipelines must be a list of tables: [[pipelines]]")
    found = []
    for table in listed:
        _check_name("pipeline", table.get("name"))
        description = {key: value for key, value in table.items() if key in DESCRIPTION_KEYS}
        settings = {key: value for key, value in table.items() if key not in DESCRIPTION_KEYS}
        if "source" in settings:
            raise SettingError(f"pipeline {table['name']!r}: it has stages in place of a source")
        if not python_steps:
            check_python_steps(description)
        plain = ModelConfig(name=table["name"], source=DescribedPipeline(description, folder))
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


def _cluster(table: object) -> ClusterConfig:
    """Raises SettingError."""
    if not isinstance(table, dict):
        raise SettingError("cluster must be a table")
    check_keys(table, {one.name for one in fields(ClusterConfig)})
    bounds = _table(table, "autoscaling")
    check_keys(bounds, {one.name for one in fields(Autoscaling)})
    return ClusterConfig(**{**table, "autoscaling": Autoscaling(**bounds) if "autoscaling" in table else None})


def check_keys(table: Mapping[str, Any], known: set[str]) -> None:
    """Raise SettingError for a key that is not known, with the one that was probably meant."""
    for key in table:
        if key not in known:
            raise SettingError(f"unknown key {key!r:.80}{did_you_mean(key, known)}")


def _check_name(what: str, name: object) -> None:
    """Names stand in paths of URLs."""
    if not isinstance(name, str) or not name or len(name) > 200 or not name.isprintable() or "/" in name:
        raise SettingError(f"a {what}'s name is a text of 1 to 200 characters without '/', not {name!r:.80}")


def _are_texts(values: Iterable[object]) -> bool:
    return all(isinstance(value, str) for value in values)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
