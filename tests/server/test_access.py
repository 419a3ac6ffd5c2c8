"""TLS, certificates of clients and a token, over HTTP and gRPC, with unmodified clients of Triton."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import tritonclient.grpc as over_grpc
import tritonclient.http as over_http
from geventhttpclient.response import HTTPConnectionClosed
from tritonclient.utils import InferenceServerException

from dagexec.errors import SettingError
from dagexec.server.config import ModelConfig, ServerConfig, read_config
from dagexec.server.run import Server
from tests.held import PATIENCE, doubled_model
from tests.server.serving import serving

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, ca.pem, and what it has signed: server.pem and client.pem, with keys; stranger.pem signs itself."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "stranger"):
        openssl("req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for name in ("server", "client"):
        openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
            "-out", f"{name}.pem", "-extfile", "names",
        )  # fmt: skip
    return folder


@contextmanager
def server_with(**settings: Any) -> Iterator[Server]:
    models = {"doubled": ModelConfig(name="doubled", source=doubled_model())}
    with serving(ServerConfig(models=models, grpc_port=0, **settings), loaded=False) as server:
        while not server.repository.is_ready():
            time.sleep(0.01)
        yield server


def infer(module: Any, client: Any, **keywords: Any) -> None:
    x = module.InferInput("x", [1, 3], "FP32")
    x.set_data_from_numpy(np.float32([[1, -2, 3]]))
    assert client.infer("doubled", [x], **keywords).as_numpy("y").tolist() == [[2, 0, 6]]


def http_client(server: Server, folder: Path, client: str = "") -> over_http.InferenceServerClient:
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    if client:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    return over_http.InferenceServerClient(
        server.url.removeprefix("https://"), ssl=True, ssl_context_factory=lambda: context
    )


def grpc_client(server: Server, folder: Path, client: str = "") -> over_grpc.InferenceServerClient:
    key = (folder / f"{client}.key").read_bytes() if client else None
    chain = (folder / f"{client}.pem").read_bytes() if client else None
    credentials = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes(), key, chain)
    return over_grpc.InferenceServerClient(server.grpc_address, creds=credentials)


@needs_openssl
def test_tls(folder: Path) -> None:
    with server_with(certificate=folder / "server.pem", private_key=folder / "server.key") as server:
        assert server.url.startswith("https://")
        with http_client(server, folder) as client:
            infer(over_http, client)
            infer(over_http, client)
        with grpc_client(server, folder) as client:
            infer(over_grpc, client)
        large = np.ones((100_000, 3), np.float32)  # the rest of whose body is received in place
        with http_client(server, folder) as client:
            x = over_http.InferInput("x", [100_000, 3], "FP32")
            x.set_data_from_numpy(large)
            np.testing.assert_array_equal(client.infer("doubled", [x]).as_numpy("y"), 2 * large)
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/v2", timeout=PATIENCE)
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url + "/v2", timeout=PATIENCE)  # who does not know the authority
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        headers = {"Connection": "close"}
        assert httpx.get(server.url + "/v2", verify=context, headers=headers, timeout=PATIENCE).status_code == 200


@needs_openssl
@pytest.mark.parametrize(("module", "client_of"), [(over_http, http_client), (over_grpc, grpc_client)])
def test_certificates_of_clients(folder: Path, module: Any, client_of: Callable[..., Any]) -> None:
    files = {name: folder / f"server.{kind}" for name, kind in (("certificate", "pem"), ("private_key", "key"))}
    with server_with(**files, client_certificates=folder / "ca.pem") as server:
        with client_of(server, folder, "client") as client:
            infer(module, client)
        for name in ("", "stranger"):
            with (
                client_of(server, folder, name) as client,
                pytest.raises((InferenceServerException, OSError, HTTPConnectionClosed)),
            ):
                infer(module, client)
        assert server.repository.loaded()[0].answered["success"][0] == 1


def test_a_token(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret-7\n")
    with server_with(token_file=tmp_path / "token") as server:
        with over_http.InferenceServerClient(server.url.removeprefix("http://")) as client:
            infer(over_http, client, headers={"Authorization": "Bearer secret-7"})
            assert client.is_server_live()
            assert client.is_server_ready()
            for headers in ({}, {"Authorization": "Bearer secret-8"}, {"Authorization": "secret-7"}):
                with pytest.raises(InferenceServerException, match="wants a token") as caught:
                    infer(over_http, client, headers=headers)
                assert caught.value.status() == "401"
                with pytest.raises(InferenceServerException, match="wants a token"):
                    client.get_model_metadata("doubled", headers=headers)
        assert httpx.get(f"{server.url}/metrics", timeout=PATIENCE).headers["www-authenticate"] == "Bearer"
        with over_grpc.InferenceServerClient(server.grpc_address) as client:
            infer(over_grpc, client, headers={"authorization": "Bearer secret-7"})
            assert client.is_server_live()
            assert client.is_server_ready()
            for headers in ({}, {"authorization": "Bearer secret"}):
                with pytest.raises(InferenceServerException, match="wants a token") as caught:
                    infer(over_grpc, client, headers=headers)
                assert caught.value.status() == "StatusCode.UNAUTHENTICATED"
        with grpc.insecure_channel(server.grpc_address) as channel:
            stream = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
            with pytest.raises(grpc.RpcError) as ended:
                list(stream(iter([b""]), timeout=PATIENCE))
            assert ended.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    for settings, wrong in (
        ({"certificate": "a"}, "together"),
        ({"private_key": "a"}, "together"),
        ({"client_certificates": "a"}, "need TLS"),
        ({"token_file": 3}, "token_file must be a file"),
    ):
        with pytest.raises(SettingError, match=wrong):
            ServerConfig(**settings)
    (tmp_path / "empty").write_text(" \n")
    for name in ("empty", "none"):
        with pytest.raises(SettingError, match="token"):
            Server(ServerConfig(token_file=tmp_path / name))
    (tmp_path / "serve.toml").write_text('[server]\ntoken_file = "token"\n')
    assert read_config(tmp_path / "serve.toml").token_file == tmp_path / "token"


async def test_certificates_that_are_not_there(tmp_path: Path) -> None:
    config = ServerConfig(port=0, certificate=tmp_path / "none", private_key=tmp_path / "none")
    with pytest.raises(SettingError, match="certificates"):
        await Server(config).run()
