"""What is wrong in a configuration is said at once, with the place."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest

from dagexec.cluster import Autoscaling
from dagexec.errors import SettingError
from dagexec.options import BatchPadding
from dagexec.server.config import MAX_QUEUED, ClusterConfig, ModelConfig, SequenceConfig, ServerConfig, read_config
from dagexec.server.limits import Limits

ROOT = Path(__file__).parents[2]


def written(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text)
    return path


def test_a_file_says_what_is_served_and_how(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [server]
        port = 0
        drain_seconds = 5
        [models.resnet]
        source = "models/resnet"
        replicas = 2
        max_batch = 8
        timeout = 1.5
        priority = 2
        shapes = { data = [1, 3, 224, 224] }
        [models.text]
        source = "text.onnx"
        version = "v3"
        max_queued = 7
        max_batch = 4
        batch_padding = { axes = { ids = 1 }, mask = "ids", sizes = [16, 32] }
        [models.lenet]
        source = "zoo:lenet"
        """,
    )
    config = read_config(path)
    assert (config.port, config.drain_seconds, config.host) == (0, 5, "127.0.0.1")
    resnet, text, lenet = config.models.values()
    assert resnet.source == str(tmp_path / "models/resnet")
    assert (resnet.options.replicas, resnet.options.max_batch, resnet.options.max_queued) == (2, 8, MAX_QUEUED)
    assert (resnet.timeout, resnet.priority, resnet.version) == (1.5, 2, "1")
    assert (text.version, text.options.max_queued, text.options.when_full) == ("v3", 7, "reject")
    assert text.options.batch_padding == BatchPadding({"ids": 1}, mask="ids", sizes=[16, 32])
    assert lenet == ModelConfig(name="lenet", source="zoo:lenet")


def test_a_model_may_be_served_by_replicas_on_a_cluster(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        """
        [models.lenet]
        source = "zoo:lenet"
        cluster = { replicas = 2, cores_per_replica = 4 }
        [models.busy]
        source = "zoo:lenet"
        [models.busy.cluster.autoscaling]
        min_replicas = 1
        max_replicas = 3
        """,
    )
    lenet, busy = read_config(path).models.values()
    assert lenet.cluster == ClusterConfig(replicas=2, cores_per_replica=4)
    assert busy.cluster == ClusterConfig(autoscaling=Autoscaling(min_replicas=1, max_replicas=3))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[server]\nprot = 1", "unknown key 'prot'; did you mean 'port'"),
        ("[server]\nport = 70000", "port must be less than or equal to 65535, not 70000"),
        ("[server]\nport = true", "port must be"),
        ("[server]\ndrain_seconds = nan", "drain_seconds must be"),
        ("[server]\nstrict = 1", "strict must be a valid boolean, not 1"),
        ("[models.m]\nreplicas = 2", "model 'm': source is missing"),
        ("[models.m]\nsource = ''\nmax_bach = 2", "model 'm': unknown key 'max_bach'; did you mean 'max_batch'"),
        ("[models.m]\nsource = 'm'\nreplicas = 0", "model 'm': at least 1 replica"),
        ("[models.m]\nsource = 'm'\nreplicas = 'two'", "model 'm': at least 1 replica"),
        ("[models.m]\nsource = 'm'\ntimeout = 0", "model 'm': timeout must be greater than 0, not 0"),
        (
            "[models.m]\nsource = 'm'\npriority_level = 0",
            "model 'm': priority_level must be greater than or equal to 1, not 0",
        ),
        ("[models.m]\nsource = 'm'\nwhen_full = 'wait'", "model 'm': unknown key 'when_full'"),
        ("[models.m]\nsource = 'm'\nbatch_padding = {ax = 1}", "model 'm': .*batch_padding|model 'm'"),
        ("[models.m]\nsource = 'm'\ncluster = 2", "model 'm': cluster must be a table"),
        (
            "[models.m]\nsource = 'm'\ncluster = {replica = 2}",
            "model 'm': unknown key 'replica'; did you mean 'replicas'",
        ),
        (
            "[models.m]\nsource = 'm'\ncluster = {replicas = 0}",
            "model 'm': cluster.replicas must be greater than or equal to 1, not 0",
        ),
        (
            "[models.m]\nsource = 'm'\ncluster = {max_outstanding = true}",
            "model 'm': cluster.max_outstanding must be a valid integer, not True",
        ),
        (
            "[models.m]\nsource = 'm'\ncluster = {address = 7}",
            "model 'm': cluster.address must be a valid string, not 7",
        ),
        (
            "[models.m]\nsource = 'm'\ncluster = {start_seconds = 0}",
            "model 'm': cluster.start_seconds must be greater than 0, not 0",
        ),
        (
            "[models.m]\nsource = 'm'\ncluster = {answer_seconds = 0}",
            "model 'm': cluster.answer_seconds must be greater than 0, not 0",
        ),
        (
            "[models.m]\nsource = 'm'\ncluster.autoscaling = {min_replicas = 3, max_replicas = 2}",
            "model 'm': autoscaling: 1 <= min_replicas <= max_replicas",
        ),
        (
            "[models.m]\nsource = 'm'\ncluster.autoscaling = {min_replicas = 3}",
            "model 'm': cluster.autoscaling.max_replicas is missing",
        ),
        (
            "[models.m]\nsource = 'm'\ncluster.autoscaling = {min_replica = 1, max_replicas = 2}",
            "model 'm': unknown key 'min_replica'; did you mean 'min_replicas'",
        ),
        ("[models.m]\nsource = 'm'\nsequences = {max_queued = -1}", "sequences.max_queued must be .* 0, not -1"),
        ("[models.m]\nsource = 'm'\ngeneration = {input = 'x'}", "model 'm': generation.output is missing"),
        ("[limits]\naxes = 0", "axes must be greater than or equal to 1, not 0"),
        ("[models.'a/b']\nsource = 'm'", "name must be 1 to 200 printable characters without '/', not 'a/b'"),
        ("models = 3", "models must be a table"),
        ("[server\n", "serve.toml: "),
    ],
)
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message) as caught:
        read_config(written(tmp_path, text))
    assert str(caught.value).startswith(str(tmp_path / "serve.toml"))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none\.toml"):
        read_config(tmp_path / "none.toml")


def test_models_on_the_command_line_add_to_the_file(tmp_path: Path) -> None:
    config = ServerConfig(models={"a": ModelConfig(name="a", source="old.onnx", timeout=3)})
    changed = config.with_models(["a=new.onnx", "b=c=d.onnx", "zoo:lenet"])
    assert changed.models["a"] == ModelConfig(name="a", source="new.onnx", timeout=3)
    assert changed.models["b"].source == "c=d.onnx"
    assert changed.models["lenet"].source == "zoo:lenet"
    for text in ("model.onnx", "=model.onnx", "a="):
        with pytest.raises(SettingError):
            config.with_models([text])


def test_the_settings_of_the_documentation_are_read_and_say_the_defaults(tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(\[server\].*?)```", (ROOT / "docs" / "serving.md").read_text(), re.DOTALL)
    config = read_config(written(tmp_path, text))
    assert config.limits == Limits()
    limits = text.partition("[limits]")[2].partition("[models")[0]
    assert {one.name for one in fields(Limits)} == set(re.findall(r"^(\w+) = ", limits, re.MULTILINE))
    assert replace(config, models={}, grpc_port=None) == ServerConfig()
    assert config.models["gpt"].sequences == SequenceConfig()
    assert config.models["gpt"].generation is not None
    resnet = config.models["resnet"]
    assert (resnet.timeout, resnet.priority, resnet.options.max_batch) == (2.0, 10, 8)
