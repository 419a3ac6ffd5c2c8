"""What a model from a file may reach: databases in its own folder, and nothing else unless the caller allows it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import dagexec
from dagexec.core.io_access import IO
from dagexec.core.proto import NetDef, OperatorDef
from dagexec.core.registry import schema_of
from dagexec.core.workspace import Workspace
from dagexec.errors import AccessError
from dagexec.storage.net_file import save_net
from dagexec.training.task import task_workspace
from tests.command_line import Cli
from tests.ops.running import operator_def

X = np.arange(4, dtype=np.float32)


def saving(path: Path) -> NetDef:
    save = operator_def("Save", ["y"], [], db=str(path), absolute_path=1)
    return NetDef(name="saving", op=[operator_def("Relu", ["x"], ["y"]), save], external_input=["x"])


def loading(db: str, **arguments: object) -> OperatorDef:
    return operator_def("Load", [], ["w"], db=db, **arguments)  # type: ignore[arg-type]


def folder_model(folder: Path, load: OperatorDef) -> Path:
    """A model in `folder` whose init net is `load`."""
    folder.mkdir(exist_ok=True)
    save_net(NetDef(name="init", op=[load]), folder / "init_net.pb")
    add = operator_def("Add", ["x", "w"], ["y"])
    net = NetDef(name="predict", op=[add], external_input=["x", "w"], external_output=["y"])
    save_net(net, folder / "predict_net.pb")
    return folder


def save_weights(folder: Path, name: str = "weights") -> None:
    workspace = Workspace(root_folder=folder)
    workspace.feed_blob("w", X)
    workspace.run_operator_once(operator_def("Save", ["w"], [], db=name))


@pytest.mark.parametrize("optimize", [True, False])
def test_a_model_may_not_overwrite_a_file_unless_it_is_allowed(tmp_path: Path, optimize: bool) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with pytest.raises(AccessError, match=r"Save .*it writes files, which a model is not allowed to do.*allow_io=True"):
        dagexec.compile(saving(precious), optimize=optimize)
    assert precious.read_text() == "mine"
    with dagexec.compile(saving(precious), optimize=optimize, allow_io=True) as executor:
        executor.run({"x": X})
    assert precious.read_bytes() != b"mine"


def test_a_workspace_refuses_it_too_and_so_do_its_children(tmp_path: Path) -> None:
    for workspace in (Workspace(), Workspace(Workspace())):
        workspace.feed_blob("x", X)
        with pytest.raises(AccessError):
            workspace.run_net_once(saving(tmp_path / "db"))
        with pytest.raises(AccessError):
            workspace.create_net(saving(tmp_path / "db"), "dag")
    allowed = Workspace(Workspace(allow_io=True))
    allowed.feed_blob("x", X)
    allowed.run_net_once(saving(tmp_path / "db"))
    assert (tmp_path / "db").exists()
    assert Workspace(allowed, allow_io=False).allow_io is IO.NONE


def test_the_command_refuses_it_unless_it_is_allowed(tmp_path: Path, cli: Cli) -> None:
    save_net(saving(tmp_path / "db"), tmp_path / "net.pb")
    command = ["run", str(tmp_path / "net.pb"), "--shape", "x=4", "--json"]
    status, _, errors = cli(*command)
    assert status == 2
    assert "AccessError" in errors
    assert not (tmp_path / "db").exists()
    assert cli(*command, "--allow-io")[0] == 0
    assert (tmp_path / "db").exists()


def test_an_init_net_loads_what_lies_in_its_own_folder(tmp_path: Path) -> None:
    folder = folder_model(tmp_path / "model", loading("weights"))
    save_weights(folder)
    with dagexec.compile(folder) as executor:
        np.testing.assert_array_equal(executor.run({"x": X})["y"], 2 * X)


@pytest.mark.parametrize("way", ["parent", "absolute", "absolute_path", "link", "link to a folder"])
def test_an_init_net_loads_nothing_from_elsewhere(tmp_path: Path, way: str) -> None:
    save_weights(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "weights")
    (folder / "up").symlink_to(tmp_path)
    elsewhere = str(tmp_path / "weights")
    load = {
        "parent": loading("../weights"),
        "absolute": loading(elsewhere),
        "absolute_path": loading(elsewhere, absolute_path=1),
        "link": loading("link"),
        "link to a folder": loading("up/weights"),
    }[way]
    folder_model(folder, load)
    with pytest.raises(AccessError, match=r"Load .*is outside the folder"):
        dagexec.compile(folder)
    with dagexec.compile(folder, allow_io=True) as executor:
        np.testing.assert_array_equal(executor.run({"x": X})["y"], 2 * X)


def test_a_database_that_is_a_folder_has_no_links_out_of_it(tmp_path: Path) -> None:
    pytest.importorskip("lmdb")
    workspace = Workspace(root_folder=tmp_path)
    workspace.feed_blob("w", X)
    workspace.run_operator_once(operator_def("Save", ["w"], [], db="weights", db_type="lmdb"))
    folder = folder_model(tmp_path / "model", loading("weights", db_type="lmdb"))
    (folder / "weights").mkdir()
    (folder / "weights" / "data.mdb").symlink_to(tmp_path / "weights" / "data.mdb")
    with pytest.raises(AccessError, match="is outside the folder"):
        dagexec.compile(folder)


def test_a_model_may_not_write_in_its_own_folder(tmp_path: Path) -> None:
    folder = folder_model(tmp_path / "model", operator_def("Save", ["x"], [], db="init_net.pb"))
    before = (folder / "init_net.pb").read_bytes()
    with pytest.raises(AccessError, match="it writes files"):
        dagexec.compile(folder)
    assert (folder / "init_net.pb").read_bytes() == before


def test_a_training_reads_and_writes_where_it_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    workspace = task_workspace(allow_io=False)
    workspace.feed_blob("w", X)
    workspace.run_operator_once(operator_def("Save", ["w"], [], db="here"))
    assert (tmp_path / "here").exists()
    with pytest.raises(AccessError, match="is outside the folder"):
        workspace.run_operator_once(operator_def("Save", ["w"], [], db="../there"))
    assert task_workspace(allow_io=True).allow_io is IO.ANY


def test_no_name_of_a_file_gets_out_of_the_folder(tmp_path: Path) -> None:
    workspace = Workspace(root_folder=tmp_path / "in")
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "loop").symlink_to("loop")
    for name in ("../x", "/etc/passwd", "a/../../x", "loop", "a\0b", os.fspath(tmp_path)):
        with pytest.raises(AccessError):
            workspace.place(name, owner="this")
    assert workspace.place("a/../b", owner="this") == tmp_path / "in" / "a/../b"


def test_the_help_of_an_operator_says_what_it_reaches() -> None:
    assert "writes files: only where that is allowed" in schema_of("Save").help()
    assert "allowed" not in schema_of("Relu").help()
