"""The drawing of faults of one line."""

import ast

import pytest

from tests import ROOT
from tests.mutants import faults_in, tests_of as files_of


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a = (b + c) < d", {"a = (b - c) < d", "a = (b + c) <= d"}),
        ("a = b and not c", {"a = b or not c", "a = b and c"}),
        ("a = f(b, é=1, d=c)", {"a = f(b, d=c)", "a = f(b, é=1, )", "a = f(b, é=2, d=c)"}),
        ("a = True", {"a = False"}),
        ("a = 'b' is not None", {"a = 'b' is None"}),
        ("a = 'b < c'  # d < e", set()),
    ],
)
def test_the_faults_of_a_line(line, expected):
    faults = faults_in(f"import b\n{line}\n")
    assert {fault.new for fault in faults} == expected
    assert all((fault.line, fault.old) == (2, line) for fault in faults)


def test_a_returned_value_is_replaced_by_an_operand():
    faults = faults_in("def f(b, c):\n    return g((b * c), 1)\n")
    assert {fault.new for fault in faults} >= {
        "    return b * c",
        "    return g((b / c), 1)",
        "    return g((b * c), 2)",
    }


def test_faults_of_the_library_are_python_and_change_the_program():
    source = (ROOT / "jtrees/search/stage.py").read_text()
    lines, before = source.splitlines(), ast.dump(ast.parse(source))
    faults = faults_in(source)
    assert len(faults) > 10
    for fault in faults:
        changed = "\n".join([*lines[: fault.line - 1], fault.new, *lines[fault.line :]])
        assert ast.dump(ast.parse(changed)) != before


def test_the_tests_of_a_module_import_or_name_it():
    assert "tests/test_recipes.py" in files_of("jtrees/search/monitor.py")
    assert files_of("jtrees/isotonic.py")[0] == "tests/test_isotonic.py"
    assert "tests/test_site.py" not in files_of("jtrees/isotonic.py")
