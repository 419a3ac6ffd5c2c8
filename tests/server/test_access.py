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
from dagexec.server import run
from dagexec.server.config import ModelConfig, ServerConfig, read_config
from dagexec.server.run import Server
from tests.command_line import Cli
from tests.held import PATIENCE, doubled_model
from tests.server.serving import serving

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates with openssl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two authorities, ca.pem and ca2.pem, and what they have signed, with keys: server.pem, client.pem and so on."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid")
    signs = ("-addext", "keyUsage=critical,keyCertSign")  # Python 3.13 asks for this and for the identifier
    for number in ("", "2"):
        ca = f"ca{number}"
        openssl("req", "-x509", *curve, *signs, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}")
        for name in (f"server{number}", f"client{number}"):
            openssl("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
            openssl(
                "x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key", "-CAcreateserial",
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


def http_client(
    server: Server, folder: Path, client: str = "", authority: str = "ca"
) -> over_http.InferenceServerClient:
    context = ssl.create_default_context(cafile=str(folder / f"{authority}.pem"))
    if client:
        context.load_cert_chain(folder / f"{client}.pem", folder / f"{client}.key")
    return over_http.InferenceServerClient(
        server.url.removeprefix("https://"), ssl=True, ssl_context_factory=lambda: context
    )


def grpc_client(
    server: Server, folder: Path, client: str = "", authority: str = "ca"
) -> over_grpc.InferenceServerClient:
    key = (folder / f"{client}.key").read_bytes() if client else None
    chain = (folder / f"{client}.pem").read_bytes() if client else None
    credentials = grpc.ssl_channel_credentials((folder / f"{authority}.pem").read_bytes(), key, chain)
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


@pytest.fixture
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers look for new files ten times a second, or more often."""
    monkeypatch.setattr(run, "_SWEEP_SECONDS", 0.01)
    monkeypatch.setattr(run, "_SWEEP_TICKS", 1)


def replace_file(target: Path, contents: Path) -> None:
    """At once, as those do who renew secrets."""
    shutil.copy(contents, target.with_suffix(".new"))
    target.with_suffix(".new").replace(target)


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_live(server: Server, context: ssl.SSLContext) -> bool:
    try:
        return httpx.get(f"{server.url}/v2/health/live", verify=context, timeout=PATIENCE).status_code == 200
    except httpx.HTTPError:
        return False


def refused(module: Any, client_of: Callable[..., Any], server: Server, folder: Path, *names: str) -> None:
    with (
        client_of(server, folder, *names) as client,
        pytest.raises((InferenceServerException, OSError, HTTPConnectionClosed)),
    ):
        infer(module, client)


BOTH = ((over_http, http_client), (over_grpc, grpc_client))


@needs_openssl
def test_certificates_of_clients_and_new_certificates(
    folder: Path, tmp_path: Path, looks_often: None, caplog: pytest.LogCaptureFixture
) -> None:
    used = {"certificate": "server.pem", "private_key": "server.key", "client_certificates": "ca.pem"}
    for name in used.values():
        shutil.copy(folder / name, tmp_path)
    with server_with(**{setting: tmp_path / name for setting, name in used.items()}) as server:
        with http_client(server, folder, "client") as before:
            infer(over_http, before)
            for module, client_of in BOTH:
                with client_of(server, folder, "client") as client:
                    infer(module, client)
                for name in ("", "client2"):
                    refused(module, client_of, server, folder, name)
            replace_file(tmp_path / "server.pem", folder / "server2.pem")  # whose key is not there yet
            until(lambda: "what was read before stays in use" in caplog.text)
            with http_client(server, folder, "client") as client:
                infer(over_http, client)
            replace_file(tmp_path / "server.key", folder / "server2.key")
            replace_file(tmp_path / "ca.pem", folder / "ca2.pem")
            context = ssl.create_default_context(cafile=str(folder / "ca2.pem"))
            context.load_cert_chain(folder / "client2.pem", folder / "client2.key")
            until(lambda: is_live(server, context))
            infer(over_http, before)  # its connection goes on
        for module, client_of in BOTH:
            with client_of(server, folder, "client2", "ca2") as client:
                infer(module, client)
            for names in (("client", "ca2"), ("client2", "ca")):
                refused(module, client_of, server, folder, *names)
        assert server.repository.loaded()[0].answered["success"][0] == 7


def test_a_new_token(tmp_path: Path, looks_often: None, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "token"
    file.write_text("first")
    with server_with(token_file=file) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:

        def may_ask(token: str) -> bool:
            return client.get("/v2", headers={"Authorization": f"Bearer {token}"}).status_code == 200

        assert may_ask("first")
        file.write_text("")  # being written
        until(lambda: "visible characters" in caplog.text)
        assert may_ask("first")
        file.write_text("second")
        until(lambda: may_ask("second"))
        assert not may_ask("first")
    assert caplog.text.count("visible characters") == 1


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


@pytest.mark.usefixtures("loggers_as_before")
def test_settings_that_make_no_sense(tmp_path: Path, cli: Cli) -> None:
    for options, wrong in (
        (("--certificate", "a"), "given together"),
        (("--client-certificates", "a"), "need TLS"),
        (("--token-file", str(tmp_path / "none")), "token_file"),
        (("--certificate", str(tmp_path / "none"), "--private-key", "b"), "certificates:"),
    ):
        status, _, error = cli("serve", "zoo:lenet", "--port", 0, *options)
        assert (status, wrong in error) == (2, True), error
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
