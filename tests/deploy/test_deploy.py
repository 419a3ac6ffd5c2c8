"""The image and the manifest agree with each other and with the server that they start; it is asked what they ask."""

from __future__ import annotations

import fnmatch
import json
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from dagexec.server.config import ServerConfig, read_config
from tests.cli.test_cli_serve import served

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
MANIFEST: dict[str, dict[str, Any]] = {
    one["kind"]: one for one in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
}
POD: dict[str, Any] = MANIFEST["Deployment"]["spec"]["template"]
CONTAINER: dict[str, Any] = POD["spec"]["containers"][0]


def instructions(text: str) -> list[tuple[str, str]]:
    """Of a Dockerfile, in order; lines that are continued are joined."""
    joined = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.MULTILINE))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line.strip())]


IMAGE = instructions(DOCKERFILE.read_text())
LAST_STAGE = dict(IMAGE[max(place for place, (name, _) in enumerate(IMAGE) if name == "FROM") :])


@pytest.fixture
def config(tmp_path: Path) -> ServerConfig:
    return read_config(configured(tmp_path))


def configured(folder: Path) -> Path:
    path = folder / "serve.toml"
    path.write_text(MANIFEST["ConfigMap"]["data"]["serve.toml"])
    return path


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("kind", MANIFEST)
def test_kubernetes_accepts_each_object(kind: str, version: str) -> None:
    kubernetes_validate.validate(MANIFEST[kind], version, strict=True)


def test_a_manifest_that_is_wrong_is_refused() -> None:
    with pytest.raises(kubernetes_validate.ValidationError, match="replica"):
        kubernetes_validate.validate(MANIFEST["Deployment"] | {"spec": {"replica": 1}}, "1.37", strict=True)


def test_objects_refer_to_each_other() -> None:
    labels = POD["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert MANIFEST[kind]["spec"]["selector"]["matchLabels"] == labels
    assert MANIFEST["Service"]["spec"]["selector"] == labels
    scaled = MANIFEST["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    deployment = MANIFEST["Deployment"]
    assert scaled == {
        "apiVersion": deployment["apiVersion"],
        "kind": "Deployment",
        "name": deployment["metadata"]["name"],
    }
    volumes = {volume["name"]: volume for volume in POD["spec"]["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == set(volumes)
    assert volumes["config"]["configMap"]["name"] == MANIFEST["ConfigMap"]["metadata"]["name"]
    ports = {port["name"] for port in CONTAINER["ports"]}
    assert {port["targetPort"] for port in MANIFEST["Service"]["spec"]["ports"]} == ports
    probes = [CONTAINER[f"{name}Probe"]["httpGet"]["port"] for name in ("readiness", "liveness", "startup")]
    assert set(probes) <= ports


def test_ports_are_those_of_the_configuration(config: ServerConfig) -> None:
    listening = [config.port, config.grpc_port]
    assert [port["containerPort"] for port in CONTAINER["ports"]] == listening
    assert [port["port"] for port in MANIFEST["Service"]["spec"]["ports"]] == listening
    assert POD["metadata"]["annotations"]["prometheus.io/port"] == str(config.port)
    in_image = read_config(DEPLOY / "serve.toml")
    assert [in_image.port, in_image.grpc_port] == listening
    assert LAST_STAGE["EXPOSE"].split() == [str(port) for port in listening]
    assert f"127.0.0.1:{in_image.port}/" in LAST_STAGE["HEALTHCHECK"]
    assert config.host == in_image.host == "0.0.0.0"


def test_a_pod_ends_after_its_server_has_drained(config: ServerConfig) -> None:
    before = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    needed = before + config.drain_seconds + config.limits.body_seconds
    assert POD["spec"]["terminationGracePeriodSeconds"] > needed


def test_a_pod_has_a_core_for_each_worker(config: ServerConfig) -> None:
    resources = CONTAINER["resources"]
    assert resources["requests"] == resources["limits"]
    (model,) = config.models.values()
    assert int(resources["limits"]["cpu"]) == model.options.num_workers
    mebibytes = int(resources["limits"]["memory"].removesuffix("Gi")) << 10
    assert config.limits.total_body_bytes < mebibytes << 20


def test_the_image_starts_the_server_as_another_user() -> None:
    assert LAST_STAGE["STOPSIGNAL"] == "SIGTERM"
    assert json.loads(LAST_STAGE["ENTRYPOINT"]) == ["dagexec", "serve"]  # no shell in between that keeps the signal
    assert json.loads(LAST_STAGE["CMD"]) == CONTAINER["args"]
    mounted = {mount["name"]: mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert CONTAINER["args"] == ["--config", f"{mounted['config']}/serve.toml"]
    assert LAST_STAGE["COPY"].split()[-2:] == ["deploy/serve.toml", CONTAINER["args"][-1]]
    context = POD["spec"]["securityContext"]
    assert LAST_STAGE["USER"] == f"{context['runAsUser']}:{context['runAsGroup']}"
    assert context["runAsUser"] > 0
    assert f"--uid {context['runAsUser']} " in LAST_STAGE["RUN"]
    (cache,) = re.findall(r"XDG_CACHE_HOME=(\S+)", LAST_STAGE["ENV"])
    assert CONTAINER["securityContext"]["readOnlyRootFilesystem"] is True
    assert cache.startswith(mounted["temporary"])


def test_what_the_image_copies_and_installs_is_there() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sent = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copied = [path for name, rest in IMAGE if name == "COPY" and "--from" not in rest for path in rest.split()[:-1]]
    assert sorted(copied) == sorted(sent)
    for path in copied:
        assert (ROOT / path).exists()
    for link in (path for path in (ROOT / "dagexec").iterdir() if path.is_symlink()):
        assert link.resolve().relative_to(ROOT).parts[0] in copied
    project = (ROOT / "pyproject.toml").read_text()
    (extras,) = re.findall(r'"\.\[(.*)\]"', DOCKERFILE.read_text())
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
    assert fnmatch.fnmatch(IMAGE[0][1], "python:3.1?-slim-* AS build")


@pytest.mark.skipif(shutil.which("hadolint", path=Path(sys.executable).parent) is None, reason="needs hadolint")
def test_hadolint_finds_nothing() -> None:
    found = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), DOCKERFILE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.slow
def test_a_server_with_this_configuration_answers_probes_and_drains(tmp_path: Path) -> None:
    arguments = [configured(tmp_path) if "serve.toml" in text else text for text in CONTAINER["args"]]
    with served(*arguments, "--host", "127.0.0.1", "--grpc-port", "0") as server:
        url = server.wait_for(r"serving lenet.* at (http\S+)")[1]
        for name in ("readiness", "liveness", "startup"):
            assert answered(url + CONTAINER[f"{name}Probe"]["httpGet"]["path"]) == 200
        assert answered(url + POD["metadata"]["annotations"]["prometheus.io/path"]) == 200
        python, *check = json.loads(LAST_STAGE["HEALTHCHECK"].partition("CMD ")[2])
        assert python == "python"
        check[-1] = check[-1].replace("http://127.0.0.1:8000", url)
        assert subprocess.run([sys.executable, *check], timeout=60, check=False).returncode == 0
        server.process.terminate()
        assert server.end() == 0
    failed = subprocess.run([sys.executable, *check], capture_output=True, timeout=60, check=False)
    assert failed.returncode != 0


def answered(url: str) -> int:
    with urllib.request.urlopen(url, timeout=60) as answer:
        return int(answer.status)
