"""One file for a model: what goes in comes out, and what is not whole is refused."""

import errno
import json
import os
import zipfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import Batch, leaves as kinds

TREE = jtrees.ObliqueTree(jnp.ones((3, 2)), jnp.arange(3.0), kinds.Constant(jnp.asarray([1.0, 2, np.inf, np.nan])))


def saved(what, tmp_path, **options):
    path = tmp_path / "it.jtrees"
    jtrees.save(what, path, **options)
    return path


def same(a, b):
    """The same structure and types, and numbers bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for one, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(one) is type(other) and one.dtype == other.dtype
        if isinstance(one, jax.Array) and jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_array_equal(one, other)


def test_arrays_come_back_as_they_were(tmp_path):
    """NumPy's in double precision, too, and short ones, and one number."""
    origin = jtrees.Origin(np.array([1e8 + 1, 0.1]), np.float64(0.3))
    leaves = kinds.Constant(jnp.arange(4, dtype=jnp.bfloat16))
    same(jtrees.load(saved(tree := TREE.replace(leaves=leaves, origin=origin), tmp_path)), tree)
    same(jtrees.load(saved(TREE, tmp_path)), TREE)


def test_double_precision_is_not_lost(tmp_path):
    with jax.enable_x64(True):
        tree = TREE.replace(bias=jnp.asarray([0.1, 0.2, 0.3], jnp.float64))
        path = saved(tree, tmp_path)
        same(jtrees.load(path), tree)
    with pytest.raises(ValueError, match=r"it.jtrees has float64: set the option jax_enable_x64"):
        jtrees.load(path)


def test_the_header_is_plain(tmp_path):
    path = saved(TREE, tmp_path, feature_names=["age", "höhe"])
    assert jtrees.io.header(path) == {"format": 1, "kind": "ObliqueTree", "feature_names": ["age", "höhe"]}
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("header.json"))["object"]["class"] == "ObliqueTree"


def test_states_of_learners(tmp_path):
    bandit = jtrees.bandit_classifier(2, 3)
    state = bandit.init(4, key=jax.random.key(0))
    path = saved(state, tmp_path)
    same(jtrees.load(path, like=bandit.init(4, key=jax.random.key(1))), state)
    with pytest.raises(ValueError, match=r"like must be given for .*, which holds a BanditState"):
        jtrees.load(path)
    with pytest.raises(ValueError, match=r"like\.params\.\S+ must be float32\(3, 4\), got float32\(3, 5\)"):
        jtrees.load(path, like=bandit.init(5, key=jax.random.key(1)))
    with pytest.raises(ValueError, match=r"like must be a BanditState that holds \d+ arrays, .*got a ObliqueTree"):
        jtrees.load(path, like=TREE)
    with pytest.raises(ValueError, match="like is for states"):
        jtrees.load(saved(TREE, tmp_path), like=TREE)


@pytest.mark.usefixtures("standard_promotion")  # optax
def test_a_run_goes_on_where_it_was(tmp_path):
    import optax

    method, optimizer = jtrees.dgt(2), optax.adam(0.01)
    data = Batch(jnp.asarray(np.random.default_rng(0).normal(size=(40, 3)), jnp.float32), jnp.arange(40.0))
    of = {"optimizer": optimizer, "steps": 3, "batch_size": 10}
    state = jtrees.start(method, data, key=jax.random.key(0), optimizer=optimizer)
    once, _ = jtrees.advance(method, state, data, **of)
    read = jtrees.load(saved(once, tmp_path), like=state)
    same(jtrees.advance(method, read, data, **of), jtrees.advance(method, once, data, **of))


@pytest.mark.parametrize("what", [None, {"a": 1}, np.ones(3), jtrees.GET(), lambda x: x])
def test_what_is_no_model_is_refused(tmp_path, what):
    with pytest.raises(ValueError, match="what must be one of ObliqueTree, Forest"):
        saved(what, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_named(tmp_path):
    fit = jtrees.Fit(TREE, TREE, 0.0, 1, np.zeros(2), {"how": [{"of": lambda x: x}]})
    with pytest.raises(ValueError, match=r"^\.report\['how'\]\[0\]\['of'\] cannot be saved: <function"):
        saved(fit, tmp_path)
    with pytest.raises(ValueError, match="must have names or numbers as keys to be saved, got \\(1, 2\\)"):
        saved(fit.replace(report={"how": {(1, 2): 3}}), tmp_path)
    with pytest.raises(ValueError, match="an array of objects"):
        saved(fit.replace(history=np.array([None])), tmp_path)
    with pytest.raises(ValueError, match="feature_names must hold 2 names, one a column, got 3"):
        saved(TREE, tmp_path, feature_names=["a", "b", "c"])
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


def rewritten(path, **header):
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["header.json"] = json.dumps(json.loads(members["header.json"]) | header)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_other_formats_and_kinds_are_refused(tmp_path):
    path = saved(TREE, tmp_path)
    with pytest.raises(ValueError, match="is of format 2; this release reads format 1"):
        jtrees.load(rewritten(path, format=2))
    with pytest.raises(ValueError, match="holds a 'Oak', which this release does not know"):
        jtrees.load(rewritten(path, format=1, kind="Oak"))
    with pytest.raises(ValueError, match=r"is not a whole file that jtrees.io.save wrote"):
        jtrees.load(rewritten(path, kind="ObliqueTree", object={"class": "Popen", "fields": {}}))


def test_other_files_are_refused(tmp_path):
    (path := tmp_path / "it.jtrees").write_text("a tree")
    with pytest.raises(ValueError, match=r"is not a whole file that jtrees.io.save wrote"):
        jtrees.load(path)
    np.savez(tmp_path / "some.npz", a=1)
    with pytest.raises(ValueError, match=r"is not a whole file that jtrees.io.save wrote"):
        jtrees.load(tmp_path / "some.npz")
    with pytest.raises(FileNotFoundError):
        jtrees.load(tmp_path / "none.jtrees")


def test_a_file_that_was_cut_off_or_altered_is_refused_or_harmless(tmp_path):
    """Every length, and every byte changed: an error that says so, or the same tree."""
    whole = saved(TREE, tmp_path).read_bytes()
    refused = 0
    for at in range(len(whole)):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]):
            (path := tmp_path / "altered.jtrees").write_bytes(content)
            try:
                same(jtrees.load(path), TREE)
            except ValueError as error:
                assert str(path) in str(error)
                refused += 1
    assert refused > 1.5 * len(whole)
