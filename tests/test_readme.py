"""Every example of the README runs as it stands there, by itself."""

import ast
import inspect
from pathlib import Path
import re

import pytest

import jtrees

README = Path(__file__).parents[1] / "README.md"
FENCED = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# What takes more than some seconds, nearly all of it compilation, by a word of it that no other example has.
SLOW = {
    "load_diabetes": "GET as the paper has it, with ten starts and CART",
    "Polished": "three fits and a tuning",
    "vmap(loss": "a whole search under vmap",
    "run_bandit": "a stream of 20 000 rounds",
    "nnx.Module": "a network with a tree of depth 5, on digits",
}


def examples() -> list:
    """The blocks of Python that use the library, with the line on which each begins."""
    text, found = README.read_text(encoding="utf-8"), []
    for block in FENCED.finditer(text):
        if "jtrees" in (code := block[1]):
            line = text.count("\n", 0, block.start()) + 2
            slow = [pytest.mark.slow for word in SLOW if word in code]
            found.append(pytest.param(code, line, id=f"line {line}", marks=slow))
    return found


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("code", "line"), examples())
def test_examples_run(code, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # nothing that they write stays
    at_its_place = "\n" * (line - 1) + code  # so that a traceback names the line of the README
    exec(compile(at_its_place, str(README), "exec"), {"__name__": "__main__"})
    assert "nan" not in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("code", "line"), [pytest.param(*one.values, id=one.id) for one in examples()])
def test_examples_call_what_there_is(code, line):
    """The small sibling of those that are slow: names exist, and take what they are given."""
    called = 0
    for node in ast.walk(ast.parse(code)):
        whole = node.func if isinstance(node, ast.Call) else node
        if not isinstance(whole, ast.Attribute) or not re.fullmatch(r"jtrees(\.\w+)+", name := ast.unparse(whole)):
            continue
        thing = jtrees
        for part in name.split(".")[1:]:
            thing = getattr(thing, part)
        if isinstance(node, ast.Call):
            named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(thing).bind_partial(*node.args, **named)
            called += 1
    assert called or "from jtrees import" in code


def test_there_are_examples():
    found = examples()
    assert len(found) >= 5
    assert "jtrees.fit(" in found[0].values[0]
    assert all(sum(word in example.values[0] for example in found) == 1 for word in SLOW)
