"""The drawing of faults of one line."""

import ast

import pytest

from tests import ROOT, mutants
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
        ("f = lambda b, c: g((b * c), 1)", {"f = lambda b, c: g((b / c), 1)", "f = lambda b, c: g((b * c), 2)"}),
        ("def f(b): return g(b, c)", {"def f(b): return b"}),
    ],
)
def test_the_faults_of_a_line(line, expected):
    faults = faults_in(f"import b\n{line}\n")
    assert {fault.new for fault in faults} == expected
    assert all((fault.line, fault.old) == (2, line) for fault in faults)


def test_faults_of_the_library_are_python_and_change_the_program():
    source = (ROOT / "jtrees/search/stage.py").read_text()
    lines, before = source.splitlines(), ast.dump(ast.parse(source))
    faults = faults_in(source)
    assert len(faults) > 10
    for fault in faults:
        changed = "\n".join([*lines[: fault.line - 1], fault.new, *lines[fault.line :]])
        assert ast.dump(ast.parse(changed)) != before


def test_the_tests_of_a_module_import_or_name_it_or_its_importers():
    assert "tests/test_recipes.py" in files_of("jtrees/search/monitor.py")
    assert files_of("jtrees/isotonic.py")[0] == "tests/test_isotonic.py"
    assert "tests/test_site.py" not in files_of("jtrees/isotonic.py")
    assert "tests/test_get.py" in files_of("jtrees/methods/annealed/result.py", 5)


def test_survivors_are_tried_again(tmp_path, monkeypatch):
    path, rows = tmp_path / "mutants.csv", [mutants.COLUMNS, ["# a comment"]]
    line = "if is_over or evaluated.element(2).host:"
    rows.append(["jtrees/search/stage.py", "1", line, line.replace("or", "and"), "", "3"])
    rows.append(["jtrees/search/stage.py", "1", "gone", "lost", "too long", "3"])
    rows.append(["jtrees/search/stage.py", "1", line, line, "tests/test_refined.py::test_a", "3"])
    path.write_text("".join(",".join(row) + "\n" for row in rows))

    def failure(tests, folder, seconds):
        assert line.replace("or", "and") in (folder / "jtrees/search/stage.py").read_text()
        return "tests/test_stage.py::test_b"

    monkeypatch.setattr(mutants, "first_failure", failure)
    mutants.main(["--out", str(path)])
    after = [row.split(",") for row in path.read_text().splitlines()]
    source = (ROOT / "jtrees/search/stage.py").read_text().splitlines()
    assert source[int(after[2][1]) - 1].strip() == line
    assert after[2][2:5] == [*rows[2][2:4], "tests/test_stage.py::test_b"]
    assert after[3][4] == "the line no longer exists"
    assert [after[0], after[1], after[4]] == [list(rows[0]), rows[1], rows[4]]
