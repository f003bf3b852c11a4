"""The package as a whole: what importing it costs, its names, and its docstrings."""

import ast
import graphlib
from importlib import metadata, util
import inspect
from pathlib import Path
import pkgutil
import pydoc
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import jtrees
from jtrees.estimators import TreeRegressor
from tests import needs, recipes as small

KINDS = ["Values", "Linear"]
ROOMS = {"jtrees": jtrees} | {
    name: getattr(jtrees, name) for name in ("data", "export", "methods", "plotting", "report", "search", "training")
}
PUBLIC = {
    f"{room}.{name}": thing
    for room, module in ROOMS.items()
    for name, thing in inspect.getmembers(module)
    if not name.startswith("_")
}


def modules_after(code):
    program = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize(
    "code",
    [
        "import jtrees; jtrees.__version__",
        "from jtrees.cli import main\ntry: main(['--version'])\nexcept SystemExit: pass",
        "from jtrees.cli import main\ntry: main(['fit', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_import_version_and_help_are_light(code):
    loaded = modules_after(code)
    assert "jtrees" in loaded
    assert not loaded & {"jax", "flax", "numpy", "pandas", "sklearn", "matplotlib"}


@pytest.mark.slow
def test_public_names_need_no_extra_and_no_slow_module():
    loaded = modules_after("import jtrees; jtrees.GET")
    assert "jtrees.methods" in loaded
    assert not loaded & {"sklearn", "matplotlib", "pandas"}
    assert not loaded & {"flax.nnx", "treescope", "jax.experimental.pallas", "scipy", "jtrees.nn", "jtrees.explain"}
    assert {"jtrees.nn", "jtrees.explain"} <= modules_after("import jtrees; jtrees.nn.LatentTree, jtrees.explain.path")


@pytest.mark.wide
def test_every_module_can_be_imported_first():
    names = [module.name for module in pkgutil.walk_packages(jtrees.__path__, "jtrees.") if "__" not in module.name]
    code = """
import importlib, os, sys, jax, optax, flax, pandas, sklearn, matplotlib.pyplot, onnx
for name in sys.argv[1:]:
    if not os.fork():
        importlib.import_module(name)
        os._exit(0)
    assert os.wait()[1] == 0, name
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, *names], check=True)
    assert len(names) > 100


def test_all_public_names_are_listed():
    assert {"nn", "explain", "export", "plotting", "estimators", "GET", "fit", "losses"} <= set(dir(jtrees))
    names = {}
    exec("from jtrees import *", names)
    assert {"GET", "fit", "ObliqueTree"} <= set(names) and not {"losses", "jax"} & set(names)
    assert not hasattr(jtrees, "no_such_name")


def test_version_is_that_of_the_installed_distribution():
    needs.check(list(metadata.distributions(name="jtrees")), "an installed jtrees")
    assert jtrees.__version__ == metadata.version("jtrees")


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
        names = "_api.py" if module is jtrees else "__init__.py"
        tree = ast.parse(Path(module.__file__).with_name(names).read_text())
        imports = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
        public = {alias.name for alias in imports if alias.asname == alias.name}
        defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        defined = {item for item in defined if not item.startswith("_")}
        modules = {item for item in public if isinstance(getattr(module, item), types.ModuleType)}
        listed = set(getattr(module, "__all__", ()))
        assert listed >= (public | defined) - modules, name
        assert not {"Any", "NamedTuple", "np", "jax"} & listed
    help_text = pydoc.render_doc(jtrees.routing)
    assert "path_violations" in help_text and "smooth_step(" in help_text


def imported(name, names):
    """The modules of jtrees that a module imports, also within functions; names that only types need do not count."""
    nodes, imports = {*ast.walk(ast.parse(Path(util.find_spec(name).origin).read_text()))}, set()
    for_types = lambda node: isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    for node in nodes.difference(*map(ast.walk, filter(for_types, nodes))):
        match node:
            case ast.Import():
                imports |= {alias.name for alias in node.names}
            case ast.ImportFrom():
                assert not node.level
                targets = [f"{node.module}.{alias.name}" for alias in node.names]
                imports |= {target if target in names else node.module for target in targets}
            case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module")):
                imports |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return imports & names


def test_no_module_imports_itself_through_others():
    """Modules can be read from the first to the last, each after all that it imports.

    ``jtrees`` itself is left out: it imports modules at the first use of a name, and every module needs it.
    """
    names = {module.name for module in pkgutil.walk_packages(jtrees.__path__, "jtrees.")}
    graph = {name: imported(name, names) for name in names}
    assert {"jtrees.search.fit", "jtrees.tree"} <= graph["jtrees._api"] and "jtrees.cli.commands" in graph["jtrees.cli"]
    try:
        order = list(graphlib.TopologicalSorter(graph).static_order())
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))
    assert len(order) == len(names) > 150


@pytest.mark.slow
def test_files_are_loaded_where_only_jtrees_was_imported(tmp_path):
    x = np.arange(20.0)[:, None]
    jtrees.save(jtrees.fit(small.DGT, x, x[:, 0], key=jax.random.key(0)), tmp_path / "fit")
    jtrees.save(TreeRegressor(small.DGT).fit(x, x[:, 0]), tmp_path / "model")
    modules_after(f"from jtrees.io import load; load({str(tmp_path / 'fit')!r})")
    loaded = modules_after(f"import jtrees; assert jtrees.load({str(tmp_path / 'model')!r}).predict([[3.0]]).size == 1")
    assert "jtrees.estimators" in loaded
