"""Modules of operators are imported when a type is asked for: those that it needs, and the file says which."""

from __future__ import annotations

import subprocess
import sys

import pytest

from dagexec.core import operator_index


def fresh(program: str, *arguments: str) -> str:
    """What `program` prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_the_file_says_what_the_modules_register() -> None:
    assert fresh("from tests.operator_index import made_anew; print(made_anew(), end='')") == (
        operator_index.index_file().read_text()
    ), "write it again: python -m tests.operator_index"


def test_what_a_net_does_not_use_is_not_imported() -> None:
    program = """if True:
        import sys
        import dagexec
        before = {name for name in sys.modules if name.startswith("dagexec.ops.")}
        assert dagexec.core.registry.schema_of("CumSum").type == "CumSum"
        assert "dagexec.ops.families.conv.convolution" not in sys.modules
        assert "dagexec.ops.families.recurrent" not in sys.modules
        print(len(before))
    """
    assert int(fresh(program)) < 60  # of 350


@pytest.mark.slow
def test_a_type_that_the_file_lacks_is_found_all_the_same() -> None:
    program = """if True:
        import dagexec
        from dagexec.core import operator_index, registry
        del operator_index._index()["types"]["Relu"], operator_index._index()["onnx"][""]["Celu"]
        print(registry.schema_of("Relu").type, registry.onnx_operator("", "Celu")[0].type)
    """
    assert fresh(program).split() == ["Relu", "Celu"]


@pytest.mark.slow
def test_an_unknown_type_is_told_what_is_near_among_those_not_imported() -> None:
    program = """if True:
        import dagexec
        from dagexec.core import registry
        from dagexec.errors import UnsupportedOperatorError
        try:
            registry.schema_of("CumSun")
        except UnsupportedOperatorError as error:
            print(error)
    """
    assert "CumSum" in fresh(program)


EACH_ALONE = """if True:
    import importlib
    import sys
    import dagexec
    from dagexec.core import gradient, operator_index, registry
    from tests.forked import in_child

    part, parts = map(int, sys.argv[1:])

    def entries(name):
        engines = sorted(key[2] for key in registry._operators if key[:2] == ("cpu", name))
        return engines, name in gradient._makers, name in gradient._refusals

    def alone(name):
        gradient.has_maker(name)
        return entries(name)

    def all_together():
        operator_index.load_all()
        return {name: entries(name) for name in operator_index.known_types()}

    expected = in_child(all_together)
    index = operator_index._index()
    alike = {(*modules, -1, *index["gradients"].get(name, ())): name for name, modules in index["types"].items()}
    for name in list(alike.values())[part::parts]:
        found = in_child(lambda: alone(name))
        assert found == expected[name], (name, found, expected[name])
    modules = operator_index._modules(operator_index.PACKAGE)
    for module in modules[part::parts]:
        found = in_child(lambda: importlib.import_module(module).__name__)
        assert found == module, found
    print(len(alike), len(modules))
"""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_each_type_has_all_its_engines_and_its_gradient_whichever_is_asked_for_first(part: int) -> None:
    types, modules = map(int, fresh(EACH_ALONE, str(part), "8").split())
    assert types > 100
    assert modules > 300
