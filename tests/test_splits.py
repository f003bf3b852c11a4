"""Held-out targets change neither the encoding of a raw table nor the model."""

import warnings

import jax
import numpy as np
import pytest

import jtrees
from jtrees.tables import TableEncoder
from tests.exported_models import raw_table

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),  # fits with Adam
    pytest.mark.filterwarnings("ignore::jtrees.tables.ColumnsWarning"),
    pytest.mark.filterwarnings("ignore::jtrees.report.BehindBaselineWarning"),
]

KEY = jax.random.key(0)
N = 120
RECIPE = jtrees.CO2(depth=2, epochs=3)


FRAME, Y = raw_table(N)
NUMBERS = np.random.default_rng(1).normal(size=(N, 3))


@pytest.mark.slow
@pytest.mark.parametrize(("x", "validation"), [(FRAME, 3), (NUMBERS, 0.3), (FRAME, None)], ids=["3", "0.3", "None"])
def test_held_out_targets_change_no_model(x, validation):
    """A row is held out of one of the three folds, of some of three tenths of the splits, or by ``held_out``."""
    fits = lambda y: [fit.model for fit in jtrees.sweep(RECIPE, x, y, key=KEY, validation=validation).fits.ravel()]
    if validation is None:
        fits = lambda y: [jtrees.fit(RECIPE, x, y, key=KEY, held_out=0.4).model]
    numbers = lambda model: [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(model)]
    everything = lambda y: [(numbers(model), getattr(model, "encoder", None)) for model in fits(y)]
    first, *rest = map(everything, [Y, *(Y + 50 * (np.arange(N) == row) for row in range(8))])
    unchanged = [[a == b for a, b in zip(first, other, strict=True)] for other in rest]
    assert [sum(row) for row in unchanged] == [1] * 8 if validation == 3 else 0 < np.sum(unchanged) < 8


@pytest.mark.slow
def test_a_fold_is_the_fit_of_its_rows():
    """The schema comes from all rows, so the fit gets it."""
    schema = jtrees.tables.schema(FRAME)
    swept = jtrees.sweep(RECIPE, FRAME, Y, key=KEY, validation=3)
    order = np.array_split(np.asarray(jax.random.permutation(jax.random.fold_in(KEY, 2**31 - 1), N)), 3)
    for part, fit in zip(order, swept.fits.ravel(), strict=True):
        rows = np.setdiff1d(np.arange(N), part)
        alone = jtrees.fit(RECIPE, FRAME.iloc[rows], Y[rows], key=jax.random.fold_in(KEY, 0), columns=schema)
        assert alone.model.encoder == fit.model.encoder
        np.testing.assert_array_equal(alone.predict(FRAME), fit.predict(FRAME))


@pytest.mark.slow
def test_tuned_options_do_not_depend_on_how_held_out_targets_are_encoded():
    losses = lambda y: [
        trial.loss
        for trial in jtrees.tune(RECIPE, FRAME, y, key=KEY, grid={"depth": (1, 2)}, validation=0.5).report.tuning.trials
    ]
    # A held-out target has no influence on its prediction, so it changes the loss by its own squared error alone.
    changes = [abs(losses(Y + 1e4 * (np.arange(N) == row))[0] - losses(Y)[0]) for row in range(8)]
    assert 0 < np.isclose(changes, 1e8 / (N / 2), rtol=0.02).sum() < 8


@pytest.mark.slow
def test_a_student_knows_no_held_out_prediction():
    """The teacher answers differently for one row, which is held out of some of the draws."""

    def student(changed):
        teacher = lambda frame: np.where(frame["living area"] == changed, 50.0, frame["living area"].fillna(0))
        return jtrees.distill(teacher, RECIPE, FRAME, key=KEY, synthetic=0, held_out=0.4).predict(FRAME)

    first = student(np.inf)
    assert 0 < sum(np.array_equal(student(size), first) for size in FRAME["living area"].dropna()[:8]) < 8


def test_an_encoder_takes_all_levels_of_a_schema():
    """A fold that lacks a level, a gap and every value of a column has the features of the others."""
    schema = jtrees.tables.schema(FRAME)
    names = TableEncoder.fit(FRAME, Y, columns=schema)[0].feature_names
    part = FRAME[(FRAME["city"] != "city 3") & FRAME["new"].fillna(False) & FRAME["living area"].isna()]
    encoder, features = TableEncoder.fit(part, Y[part.index], columns=schema)
    assert len(encoder.feature_names) == len(names) == features.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # all levels and gaps are known
        assert np.isfinite(encoder.transform(FRAME)).all()
