"""What weights and class labels are refused for, and in which words."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jtrees import validation

ENCODE = ": encode them, e.g. labels, y = np.unique(y, return_inverse=True)"


@pytest.mark.parametrize(
    "weight",
    [
        [0, 1, 2],
        np.array([0.5, 0, 0]),
        np.array([True, False, True]),
        jnp.asarray([0.5, 0.0, 2.0]),
        np.array([1, 2, 3], object),
    ],
    ids=["list", "floats", "bools", "jax", "objects"],
)
def test_good_weights_come_back_as_they_are(weight):
    checked = validation.check_weight(weight, 3)
    assert checked.shape == (3,)
    assert np.array_equal(checked, np.asarray(weight, float))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        ([1.0, 2.0], "sample_weight must have shape (3,), one a row of x, got shape (2,)"),
        (1.0, "sample_weight must have shape (3,), one a row of x, got shape ()"),
        (np.ones((3, 1)), "sample_weight must have shape (3,), one a row of x, got shape (3, 1)"),
        (jnp.ones(4), "sample_weight must have shape (3,), one a row of x, got shape (4,)"),
        ([1.0, np.nan, np.inf], "sample_weight must be finite, got 2 NaN or infinite values, the first at (1,)"),
        (jnp.asarray([1.0, 0, -np.inf]), "sample_weight must be finite, got 1 NaN or infinite values, the first at (2"),
        ([1.0, -0.5, -0.25], "sample_weight must not be negative, got "),
        ([1, -2, -1], "-2"),
        ([0.0, 0.0, 0.0], "sample_weight must not be zero everywhere"),
        (["a", "b", "c"], "sample_weight must be numeric, got values of type <U1"),
        (np.array([1, "b", None], object), "sample_weight must be numeric, got 1 and others"),
    ],
    ids=["short", "scalar", "2d", "long", "nan", "infinite", "negative", "most negative", "zero", "strings", "mixed"],
)
def test_bad_weights_are_refused(weight, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validation.check_weight(weight, 3)


@pytest.mark.parametrize(
    "y",
    [[2, 0, 1, 0], [2.0, 0.0, 1.0, 0.0], np.array([2, 0, 1, 0], np.uint8), jnp.asarray([2, 0, 1, 0])],
    ids=["list", "floats", "bytes", "jax"],
)
def test_labels_become_int32(y):
    labels, classes = validation.check_labels(y)
    assert labels.dtype == np.int32
    assert labels.tolist() == [2, 0, 1, 0]
    assert classes == 3
    assert validation.check_labels(y, 5)[1] == 5  # known to be more: not every class need occur


def test_two_classes_of_bools():
    labels, classes = validation.check_labels(np.array([True, False]))
    assert labels.tolist() == [1, 0]
    assert classes == 2
    # One class of two that are known is no error: it may be a part of the data.
    assert validation.check_labels([1, 1], 2)[1] == 2


@pytest.mark.parametrize(
    ("y", "classes", "message"),
    [
        ([[0, 1]], None, "y must have shape (n,) with n at least 1, got shape (1, 2)"),
        (3, None, "y must have shape (n,) with n at least 1, got shape ()"),
        ([0.0, np.nan], None, "y must be finite, got 1 NaN or infinite values, the first at (1,)"),
        ([0.0, 1.0, np.inf], None, "y must be finite, got 1 NaN or infinite values, the first at (2,)"),
        (np.array([0, None], object), None, "y must hold whole numbers 0..K-1 in classification, got "),
        ([-1, 0, 1], None, "y must hold classes 0..K-1, got labels from -1 to 1" + ENCODE),
        ([0, 1, 3], 3, "y must hold classes 0..2, got labels from 0 to 3" + ENCODE),
        ([-1, 1], 2, "y must hold classes 0..1, got labels from -1 to 1" + ENCODE),
        ([0, 1, 3], None, "y must hold every class 0..3, got no sample of class 2" + ENCODE),
        ([1, 2], None, "y must hold every class 0..2, got no sample of class 0" + ENCODE),
        ([0, 0], None, "y must hold at least two classes to learn from, got one"),
        ([0, 0], 1, "y must hold at least two classes to learn from, got one"),
        ([], None, "y must have shape (n,) with n at least 1, got shape (0,)"),
        ([0, 10**14], None, "got no sample of class 1" + ENCODE),
    ],
)
def test_bad_labels_are_refused(y, classes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        validation.check_labels(y, classes)


def test_labels_that_are_not_whole_say_how_to_encode_them():
    for y, odd in [(np.array(["b", "a"]), "np.str_('b')"), ([1.0, 0.5, 0.25], "np.float64(0.5)")]:
        message = f"y must hold whole numbers 0..K-1 in classification, got {odd}{ENCODE}"
        with pytest.raises(ValueError, match=re.escape(message)):
            validation.check_labels(y)


def test_traced_weights_are_checked_for_their_shape_only():
    assert jax.jit(lambda w: validation.check_weight(w, 3))(jnp.ones(3)).shape == (3,)
    with pytest.raises(ValueError, match="sample_weight must have shape"):
        jax.jit(lambda w: validation.check_weight(w, 3))(jnp.ones(2))
