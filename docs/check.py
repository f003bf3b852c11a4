"""Checks of ``make docs`` around the build: the docstrings before the build, and the finished site after it.

``python docs/check.py docstrings`` checks that every option of a recipe has a line, and that every example in a
docstring runs. It also checks that no required example is missing, and that every block of Python in a page is
executed. No table of a page may be wrapped into a paragraph.

``python docs/check.py site FOLDER`` checks that every public name has an entry. Sphinx itself checks links, anchors,
references and images.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import doctest
import importlib
import inspect
from pathlib import Path
import re
import sys
import tempfile
import types
from typing import Any, TypeVar
import warnings
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import jtrees

DOCS = Path(__file__).parent
MODULES = (
    *(
        "",
        "data",
        "distributed",
        "estimators",
        "explain",
        "export",
        "io",
        "isotonic",
        "leaves",
        "losses",
        "methods",
        "nn",
        "ops",
    ),
    *("plotting", "pytree", "report", "routing", "search", "search.options", "selection", "sharding"),
    *("tasks", "topology", "training", "warmstart"),
)
# Names that examples use without an import. The reference lists them.
GIVEN = {"jax": jax, "jnp": jnp, "np": np, "jtrees": jtrees}
# Modules in which each function needs an example. Every recipe also needs one.
WITH_EXAMPLES = ("estimators", "explain", "export", "isotonic", "leaves", "routing", "selection")
# Names that still lack an example. Never add a name. Remove a name when it has an example.
WITHOUT_EXAMPLE: set[str] = set()


def public(module: str) -> Iterator[tuple[str, Any]]:
    """Yields the public names of a module of jtrees, and their objects.

    The public names of a package are the names that it imports. The public names of a single file are the names in
    its ``__all__``, or all names that it defines.
    """
    full = f"jtrees.{module}".rstrip(".")
    imported = importlib.import_module(full)
    package = hasattr(imported, "__path__")
    listed = dir(imported) if package else getattr(imported, "__all__", vars(imported))
    for name in list(listed):
        value = getattr(imported, name)
        home = getattr(value, "__module__", None) or ""
        is_public = home.startswith("jtrees.") if package else home == full
        is_public &= module != "leaves" or home.startswith(full)  # names that leaves imports are public elsewhere
        if not name.startswith("_") and not isinstance(value, (types.ModuleType, TypeVar)) and is_public:
            yield f"{full}.{name}", value


# --- Docstrings -------------------------------------------------------------------------------------------------------


def recipes() -> dict[str, Any]:
    """Returns the public recipes by name."""
    return {
        name: value
        for name, value in public("")
        if inspect.isclass(value) and issubclass(value, jtrees.Recipe) and value is not jtrees.Recipe
    }


def options_without_a_line() -> list[str]:
    """Returns the faults of the options in the docstrings of recipes."""
    wrong = []
    for name, recipe in recipes().items():
        _, _, section = (inspect.getdoc(recipe) or "").partition("\nAttributes:\n")
        described = set(re.findall(r"^  (\w+): \S", section, re.MULTILINE))
        declared = {field.name for field in dataclasses.fields(recipe)}
        lacking, gone = sorted(declared - described), sorted(described - declared)
        wrong += [f"{name}: the option {option} has no line under Attributes" for option in lacking]
        wrong += [f"{name}: {option} is described and is no option" for option in gone]
    return wrong


def wanting_examples() -> dict[str, Any]:
    """Returns the names that need an example: recipes, and functions and estimators of some modules."""
    functions = {
        name: value
        for module in WITH_EXAMPLES
        for name, value in public(module)
        if inspect.isfunction(inspect.unwrap(value)) or name.endswith(("Regressor", "Classifier"))
    }
    return recipes() | functions


def names_without_example() -> list[str]:
    """Returns the names that lack an example, and the names in WITHOUT_EXAMPLE that have an example."""
    lacking = {name for name, value in wanting_examples().items() if ">>>" not in (inspect.getdoc(value) or "")}
    wrong = [f"{name} has no example in its docstring" for name in sorted(lacking - WITHOUT_EXAMPLE)]
    return wrong + [f"{name} has an example: take it out of WITHOUT_EXAMPLE" for name in WITHOUT_EXAMPLE - lacking]


def failing_examples() -> list[str]:
    """Runs every example in a docstring of the library and returns the failures.

    Each example runs separately, in a temporary folder.
    """
    finder, wrong, done = doctest.DocTestFinder(), [], set()
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    runner = doctest.DocTestRunner(optionflags=flags, verbose=False)
    jax.config.update("jax_compilation_cache_dir", str(DOCS.parent / "build" / "docs-programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    for module in MODULES:
        importlib.import_module(f"jtrees.{module}".rstrip("."))
    modules = [name for name in sorted(sys.modules) if name.startswith("jtrees")]
    for module in modules:
        for test in finder.find(sys.modules[module], module):
            if not test.examples or test.name in done:
                continue
            done.add(test.name)
            test.globs = dict(GIVEN)
            messages: list[str] = []
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                failed = runner.run(test, out=messages.append).failed
            if failed:
                wrong.append(f"{test.name}:\n{''.join(messages)}")
    print(f"{len(done)} docstrings with examples ran")
    return wrong


def blocks_that_nothing_runs() -> list[str]:
    """Returns the blocks of Python in pages that are not code cells. Only code cells are executed."""
    wrong = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```(python|py|pycon)\b", text, re.MULTILINE):
            wrong.append(f"{page.relative_to(DOCS)}:{text.count(chr(10), 0, block.start()) + 1}: make it a code-cell")
        if "```{code-cell}" in text and not text.startswith("---\n"):
            wrong.append(f"{page.relative_to(DOCS)} has code cells, and no header that makes it a notebook")
    return wrong


def tables_in_paragraphs() -> list[str]:
    """Returns the lines of pages where a table is wrapped into a paragraph, which the site would show as text."""
    wrong, attribute = [], "{.sentences}"
    for page in sorted([*DOCS.rglob("*.md"), DOCS.parent / "README.md"]):
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            if (attribute in line and line != attribute) or ("|---" in line and not line.startswith("|---")):
                wrong.append(f"{page.relative_to(DOCS.parent)}:{number}: a table needs a line for each row")
    return wrong


# --- The site ---------------------------------------------------------------------------------------------------------


def inventory(site: Path) -> set[str]:
    """Returns the Python names that have an entry, from the inventory that Sphinx writes."""
    data = (site / "objects.inv").read_bytes()
    for _ in range(4):
        data = data.partition(b"\n")[2]
    lines = zlib.decompress(data).decode("utf-8").splitlines()
    return {line.split()[0] for line in lines if line.split()[1].startswith("py:")}


def resolved(name: str) -> Any:
    """Returns the object of a dotted name, or None if there is no such object."""
    parts = name.split(".")
    try:
        value = importlib.import_module(parts[0])
        for i, part in enumerate(parts[1:], 2):
            if not hasattr(value, part):
                importlib.import_module(".".join(parts[:i]))
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value


def names_without_an_entry(site: Path) -> list[str]:
    """Returns the public names that the reference lacks. An object with two names needs one entry."""
    entries = inventory(site)
    documented = {id(resolved(name)) for name in entries}
    missing = [name for module in MODULES for name, value in public(module) if id(value) not in documented]
    return [f"{name} has no entry in the reference" for name in missing]


def main(arguments: list[str]) -> int:
    """Runs one of the two checks and prints the faults. Returns 1 if there are any, else 0."""
    if arguments[:1] == ["docstrings"]:
        warnings.simplefilter("ignore")
        wrong = options_without_a_line() + names_without_example() + blocks_that_nothing_runs()
        wrong += tables_in_paragraphs() + failing_examples()
    else:
        wrong = names_without_an_entry(Path(arguments[1]))
    print("\n".join(wrong), file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
