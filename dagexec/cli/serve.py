"""`dagexec serve`: models over HTTP and gRPC, by the Open Inference Protocol."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dagexec.errors import DagexecError, SettingError
from dagexec.platform.extras import install_command
from dagexec.server.log import log_to

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


def serve_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            help="NAME=SOURCE, where SOURCE is a file, a folder of versions or zoo:NAME; or zoo:NAME alone."
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A TOML file with the server's settings and its models.")
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="The address to listen on; 127.0.0.1 by default.")] = None,
    port: Annotated[
        int | None, typer.Option("--port", help="Of HTTP; 8000 by default, 0 for any that is free.")
    ] = None,
    grpc_port: Annotated[int | None, typer.Option("--grpc-port", help="Of gRPC; without it there is none.")] = None,
    drain_seconds: Annotated[
        float | None, typer.Option("--drain-seconds", help="That running requests have at the end; 30 by default.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="End if a model cannot be loaded.")] = False,
    control: Annotated[bool, typer.Option("--control", help="Clients may load and unload models.")] = False,
    control_settings: Annotated[
        bool, typer.Option("--control-settings", help="Clients that load a model may change its settings.")
    ] = False,
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="A file in PEM, for TLS over HTTP and gRPC.")
    ] = None,
    private_key: Annotated[Path | None, typer.Option("--private-key", help="That of the certificate, in PEM.")] = None,
    client_certificates: Annotated[
        Path | None,
        typer.Option("--client-certificates", help="Authorities that sign those which clients then need, in PEM."),
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="A file with the token that requests need to have.")
    ] = None,
    telemetry: Annotated[
        bool, typer.Option("--telemetry", help="An OpenTelemetry span for each run, under the client's.")
    ] = False,
    no_page: Annotated[bool, typer.Option("--no-page", help="No page at / that shows what the server does.")] = False,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve models over HTTP, and gRPC, to clients of the Open Inference Protocol, until SIGTERM or SIGINT.

    Then running requests are finished, and new ones refused; a second signal ends those that run.
    """
    if log_level not in _LEVELS:
        raise SettingError(f"--log-level must be one of {', '.join(_LEVELS)}, not {log_level!r:.80}")
    given: dict[str, Any] = {
        "host": host,
        "port": port,
        "grpc_port": grpc_port,
        "drain_seconds": drain_seconds,
        "strict": strict or None,
        "control": control or None,
        "control_settings": control_settings or None,
        "certificate": certificate,
        "private_key": private_key,
        "client_certificates": client_certificates,
        "token_file": token_file,
        "telemetry": telemetry or None,
        "page": False if no_page else None,
    }
    try:
        from dagexec.server.config import ServerConfig, read_config
        from dagexec.server.run import Server
    except ImportError as error:
        raise DagexecError(f"serving needs {error.name}; install it with: {install_command('serve')}") from error
    read = ServerConfig() if config is None else read_config(config)
    read = replace(read, **{name: value for name, value in given.items() if value is not None})
    read = read.with_models(models or ())
    if not read.models:
        raise SettingError("there is nothing to serve: name models, as in resnet=model.onnx, or a --config with some")
    log_to(level=_LEVELS[log_level])
    status = asyncio.run(Server(read).run(signals=True))
    if status:
        raise typer.Exit(status)
