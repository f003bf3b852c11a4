"""The estimators in packages of others, used as their READMEs show: ``make test-clients``."""

import pickle

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

import jtrees
from jtrees.estimators import TreeClassifier, TreeRegressor
from tests import needs

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("standard_promotion"), pytest.mark.filterwarnings("default")]
RECIPES = {
    "GET": jtrees.GET(depth=2, starts=1, epochs=60),
    "Boosted": jtrees.Boosted(jtrees.GET(depth=2), rounds=5, patience=None),
    "TEL": jtrees.TEL(depth=2, trees=2, epochs=2),
}
GET = RECIPES["GET"]


@pytest.fixture(scope="module")
def frame():
    """A table with text and gaps, and a target."""
    rng = np.random.default_rng(0)
    x = pd.DataFrame({"age": rng.integers(18, 80, 300), "hours": rng.normal(40, 9, 300).round(1)})
    x["work"] = rng.choice(["private", "state", "own"], 300)
    y = 0.1 * x["age"] + (x["work"] == "own") * 4 + 0.05 * x["hours"] + rng.normal(0, 0.2, 300)
    return x, y


@pytest.fixture(scope="module")
def numbers(frame):
    return frame[0][["age", "hours"]], frame[1]


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", [TreeRegressor, TreeClassifier])
def test_skops(frame, kind, name, tmp_path):
    sio = needs.package("skops.io")
    x, y = frame
    model = kind(RECIPES[name], random_state=0).fit(x, y if kind is TreeRegressor else np.where(y > 8, "high", "low"))
    sio.dump(model, tmp_path / "model.skops")
    unknown = sio.get_untrusted_types(file=tmp_path / "model.skops")
    assert unknown and all(entry.startswith("jtrees.") for entry in unknown)
    loaded = sio.load(tmp_path / "model.skops", trusted=unknown)
    np.testing.assert_array_equal(loaded.predict(x), model.predict(x))
    assert str(loaded.report_) == str(model.report_) and str(loaded.model_) == str(model.model_)
    assert pickle.loads(pickle.dumps(loaded)).get_params() == model.get_params()


@pytest.mark.parametrize("form", ["skops", "cloudpickle"])
def test_mlflow(frame, form, tmp_path):
    mlflow, sio = needs.package("mlflow"), needs.package("skops.io")
    x, y = frame
    model = TreeRegressor(GET, random_state=0).fit(x, y)
    options = {"serialization_format": form}
    if form == "skops":
        options["skops_trusted_types"] = sio.get_untrusted_types(data=sio.dumps(model))
    mlflow.sklearn.save_model(model, tmp_path / "model", input_example=x.head(), **options)
    np.testing.assert_array_equal(mlflow.sklearn.load_model(str(tmp_path / "model")).predict(x), model.predict(x))
    np.testing.assert_array_equal(mlflow.pyfunc.load_model(str(tmp_path / "model")).predict(x), model.predict(x))


def test_mapie(numbers):
    regression = needs.package("mapie.regression")
    x, y = numbers
    intervals = regression.SplitConformalRegressor(
        TreeRegressor(GET, random_state=0), confidence_level=0.9, prefit=False
    )
    intervals.fit(x[:150], y[:150])
    intervals.conformalize(x[150:250], y[150:250])
    predicted, limits = intervals.predict_interval(x[250:])
    inside = (limits[:, 0, 0] <= y[250:]) & (y[250:] <= limits[:, 1, 0])
    assert predicted.shape == (50,) and inside.mean() > 0.75


def test_sktime():
    compose = needs.package("sktime.forecasting.compose")
    y = pd.Series(np.sin(np.arange(120) / 3), index=pd.period_range("2015-01", periods=120, freq="M"))
    forecaster = compose.make_reduction(TreeRegressor(GET, random_state=0), window_length=12, strategy="recursive")
    result = forecaster.fit(y[:110], fh=[1, 2, 3]).predict()
    assert list(result.index) == list(y.index[110:113]) and np.abs(result - y[110:113]).max() < 0.7


def test_mlforecast():
    mlforecast = needs.package("mlforecast")
    days = pd.date_range("2020", periods=100)
    series = [
        pd.DataFrame({"unique_id": i, "ds": days, "y": np.sin(np.arange(100) / 3) + k}) for k, i in enumerate("ab")
    ]
    forecast = mlforecast.MLForecast(models={"tree": TreeRegressor(GET, random_state=0)}, freq="D", lags=[1, 2, 7])
    result = forecast.fit(pd.concat(series)).predict(5)
    assert len(result) == 10 and np.isfinite(result["tree"]).all()


def test_shap_explains_an_estimator(numbers):
    shap = needs.package("shap")
    x, y = numbers
    model = TreeRegressor(GET, random_state=0).fit(x, y)
    explained = shap.Explainer(model.predict, x[:50])(x[:5])
    np.testing.assert_allclose(explained.values.sum(1) + explained.base_values, model.predict(x[:5]), atol=1e-6)
    ours = jtrees.explain.shapley_values(model.model_, x[:5], x[:50])
    np.testing.assert_allclose(ours.values, explained.values, atol=1e-4)


@pytest.mark.parametrize("raw", [False, True])
def test_a_waterfall_of_shap_names_the_columns(frame, raw):
    shap = needs.package("shap")
    mpl.use("agg")
    import matplotlib.pyplot as plt

    x, y = frame
    names = [*x] if raw else ["age", "hours"]
    x = x if raw else x[names].to_numpy()
    model = TreeRegressor(GET, random_state=0).fit(x, y)
    shapley = jtrees.explain.shapley_values(model.model_, x[:3], x[:50], feature_names=None if raw else names)
    axes = shap.plots.waterfall(shap.Explanation(**shapley._asdict())[0], show=False)
    shown = " ".join(label.get_text() for label in axes.get_yticklabels())
    plt.close("all")
    assert all(name in shown for name in names) and "Feature" not in shown
    assert raw or f"{x[0, 1]:g} = hours" in shown


def test_dice(numbers):
    dice_ml = needs.package("dice_ml")
    x, y = numbers
    table = x.assign(income=(y > 8).astype(int))
    model = TreeClassifier(GET, random_state=0).fit(x, table["income"])
    data = dice_ml.Data(dataframe=table, continuous_features=["age", "hours"], outcome_name="income")
    changes = dice_ml.Dice(data, dice_ml.Model(model=model, backend="sklearn"), method="random")
    rows = x[model.predict(x) == 0][:2]
    result = changes.generate_counterfactuals(rows, total_CFs=2, desired_class="opposite", random_seed=0)
    for example in result.cf_examples_list:
        assert (model.predict(example.final_cfs_df[["age", "hours"]].astype(float)) == 1).all()


def test_skrub(frame):
    skrub = needs.package("skrub")
    x, y = frame
    model = skrub.tabular_pipeline(TreeRegressor(GET, random_state=0)).fit(x, y)
    assert model.score(x, y) > 0.5
