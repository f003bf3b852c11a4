"""What arguments are refused for: the message names the argument and the rule. Valid arguments stay as they are."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
from scipy import sparse

from jtrees import validation
from jtrees.tasks import labels as codec

ENCODE = ": encode them, e.g. labels, y = np.unique(y, return_inverse=True)"
KNOWN = ": encode them by the sorted labels of all classes, e.g. y = np.searchsorted(labels, y)"
NOT_FINITE = "must be finite, got {} NaN or infinite values, the first at "


def refuses(message, check, *args, **options):
    with pytest.raises(ValueError, match=re.escape(message)):
        check(*args, **options)


def test_good_weights_and_targets_come_back_as_they_are():
    weights = [0, 1, 2], np.array([True, False, True]), jnp.asarray([0.5, 0.0, 2.0]), np.array([1, 2, 3], object)
    targets = [1, 2, 3], [[1.0], [2], [2]], jnp.asarray([[1.0, 5], [2, 5.5], [2, 5]]), np.array([2**62, 2**62 + 1, 0])
    for check, group in ((validation.check_weight, weights), (validation.check_targets, targets)):
        for values in group:
            checked = check(values, 3)
            assert checked.shape == np.shape(values)
            assert np.array_equal(np.asarray(checked), np.asarray(values))


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        *((w, "sample_weight must have shape (3,), one a row of x, got shape") for w in (1.0, np.ones((3, 1)))),
        ([1.0, np.nan, np.inf], f"sample_weight {NOT_FINITE.format(2)}(1,)"),
        ([1, -2, -1], "sample_weight must not be negative, got -2"),
        ([0.0, 0.0, 0.0], "sample_weight must not be zero everywhere"),
        (np.array([1, "b", None], object), "sample_weight must be numeric, got 1 and others"),
    ],
)
def test_bad_weights_are_refused(weight, message):
    refuses(message, validation.check_weight, weight, 3)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        *((y, "y must have shape (n,) or (n, k), got shape") for y in (5.0, np.ones((3, 1, 1)), np.ones((3, 0)))),
        ([1.0, 2], "x and y must have the same number of rows, got 3 and 2"),
        ([[1.0, 2], [2, np.inf], [3, 4]], f"y {NOT_FINITE.format(1)}(1, 1)"),
        ([[1, 7], [2, 7], [3, 7]], "y must take at least two values to learn from, got 7.0 in every row in column 1"),
        (jnp.asarray([1j, 2, 3]), "y must be numeric, got values of type complex64"),
        ([1.0, None, "b"], "y must be numeric, got 1.0 and others"),
    ],
)
def test_bad_targets_are_refused(y, message):
    refuses(message, validation.check_targets, y, 3)
    refuses("x and y must hold at least 2 samples, got 1", validation.check_targets, [1.0], 1)


@pytest.mark.parametrize(
    ("check", "message"),
    [(validation.check_weight, "sample_weight must have shape"), (validation.check_targets, "rows, got 3 and 4")],
)
def test_traced_values_are_checked_for_their_shape_only(check, message):
    assert jax.eval_shape(lambda values: check(values, 3), jnp.ones(3)).shape == (3,)
    refuses(message, jax.eval_shape, lambda values: check(values, 3), jnp.ones(4))


@pytest.mark.parametrize(
    "y",
    [
        [2, 0, 1, 0],
        [2.0, 0.0, 1.0, 0.0],
        np.array([2, 0, 1, 0], np.uint8),
        jnp.asarray([2, 0, 1, 0]),
        np.array([True, False]),
        *(np.array(y, object) for y in ([False, True, True], [0.0, 1.0, 1.0], [np.int8(0), 1, True])),
    ],
    ids=str,
)
def test_labels_become_int32(y):
    # Classes that are known need not occur: there may be more, and a part of the data may have one of them.
    for labels, known in ((y, None), (y, 5), (y[:1], 3)):
        checked = codec.check_labels(labels, known)
        assert checked.dtype == np.int32 and checked.tolist() == np.asarray(labels, int).tolist()


@pytest.mark.parametrize(
    ("y", "kind"),
    [
        ([1, 2], "i"),
        ([1.5, 2], "f"),
        (["a", "b"], "U"),
        ([True, 2], "O"),
        *((np.array(y, object), kind) for y, kind in (([1, 2], "i"), ([True, False], "b"), ([True, 2], "O"))),
        (np.array(["a", "b"], object), "O"),
    ],
    ids=repr,
)
def test_labels_of_one_type_become_an_array_of_that_type(y, kind):
    labels, unclear = codec.label_array(y)
    assert (labels.dtype.kind, labels.tolist(), unclear) == (kind, list(y), "")


@pytest.mark.parametrize(
    ("y", "classes", "message"),
    [
        *((y, None, "y must have shape (n,) with n at least 1, got shape") for y in ([[0, 1]], 3, [])),
        ([0.0, 1.0, np.inf], None, f"y {NOT_FINITE.format(1)}(2,)"),
        (pd.Series(["a", None]), None, "in row 1: leave rows without a label out"),
        (pd.Series(["a", None], dtype="string"), None, "got <NA> in row 1: leave rows without"),
        (np.array([0, "a"], object), None, "got 0 and 'a' (in row 1): make labels one type, then"),
        ([1.0, 0.5, 0.25], None, "y must hold whole numbers 0..K-1 in classification, got 0.5" + ENCODE),
        (np.array(["2020", "2021"], "M8[D]"), None, "got np.datetime64('2020-01-01')" + ENCODE),
        ([-1, 0, 1], None, "y must hold classes 0..K-1, got labels from -1 to 1" + ENCODE),
        ([0, 1, 3], 3, "y must hold classes 0..2, got labels from 0 to 3" + KNOWN),
        ([0, 10**14], None, "y must hold every class 0..100000000000000, got no sample of class 1" + ENCODE),
        ([0, 0], None, "y must hold at least two classes to learn from, got one"),
    ],
)
def test_bad_labels_are_refused(y, classes, message):
    refuses(message, codec.check_labels, y, classes)


def test_labels_to_train_on():
    codec.check_traced(jnp.asarray([0, 2, 1]), 3)
    jax.eval_shape(lambda y: codec.check_traced(y, 3), jnp.asarray([7]))
    for y, message in [
        (jnp.asarray([0, 3]), "y must hold classes 0..2, got labels from 0 to 3"),
        (jnp.asarray([-1, 2]), "y must hold classes 0..2, got labels from -1 to 2"),
        (jnp.asarray([0.0, 1]), "y must hold whole numbers 0..2 in classification, got float32"),
    ]:
        refuses(message, codec.check_traced, y, 3)
        refuses(message, jax.eval_shape, lambda _, y=y: codec.check_traced(y, 3), 0)  # known where others are traced


ONE = pd.DataFrame({"a": [1.0], "b": ["u"]})


@pytest.mark.parametrize(
    ("x", "message"),
    [
        *((np.ones(shape), f"x must have shape (n, p), got shape {shape}") for shape in ((4,), (2, 2, 2))),
        (np.ones(2), "use x[None] for one row"),
        *((kind(np.ones((2, 2))), "x must be a dense array, got <") for kind in (sparse.csr_array, sparse.csr_matrix)),
        *((np.ones(shape), "x must have at least one row and one column") for shape in ((0, 2), (2, 0))),
        (np.ones((2, 3)), "x must have 2 columns, got 3"),
        ([[1.0, np.nan]], f"x {NOT_FINITE.format(1)}(0, 1)"),
        (jnp.ones((2, 2), jnp.complex64), "x must be numeric, got values of type complex64"),
        ([[1.0, 2.0], [3.0]], "x must be an array of numbers, got rows of different lengths"),
        (np.array([[1, "b"]], object), "x must be numeric, got 1 and others, such as 'b' at (0, 1): pass a Data"),
        (np.full((2, 2), 3, "m8[s]"), "got values of type timedelta64[s]: make numbers of dates"),
        (ONE, "x must be numeric, got 'u' in column 'b': encode text, such as by a"),
        (ONE.assign(b=pd.array([None], "Float64")), "got <NA> in column 'b': fill gaps"),
        (ONE.assign(b=pd.to_datetime(["2020-01-01"])), "got Timestamp('2020-01-01 00:00:00') in column 'b': make numb"),
    ],
)
def test_bad_features_are_refused(x, message):
    refuses(message, validation.check_x, x, features=2)


MASKED = np.ma.masked_array(np.ones((3, 2)), [[False, False], [False, True], [True, False]])


@pytest.mark.parametrize(
    ("name", "check"),
    [
        ("x", lambda a: validation.check_x(a)),
        ("y", lambda a: validation.check_targets(a, 3)),
        ("sample_weight", lambda a: validation.check_weight(a[:, 0], 3)),
        ("y", lambda a: codec.check_labels(a[:, 0])),
    ],
)
def test_masked_values_are_refused(name, check):
    with pytest.raises(ValueError, match=rf"{name} must have no masked values, got [12], the first at \((1|2)"):
        check(MASKED)
    unmasked = validation.check_x(np.ma.masked_array(np.arange(6).reshape(3, 2)))
    assert type(unmasked) is np.ndarray and unmasked.tolist() == [[0, 1], [2, 3], [4, 5]]
    validation.check_x(pd.DataFrame({"_mask": [1.0, 2, 3]}))  # as NumPy names a mask


# Other checks of options: test_options.
@pytest.mark.parametrize(
    ("check", "args", "message"),
    [
        *(("depth", (depth,), f"depth must be from 1 to 16, got {depth}") for depth in (0, 17)),
        *(("key", (key,), "key must be a random key, such as jax.random.key(0)") for key in (0, None, jnp.ones(2))),
        ("key", (jax.random.split(jax.random.key(0), 3),), "key must be one random key, got keys of shape (3,)"),
        ("key", (jax.random.split(jax.random.PRNGKey(0)),), "key must be one random key, got keys of"),
        ("key", (jax.random.PRNGKey(0, impl="rbg"),), ': use jax.random.wrap_key_data(key, impl="rbg")'),
        *(("number", ("rate", value), "rate must be one number, got shape (2,)") for value in ([1.0, [2]], np.ones(2))),
        ("number", ("rate", "high"), "rate must be a finite number, got 'high'"),
        ("choice", ("mode", 3, ("a",), "a number"), "mode must be one of 'a', or a number, got 3"),
    ],
)
def test_bad_options_are_refused(check, args, message):
    refuses(message, getattr(validation, f"check_{check}"), *args)


def test_good_keys_and_traced_options_pass():
    for key in (jax.random.key(0), jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")):
        validation.check_key(key)
    with jax.default_prng_impl("rbg"):
        validation.check_key(jax.random.PRNGKey(0))
    jax.eval_shape(lambda value: validation.check_number("rate", value, above=2), jnp.ones(()))  # traced: no value


def test_quoted_values_have_at_most_80_characters():
    for value in ("x" * 500, list(range(1000)), np.arange(1000.0), "line\nbreak" * 50):
        text = validation.quoted(value)
        assert len(text) <= 80 and "\n" not in text
    assert validation.quoted("two  spaces ") == "'two  spaces '"
    assert [validation.quoted(kind(-0.1)) for kind in (np.float32, np.asarray)] == ["-0.1", "-0.1"]
    assert validation.quoted_list([1, 2, 3, 4, 5]) == "1, 2, 3, 4, 5"
    assert validation.quoted_list(range(1, 8)) == "1, 2, 3, 4, 5 and 2 more"
