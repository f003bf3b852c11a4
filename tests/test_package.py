"""The package as a whole: what importing it costs, its names, and its docstrings."""

import ast
from importlib import metadata
import inspect
from pathlib import Path
import pydoc
import subprocess
import sys
import types

import jax.numpy as jnp
import jaxtyping
import pytest

import jtrees

KINDS = ["Values", "Linear"]
ROOMS = {"jtrees": jtrees} | {
    name: getattr(jtrees, name) for name in ("data", "export", "methods", "plotting", "report", "search", "training")
}
PUBLIC = {
    f"{room}.{name}": thing
    for room, module in ROOMS.items()
    for name, thing in vars(module).items()
    if not name.startswith("_")
}


def test_import_needs_no_extra_and_leaves_slow_modules_to_their_first_use():
    code = "import jtrees, sys; print(*sys.modules); jtrees.nn.LatentTree, jtrees.explain.path, jtrees.export.to_c"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    extras = {"sklearn", "matplotlib", "pandas"}
    late = {"flax.nnx", "treescope", "jax.experimental.pallas", "scipy", "jtrees.nn", "jtrees.explain"}
    assert "jtrees" in loaded and not loaded & (extras | late)
    assert {"nn", "explain", "export", "plotting", "estimators", "GET"} <= set(dir(jtrees))
    assert not hasattr(jtrees, "no_such_name")


def test_version_is_that_of_the_installed_distribution():
    try:
        installed = metadata.version("jtrees")
    except metadata.PackageNotFoundError:
        pytest.skip("jtrees runs from its sources and is not installed")
    assert jtrees.__version__ == installed


def test_every_public_name_has_a_docstring():
    for name, thing in PUBLIC.items():
        text = inspect.getdoc(thing)
        assert text, name
        # Not the signature that a dataclass writes for itself, nor "Alias for field".
        assert not inspect.isclass(thing) or not text.startswith((f"{thing.__name__}(", "Alias")), name


def test_public_methods_have_docstrings():
    # Those of recipes and the like are documented once, where they are first defined.
    for owner in (jtrees.ObliqueTree, jtrees.Forest, *(getattr(jtrees.leaves, kind) for kind in KINDS)):
        for name, member in inspect.getmembers(owner, lambda member: callable(member) or isinstance(member, property)):
            assert name.startswith("_") or name == "replace" or inspect.getdoc(member), f"{owner.__name__}.{name}"


def test_no_import_is_public_by_accident():
    names = ("GET", "fit", "train", "methods", "ObliqueTree", "leaves", "losses", "ops", "routing", "search")
    assert {f"jtrees.{name}" for name in names} <= set(PUBLIC)
    assert not {"jax", "jnp", "np", "optax", "Any"} & set(vars(jtrees))


def test_modules_have_docstrings():
    for path in Path(jtrees.__file__).parent.rglob("*.py"):
        assert ast.get_docstring(ast.parse(path.read_text())), path


def test_shapes_in_signatures_are_checked_in_these_tests():
    with pytest.raises(jaxtyping.TypeCheckError):
        jtrees.routing.leaf_probabilities(jnp.ones(3, jnp.int32))


def test_help_of_every_package_lists_its_public_names():
    """Those that its module imports under their own names, and those that it defines."""
    for name, module in sorted(sys.modules.items()):
        if not (name.partition(".")[0] == "jtrees" and hasattr(module, "__path__")) or name == "jtrees.cli":
            continue
        tree = ast.parse(Path(module.__file__).read_text())
        imports = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
        public = {alias.name for alias in imports if alias.asname == alias.name}
        defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        defined = {item for item in defined if not item.startswith("_")}
        modules = {item for item in public if isinstance(getattr(module, item), types.ModuleType)}
        assert set(module.__all__) >= (public | defined) - modules, name
        assert not {"Any", "NamedTuple", "np", "jax"} & set(module.__all__)
    help_text = pydoc.render_doc(jtrees.routing)
    assert "path_violations" in help_text and "smooth_step(" in help_text
