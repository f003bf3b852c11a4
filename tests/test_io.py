"""Files of models: what is saved is loaded again, and damaged files are refused."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
import errno
import io
import json
import os
import re
import stat
from typing import Any
import zipfile

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jtrees
from jtrees import leaves as kinds, pytree
from jtrees.search import FitReport, Report

TREE = jtrees.ObliqueTree(jnp.ones((3, 2)), jnp.arange(3.0), kinds.Values(jnp.asarray([1.0, 2, np.inf, np.nan])))

FIT = jtrees.FitResult(TREE, TREE, 0.0, 1, np.zeros(2), FitReport())


@dataclass(frozen=True)
class Held(Report):
    """A report of the user's own, which holds anything."""

    held: Any


def rewritten(path, **header):
    """The path of a file whose header has other entries."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["header.json"] = json.dumps(json.loads(members["header.json"]) | header).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def holding(value):
    return FitReport(search=Held(value))


RING: list = []
RING.append(RING)


def saved(subject, tmp_path, **options):
    path = tmp_path / "it.jtrees"
    jtrees.save(subject, path, **options)
    return path


def same(a, b):
    """The same structure and types, and numbers bit for bit."""
    chex.assert_trees_all_equal_dtypes(a, b)
    keys = lambda leaf: jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
    chex.assert_trees_all_equal(*(jax.tree.map(keys, tree) for tree in (a, b)), strict=True)
    assert [type(leaf) for leaf in jax.tree.leaves(a)] == [type(leaf) for leaf in jax.tree.leaves(b)]


def everything():
    """Every kind of scalar and array of NumPy, and the contents of reports."""
    codes = np.typecodes["All"]
    structured = np.array([(1, "a")], [("x", int), ("y", "U3")])
    scalars = [*map(np.str_, ("", "höhe\N{SNOWMAN}", "nul\0")), np.bytes_(b"a\0"), np.bool_(True)]
    scalars += [np.datetime64("NaT", "ms"), np.timedelta64(3, "s"), np.void(b"abc"), structured[0]]
    scalars += [np.longdouble(1) / 3, np.array(0.1, jnp.bfloat16)[()]]
    scalars += [np.dtype(code).type(3) for code in codes if code not in "SUVOMm?"]
    arrays = [np.array(form(value)) for value in scalars for form in (lambda v: [v, v], lambda v: v)]
    arrays += [np.array([], code) for code in (*codes.translate({77: "", 109: ""}), "M8[s]", "m8[s]")]
    arrays += [structured, structured.view(np.recarray), np.ones((2, 0)), np.ones((2, 3)).T, np.array([np.inf, -0.0])]
    arrays += [np.array(values, object) for values in (["a\0"], ["a", None], [[1], "a"])]
    arrays += [np.array(["a"], np.dtypes.StringDType()), np.ma.masked_array([1, 2], [False, True])]
    arrays += [np.array([1, 2], getattr(jnp, name)) for name in ("bfloat16", "int4", "float8_e4m3fn")]
    arrays += [np.array([1, 2, 300]).astype(np.dtype(kind).newbyteorder("S")) for kind in ("f4", "U3", "M8[D]")]
    arrays += [jnp.asarray([1, 2], jnp.int8), jax.random.key(3)]
    plain = ["text", 2**70, float("nan"), True, None, 1j, b"bytes", {1}, range(3), slice(1), np.float32]
    nested = [[[(1, [np.str_("a")])]], {"a": {1: (np.array(["b"]),)}}, [np.array([None])], {"a": [{1}]}]
    nested += [{True: 1}, {1.5: 1, np.float32(2.5): 2, None: 3}, {(1, 2): 1}]
    nested += [jtrees.search.Trial({"a": np.str_("b")}, 0.5, 0.5, 0.5)]
    origin = jtrees.Origin(np.array([1e8 + 1, 0.1]), np.float64(0.3))
    short = kinds.Values(jnp.arange(4, dtype=jnp.bfloat16))
    return [*scalars, *arrays, *plain, *nested, TREE, TREE.replace(leaves=short, origin=origin), jtrees.GET(depth=2)]


def test_whatever_is_saved_is_loaded(tmp_path):
    """Other objects are refused. The message names the k and a remedy."""
    refusal = re.compile(r"\.report\.search\.held\[0\].* (cannot be saved: .*: \S+|must have names or numbers as keys)")
    refused, path = 0, tmp_path / "it.jtrees"
    for value in everything():
        try:
            jtrees.save(FIT.replace(report=holding([value])), path)
        except ValueError as error:
            refused += 1
            assert refusal.match(str(error)), (value, error)
            assert not list(tmp_path.iterdir())
        else:
            read = jtrees.load(path).report.search.held[0]
            same(read, value) if isinstance(value, (jax.Array, type(TREE))) else np.testing.assert_equal(read, value)
            kind = lambda a: (isinstance(a, np.generic), a.dtype.name) if hasattr(a, "dtype") else type(a)
            assert kind(read) == kind(value)
            path.unlink()
    assert 20 < refused < 60


def huber(outputs, y):
    return optax.losses.huber_loss(outputs, y)


def test_functions_and_recipes_that_were_tuned(tmp_path):
    """A function by its name, a recipe as it is, or described where it holds functions."""
    grid = [{"base": jtrees.GET(depth=2), "options": {"loss": huber}}, {"base": jtrees.FromMethod(make=huber)}]
    trials = [jtrees.search.Trial(options, 0.5, 0.1, 3.0) for options in grid]
    fit = FIT.replace(report=FitReport(tuning=jtrees.search.Tuning(options=grid[0], trials=trials)))
    read = jtrees.load(saved(fit, tmp_path)).report.tuning
    remaining = {"base": jtrees.GET(depth=2), "options": {"loss": "tests.test_io.huber"}}
    assert read.options == read.trials[0].options == remaining and read.trials[0].loss == 0.5
    described = read.trials[1].options["base"]
    assert (described["name"], described["make"]) == ("FromMethod", "tests.test_io.huber")


def test_double_precision_is_not_lost(tmp_path):
    with jax.enable_x64(True):
        tree = TREE.replace(bias=jnp.asarray([0.1, 0.2, 0.3], jnp.float64))
        path = saved(tree, tmp_path)
        same(jtrees.load(path), tree)
    with pytest.raises(ValueError, match=r"it.jtrees has float64: set the option jax_enable_x64"):
        jtrees.load(path)


def test_states_of_learners(tmp_path):
    bandit = jtrees.methods.bandit_classifier(2, 3)
    state = bandit.init(4, key=jax.random.key(0))
    path = saved(state, tmp_path)
    same(jtrees.load(path, like=bandit.init(4, key=jax.random.key(1))), state)
    wider = bandit.init(5, key=jax.random.key(1))
    for like, message in (
        (None, r"like must be given for .*, which holds a BanditState"),
        (wider, r"like\.params\.\S+ must be float32\(3, 4\), got float32\(3,"),
        (TREE, r"like must be a BanditState that holds \d+ arrays, .*got a ObliqueTree"),
    ):
        with pytest.raises(ValueError, match=message):
            jtrees.load(path, like=like)
    with pytest.raises(ValueError, match=r"like must be None for .*, which holds a"):
        jtrees.load(saved(TREE, tmp_path), like=TREE)


@jtrees.io.model
@pytree.dataclass
class Stump:
    """A model of the user's own, with a recipe of the user's own."""

    threshold: jax.Array
    recipe: Any


@pytree.dataclass
class Stumps(jtrees.Recipe):
    """As every recipe, it may be part of a file."""

    depth: int = jtrees.search.option(1)
    rate: float = jtrees.search.option(0.5, above=0)


def test_classes_of_the_users_own(tmp_path):
    model = Stump(jnp.asarray(0.5), Stumps(rate=jnp.float32(2)))
    same(jtrees.load(path := saved(model, tmp_path)), model)
    assert jtrees.io.header(path)["kind"] == "Stump"
    same(jtrees.load(saved(FIT.replace(report=holding(model)), tmp_path)).report.search.held, model)
    with pytest.raises(ValueError, match="what must be one of"):
        saved(model.recipe, tmp_path)  # a part of a file, and no model


def of_a_cell(name, base=object, **fields):
    """A class as a cell of a notebook defines it, registered by its decorator."""
    members = {"__annotations__": fields, "__module__": "__main__", "__qualname__": name}
    return pytree.dataclass(type(name, (base,), members))


def test_a_class_of_the_name_of_one_of_jtrees_takes_no_place(tmp_path):
    """A recipe GET and leaves Values of the user's own, beside those of jtrees."""
    get, custom = of_a_cell("GET", jtrees.GET), jtrees.io.part(of_a_cell("Values", values=Any, label=str))
    tree = TREE.replace(leaves=custom(TREE.leaves.values, "mine"))
    held = [get(depth=2), jtrees.GET(depth=3), tree, TREE]
    read = jtrees.load(saved(FIT.replace(report=holding(held)), tmp_path)).report.search.held
    assert [type(entry) for entry in read] == [get, jtrees.GET, jtrees.ObliqueTree, jtrees.ObliqueTree]
    assert [type(entry.leaves) for entry in read[2:]] == [custom, kinds.Values]
    assert read[0].depth == 2 and read[2].leaves.label == "mine"


