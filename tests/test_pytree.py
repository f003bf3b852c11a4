"""Dataclasses that are pytrees: structures of different classes differ, which jaxlib forgets for those of flax."""

import dataclasses
import importlib
import pkgutil

import jax
import numpy as np
import pytest

import jtrees
from jtrees import leaves, losses, pytree


@pytree.dataclass
class Cat:
    name: object
    legs: int = pytree.field(pytree_node=False, default=4)


@pytree.dataclass(kw_only=True)
class Dog:
    name: object
    legs: int = pytree.field(pytree_node=False, default=4)


def test_structures_differ_between_classes_and_static_values_and_nothing_else():
    structure = jax.tree.structure
    assert structure(Cat(1)) == structure(Cat(2))
    assert structure(Cat(1)) != structure(Cat(1, legs=3))
    assert structure(Cat(1)) != structure(Dog(name=1))
    values = np.ones((4, 2))
    kinds = [leaves.Values(values, loss()) for loss in (losses.SquaredError, losses.LogLoss, losses.Frequencies)]
    for i, entry in enumerate(kinds):
        for j, other in enumerate(kinds):
            assert (structure(entry) == structure(other)) == (i == j)
            assert (structure({"leaves": entry}) == structure({"leaves": other})) == (i == j)


def test_they_are_frozen_and_replaced_mapped_and_named():
    cat = Cat(1, legs=3)
    assert cat.replace(name=2) == Cat(2, legs=3)  # type: ignore[attr-defined]
    assert jax.tree.map(lambda a: a + 1, cat) == Cat(2, legs=3)
    assert jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path([cat])[0][0]) == "[0].name"
    with pytest.raises(dataclasses.FrozenInstanceError):
        cat.name = 3  # type: ignore[misc]


def test_every_dataclass_of_the_library_is_one_of_these():
    result = []
    for module in pkgutil.walk_packages(jtrees.__path__, "jtrees."):
        for entry in vars(importlib.import_module(module.name)).values():
            if isinstance(entry, type) and entry.__module__.startswith("jtrees") and dataclasses.is_dataclass(entry):
                assert "_flax_dataclass" not in vars(entry), entry
                result.append(entry)
    assert leaves.Values in result
    assert jtrees.GET in result
