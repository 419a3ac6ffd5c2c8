"""The record of what was measured on."""

import pytest

from dagexec.analysis.environment import environment


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["/somewhere/bin/dagexec", "compare", "my model.onnx"], "dagexec compare 'my model.onnx'"),
        (["/somewhere/dagexec/__main__.py", "compare", "zoo:lenet"], "dagexec compare zoo:lenet"),
        (["-c"], "-c"),
        ([""], "''"),
    ],
)
def test_the_command_is_what_somebody_would_type(
    words: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", words)
    assert environment()["command"] == command
