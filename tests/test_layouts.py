"""A table gives the same model, bit for bit, however it lies in memory, and whatever holds it."""

import jax
from nasty import LAYOUTS as IN_MEMORY
import numpy as np
import pandas as pd
import pytest
import sweeps

import jtrees
from jtrees.estimators import TreeClassifier, TreeRegressor

pytestmark = pytest.mark.usefixtures("standard_promotion")  # optax's Adam raises a float to an int32 power

KEY = jax.random.key(0)
GET = jtrees.GET(depth=2, starts=2, epochs=10)
LINEAR = GET.replace(leaves="linear")
DGT = jtrees.DGT(depth=2, epochs=4, widths=())
CLUSTERING = jtrees.LatentClustering(target_features=(1,), depth=2, epochs=4, batch_size=32)
NAMES = ["flag", "size", "age"]

# A first column of 0 and 1, others of many values, all of them exact in float32.
_rng = np.random.default_rng(0)
X = np.column_stack([_rng.integers(0, 2, 128), _rng.normal(size=(128, 2))]).astype(np.float32).astype(np.float64)
Y = np.round(X[:, 1] + np.where(X[:, 0] > 0, X[:, 2], -X[:, 2]), 1)
WEIGHT = _rng.integers(1, 4, 128).astype(float)


def framed(dtypes):
    return lambda x: pd.DataFrame({name: x[:, i] for i, name in enumerate(NAMES)}).astype(dtypes)


LAYOUTS = IN_MEMORY | {
    "strided columns": lambda x: np.repeat(x, 3, axis=1)[:, 1::3],
    "float32": lambda x: x.astype(np.float32),
    "float32, columns first": lambda x: np.asfortranarray(x, np.float32),
    "masked, nothing missing": lambda x: np.ma.masked_array(x, mask=np.zeros(x.shape, bool)),
    "frame of one block": lambda x: pd.DataFrame(x, columns=NAMES),
    "frame of several dtypes": framed({"flag": np.int8, "size": np.float32, "age": np.float64}),
    "nullable frame": framed({"flag": "boolean", "size": "Float32", "age": "Float64"}),
    "Arrow frame": framed({"flag": "int8[pyarrow]", "size": "float[pyarrow]", "age": "double[pyarrow]"}),
}

FITS = {
    "fit": lambda x, y, w: jtrees.fit(LINEAR, x, y, key=KEY, sample_weight=w),
    "fit, validation": lambda x, y, w: jtrees.fit(DGT, x, y, key=KEY, validation=(x, y)),
    "clustering": lambda x, y, w: jtrees.fit(CLUSTERING, x, key=KEY, sample_weight=w),
    "regressor": lambda x, y, w: TreeRegressor(GET, random_state=0).fit(x, y, sample_weight=w),
    "classifier": lambda x, y, w: TreeClassifier(DGT, random_state=0).fit(x, y > 0),
}


def same(one, other):
    """Two models, fits or estimators, bit for bit, but for the columns of raw tables."""
    one, other = (getattr(a, "model_", getattr(a, "model", a)) for a in (one, other))
    one, other = (a.model if isinstance(a, jtrees.tables.FrameModel) else a for a in (one, other))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture(scope="module")
def plain():
    """The fit to the table as it is, by name."""
    with jax.numpy_dtype_promotion("standard"):
        return {name: fit(X, Y, WEIGHT) for name, fit in FITS.items()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FITS)
def test_features(name, layout, plain, tmp_path):
    x = LAYOUTS[layout](X)
    fit = FITS[name](x, Y, WEIGHT)
    same(fit, plain[name])
    np.testing.assert_array_equal(fit.predict(x), plain[name].predict(X))
    jtrees.save(fit, tmp_path / "fit.jtrees")
    np.testing.assert_array_equal(jtrees.load(tmp_path / "fit.jtrees").predict(x), plain[name].predict(X))


@pytest.mark.parametrize(
    "layout",
    sweeps.quick(["Fortran", "strided columns", "backwards", "frame", "Arrow frame"], ["strided columns", "frame"]),
)
def test_targets_and_weights(layout):
    """Of several targets the mean is taken, too."""
    far = 1e6 + np.stack([Y, np.round(X[:, 2] ** 2, 1)], axis=1)
    if "frame" in layout.lower():
        dtype = "double[pyarrow]" if layout == "Arrow frame" else float
        y, weight = pd.DataFrame(far, columns=["a", "b"]).astype(dtype), pd.Series(WEIGHT).astype(dtype)
    else:
        y, weight = LAYOUTS[layout](far), LAYOUTS["backwards" if layout == "backwards" else "every other row"](WEIGHT)
    same(jtrees.fit(GET, X, y, key=KEY, sample_weight=weight), jtrees.fit(GET, X, far, key=KEY, sample_weight=WEIGHT))
    of = lambda y, weight: TreeRegressor(GET, random_state=0).fit(X, y, sample_weight=weight)
    same(of(y, weight), of(far, WEIGHT))


# --- Every row counts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "kind"), [(DGT, TreeClassifier), pytest.param(LINEAR, TreeRegressor, marks=pytest.mark.slow)]
)
def test_equal_rows_are_rows(recipe, kind):
    """A few features of two values and noisy labels: rows are equal by the dozen, and each of them counts.

    Merged they would be rows of uneven weight, which count as fewer samples, and a part to validate by would be drawn
    from the different ones.
    """
    rng = np.random.default_rng(0)
    x = rng.integers(0, 2, (128, 3)).astype(float)
    y = (rng.uniform(size=128) < 0.2 + 0.6 * x[:, 0] * x[:, 1]).astype(int)
    key = jax.random.key(int(np.random.RandomState(3).randint(np.iinfo(np.int32).max)))  # that of the estimator
    task = "classification" if kind is TreeClassifier else "regression"
    same(kind(recipe, random_state=3).fit(x, y), jtrees.fit(recipe, x, y, key=key, task=task))
