"""The example that finds digits in an image, cuts them out and reads them: one net for all that examines nets."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dagexec
from dagexec.analysis import compare
from dagexec.scheduler.hazards import check_net
from dagexec.testing import detecting
from dagexec.tracing import Trace


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "read_digits.py"
    spec = importlib.util.spec_from_file_location("read_digits", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("device", "net_type"),
    [
        ("cpu", "dag"),
        pytest.param("cpu", "async_dag", marks=pytest.mark.slow),
        ("sim:0", "dag"),
        ("sim:0", "async_dag"),
    ],
)
def test_pages_are_read_and_the_pipeline_is_proved_and_watched(digits: ModuleType, net_type: Any, device: str) -> None:
    with dagexec.compile(digits.ocr(), net_type=net_type, device=device, num_workers=2) as executor:
        for seed in range(5):
            image, expected = digits.page(seed)
            with detecting() as detector:
                found = executor.run({"image": image}, trace=detector)
            assert found["text"].item().decode() == expected
        proof = check_net(executor.net(), 4)
    assert proof.holds


def test_the_pipeline_gives_the_bytes_of_its_steps_one_after_another(digits: ModuleType) -> None:
    with (
        dagexec.compile(digits.ocr(), net_type="dag", num_workers=2) as together,
        dagexec.compile(digits.detector()) as detect,
        dagexec.compile(digits.reader()) as read,
        dagexec.compile(digits.scale()) as weigh,
    ):
        for seed in range(3):
            image, _ = digits.page(seed)
            x = digits.prepare(image)
            crops = digits.crop(x, detect.run({"x": x})["maps"])
            text, ink = digits.write(read.run({"crops": crops})["digits"], weigh.run({"crops": crops})["ink"])
            found = together.run({"image": image})
            assert found["text"].item().decode() == text
            assert found["ink"].tobytes() == ink.tobytes()


def test_all_nets_agree_on_a_page(digits: ModuleType) -> None:
    assert compare(digits.ocr(), feeds={"image": digits.page(0)[0]}, repeat=1, workers=(2,)).agrees


def test_one_trace_shows_all_stages(digits: ModuleType, tmp_path: Path) -> None:
    with dagexec.compile(digits.ocr(), net_type="dag", num_workers=2) as executor:
        trace = Trace()
        executor.run({"image": digits.page(0)[0]}, trace=trace)
        trace.write(tmp_path / "trace.json")
    spans = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {span["args"]["operator"] for span in spans if span.get("cat") == "operator"}
    assert {name.partition("/")[0] for name in names} == {"prepare", "detect", "crop", "read", "weigh", "write"}
