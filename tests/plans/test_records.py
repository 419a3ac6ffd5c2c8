"""Models and options as records: all that is data comes back, and what is something else is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dagexec import BatchPadding, CompileOptions, InputInfo, Model, NetDef, op
from dagexec.core.dtypes import HELD_TYPES, INT64, STRING
from dagexec.core.model import StageTypes
from dagexec.errors import ModelFormatError
from dagexec.plans.container import Container, DamagedError, Sections
from dagexec.plans.kept_options import DECIDED, RUNNING, options_of, options_record
from dagexec.plans.records import array_of, array_record, check_parameters, model_of, model_record

NET = NetDef(name="net", op=[op("Add", ["x", "w"], ["y"])], external_input=["x", "w"])
MODEL = Model(
    name="net",
    net=NET,
    init_net=NetDef(name="init"),
    parameters={"w": np.arange(6, dtype=np.float32).reshape(2, 3)},
    inputs={"x": InputInfo(INT64, (2, None)), "z": InputInfo(is_sequence=True, is_optional=True), "a": InputInfo()},
    outputs=("y",),
    texts=True,
    stages={"one": StageTypes({"b": InputInfo(STRING, ())}, ("c",))},
)


def kept(tmp_path: Path, record: Any, sections: Sections) -> tuple[Container, Any]:
    sections.write(tmp_path / "x", {"record": record})
    found = Container(tmp_path / "x")
    return found, found.plan["record"]


def test_a_model_comes_back(tmp_path: Path) -> None:
    sections = Sections()
    container, record = kept(tmp_path, model_record(MODEL, sections), sections)
    found = model_of(record, container)
    assert list(found.inputs) == list(MODEL.inputs)
    assert replace(found, parameters={}, folder=Path()) == replace(MODEL, parameters={})
    assert found.parameters["w"].tobytes() == MODEL.parameters["w"].tobytes()
    assert found.folder == tmp_path


@pytest.mark.parametrize("meta", HELD_TYPES, ids=str)
def test_arrays_of_all_types_and_strings_come_back(tmp_path: Path, meta: Any) -> None:
    values = [b"", b"one\0two", b"drei", b"\xff", b"5", b"6"] if meta is STRING else [0, 1, 0, 1, 1, 0]
    array = np.array(values, meta.numpy).reshape(3, 2).T
    sections = Sections()
    records = [array_record(one, sections) for one in (array, array[:0], array[0, 0:1].reshape(()))]
    container, found = kept(tmp_path, records, sections)
    for one, record in zip((array, array[:0], array[0, 0:1].reshape(())), found, strict=True):
        same = array_of(record, container)
        assert (same.dtype, same.shape, str(same.tolist())) == (one.dtype, one.shape, str(one.tolist()))


@pytest.mark.parametrize(
    "record",
    [
        ["float32", [3], 0],
        ["float32", [2, -1], 0],
        ["float32", [2, 2.0], 0],
        ["float32", [1] * 65, 0],
        ["float32", [1 << 62] * 8, 0],
        ["object", [2], 0],
        [[], [2], 0],
        ["string", [2], 0],
        ["string", [1 << 60], 0],
        ["float32", [2], 1],
        ["float32", [2]],
        None,
    ],
)
def test_an_array_that_does_not_fit_its_section_is_refused(tmp_path: Path, record: Any) -> None:
    sections = Sections()
    sections.add(np.ones(2, np.float32))
    container, found = kept(tmp_path, record, sections)
    with pytest.raises(DamagedError):
        array_of(found, container)


def test_strings_whose_lengths_go_back_are_refused(tmp_path: Path) -> None:
    sections = Sections()
    sections.add(np.array([5, 2**64 - 3], np.uint64).tobytes() + b"ab")
    container, found = kept(tmp_path, ["string", [2], 0], sections)
    with pytest.raises(DamagedError, match="2 strings in 18 bytes"):
        array_of(found, container)


@pytest.mark.parametrize(
    ("array", "is_seen"),
    [
        (np.ones(100_000, np.int64), True),
        (np.ones(100_000, np.int32), True),
        (np.ones(100_000, np.float32), False),
        (np.ones(100_000, np.int8), False),
    ],
    ids=["int64", "int32", "float32", "int8"],
)
def test_a_flipped_bit_is_seen_at_once_where_it_may_do_more_than_change_results(
    tmp_path: Path, array: np.ndarray, is_seen: bool
) -> None:
    model = replace(MODEL, parameters={"w": array})
    sections = Sections()
    _, record = kept(tmp_path, model_record(model, sections), sections)
    content = bytearray((tmp_path / "x").read_bytes())
    content[content.index(array.tobytes()) + 40] ^= 1
    (tmp_path / "x").write_bytes(content)
    damaged = Container(tmp_path / "x")
    if is_seen:
        with pytest.raises(ModelFormatError, match=r"x: .*hash"):
            model_of(record, damaged).parameters["w"]
    else:
        assert model_of(record, damaged).parameters["w"].tobytes() != array.tobytes()
    with pytest.raises(DamagedError, match="hash"):
        check_parameters(record, damaged)


OPTIONS = CompileOptions(
    net_type="dag", num_workers=2, replicas=3, dtype="bfloat16", layout="NCHW", keep=["b", "a"], shapes={"x": (1, 2)},
    operator_arguments={"shared_buffer": 1, "kernels": [1, 2], "name": "text"}, max_batch=4, batch_axes={"x": 0},
    batch_padding=BatchPadding({"x": 1}, "x", (2, 4)), warm_start={"x": [1, 2]}, max_wait=0.5, device="cpu",
    tuning_seconds=0.0,
)  # fmt: skip


def test_options_come_back() -> None:
    record = json.loads(json.dumps(options_record(OPTIONS)))
    again = options_of(record)
    assert json.loads(json.dumps(options_record(again))) == record
    for name in sorted((DECIDED | RUNNING) & record.keys()):
        assert json.dumps(options_record(again)[name]) == json.dumps(options_record(OPTIONS)[name])
    assert again.batch_padding == BatchPadding({"x": 1}, "x", [2, 4])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("optimize", 1),
        ("dtype", "float8"),
        ("net_type", "fast"),
        ("num_workers", 10**9),
        ("replicas", -1),
        ("replicas", True),
        ("keep", "abc"),
        ("shapes", {"x": "abc"}),
        ("shapes", {"x": [-1]}),
        ("operator_arguments", {"x": {}}),
        ("operator_arguments", {"x": [1, "a"]}),
        ("operator_arguments", {"x": None}),
        ("max_wait", "1"),
        ("batch_axes", [1]),
        ("batch_padding", {"axes": {}, "mask": "x"}),
        ("batch_padding", {"axes": {}, "mask": "x", "sizes": [1]}),
        ("warm_start", {"x": 1}),
        ("device", "nowhere"),
    ],
)
def test_options_out_of_range_are_refused(name: str, value: object) -> None:
    with pytest.raises(DamagedError):
        options_of(options_record(OPTIONS) | {name: value})


def test_other_options_are_refused() -> None:
    record = options_record(OPTIONS)
    with pytest.raises(DamagedError, match="expected an object of"):
        options_of(record | {"progress": "print"})
    record.pop("nan")
    with pytest.raises(DamagedError, match="expected an object of"):
        options_of(record)