@pytest.mark.parametrize("base", [object, jtrees.Recipe])
def test_a_class_that_is_defined_again_takes_its_own_place(tmp_path, base):
    """As in a cell of a notebook that runs twice: files are read, and objects of the old class are refused."""
    name, register = f"{base.__name__}Cell", jtrees.io.part if base is object else lambda cls: cls
    define = lambda: register(of_a_cell(name, base, rate=Any))
    path = saved(old := FIT.replace(report=holding([define()(0.5)])), tmp_path)
    again = define()
    assert type(jtrees.load(path).report.search.held[0]) is again
    with pytest.raises(ValueError, match=f"cannot be saved: .*{name} has been defined again: create the object again"):
        saved(old, tmp_path)


def test_a_file_of_a_class_that_is_not_known_says_where_it_is(tmp_path):
    path = saved(FIT.replace(report=holding([Stumps()])), tmp_path)
    text = json.dumps(json.loads(zipfile.ZipFile(path).read("header.json"))["object"])
    renamed = json.loads(text.replace("tests.test_io.Stumps", "elsewhere.Stumps"))
    with pytest.raises(ValueError, match=r"its class 'elsewhere.Stumps' is unknown: import the module"):
        jtrees.load(rewritten(path, object=renamed))


@pytest.mark.parametrize(
    ("subject", "options", "message"),
    [
        (None, {}, r"what must be one of '.* and \d+ more, got NoneType"),
        (FIT.replace(report=holding([1, lambda x: x])), {}, r"^\.report\.search\.held\[1\] cannot be saved: <f"),
        (TREE, {"feature_names": ["a", "b", "c"]}, "feature_names must hold 2 names, one a column, got 3"),
        (TREE, {"feature_names": ["a", "a"]}, "feature_names must differ from each other, got 'a' twice"),
        (FIT.replace(report=holding(RING)), {}, "what must not contain itself or deeply nested lists and dicts"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_named(tmp_path, subject, options, message):
    with pytest.raises(ValueError, match=message):
        saved(subject, tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = saved(TREE, tmp_path)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        jtrees.save(TREE.replace(bias=jnp.zeros(3)), path)
    same(jtrees.load(path), TREE)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_mode_and_a_link_leads_to_it(tmp_path):
    path, link = saved(TREE, tmp_path), tmp_path / "link.jtrees"
    path.chmod(0o600)
    link.symlink_to(path.name)
    jtrees.save(TREE.replace(bias=jnp.zeros(3)), link)
    assert link.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    same(jtrees.load(path), TREE.replace(bias=jnp.zeros(3)))
    dangling = tmp_path / "dangling.jtrees"
    dangling.symlink_to("new.jtrees")
    jtrees.save(TREE, dangling)
    same(jtrees.load(tmp_path / "new.jtrees"), TREE)
    assert {file.name for file in tmp_path.iterdir()} == {path.name, link.name, dangling.name, "new.jtrees"}


def test_pipes_and_devices_stay_what_they_are(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        contents = pool.submit(pipe.read_bytes)
        jtrees.save(TREE, pipe)
    same(jtrees.load(io.BytesIO(contents.result())), TREE)
    assert pipe.is_fifo()
    jtrees.save(TREE, os.devnull)
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    with open(out := tmp_path / "out", "wb", buffering=0) as file:  # a name of a file that the process has open
        jtrees.save(TREE, f"/dev/fd/{file.fileno()}")
        file.write(b"more")
    assert out.read_bytes().endswith(b"more")
    same(jtrees.load(io.BytesIO(out.read_bytes()[:-4])), TREE)


def test_open_files_are_written_and_read(tmp_path):
    jtrees.save(FIT, stream := io.BytesIO())
    assert jtrees.io.header(stream)["kind"] == "FitResult"
    same(jtrees.load(stream).model, FIT.model)
    with open(tmp_path / "m.jtrees", "wb") as file:
        jtrees.save(TREE, file)
    with open(tmp_path / "m.jtrees", "rb") as file:
        same(jtrees.load(file), TREE)
    with open(tmp_path / "text", "w") as file, pytest.raises(ValueError, match=r"path must be .* in binary mode"):
        jtrees.save(TREE, file)
    with pytest.raises(ValueError, match=r"BytesIO .* is not a complete file"):
        jtrees.load(io.BytesIO(b"none"))


@pytest.mark.parametrize(("out", "error"), [("missing/m", FileNotFoundError), (".", IsADirectoryError)])
def test_an_error_of_a_path_names_the_path(tmp_path, out, error):
    with pytest.raises(error) as raised:
        jtrees.save(TREE, tmp_path / out)
    assert raised.value.filename == str(tmp_path / out)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"format": 5, "jtrees": "9.8.7"}, r"has format 5 of jtrees 9\.8\.7; jtrees .* reads format 4"),
        ({"kind": "Oak", "jtrees": "9.8.7"}, r"of jtrees 9\.8\.7 holds a 'Oak', which jtrees .* lacks"),
        ({"object": {"class": "Popen", "fields": {}}}, r"is not a complete file written by jtrees.save"),
        ({"arrays": [1]}, r"is not a complete file written by jtrees.save"),
        ({"object": {"class": "Oak", "fields": {}}, "jtrees": "9.8.7"}, r"was written by jtrees 9\.8\.7, and jtrees"),
    ],
)
def test_other_formats_and_kinds_are_refused(tmp_path, header, message):
    with pytest.raises(ValueError, match=message):
        jtrees.load(rewritten(saved(TREE, tmp_path), **header))


@pytest.mark.parametrize("step", [10, pytest.param(1, marks=pytest.mark.slow)])
def test_a_file_that_was_cut_off_or_altered_is_refused_or_harmless(tmp_path, step):
    """Every byte changed, and many lengths: an error that says so, or the same tree."""
    blob = saved(TREE, tmp_path).read_bytes()
    altered = [blob[:k] + bytes([blob[k] ^ 0xFF]) + blob[k + 1 :] for k in range(0, len(blob), step)]
    for contents, allowed in (([blob[:k] for k in range(0, len(blob), 10 * step)], 0), (altered, len(altered) / 2)):
        refused = 0
        for content in contents:
            (path := tmp_path / "altered.jtrees").write_bytes(content)
            try:
                jax.tree.map(np.testing.assert_array_equal, jtrees.load(path), TREE)
            except ValueError as error:
                assert str(path) in str(error)
                refused += 1
        assert refused >= len(contents) - allowed
