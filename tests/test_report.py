"""Reports: nested, typed, and printed as a short table. Those of all recipes are saved and loaded in test_battery."""

import dataclasses

import numpy as np
import pytest

from jtrees.ensembles import BestOfReport, PolishedReport
from jtrees.methods import AnnealedReport
from jtrees.search import FitReport, Preconditioning, Report, TrainingReport
from tests import recipes

OF_GET = AnnealedReport(
    chosen=3,
    dropped=0,
    cart_loss=0.123456789,
    ridge_loss=float("nan"),
    sharpness=np.ones((10, 2)),
    losses=np.ones((10, 2)),
    steps=np.ones((10, 2), int),
)
OF_POLISH = PolishedReport(losses=np.array([0.5, 0.25]), accepted=np.array([1]), base=OF_GET)
NESTED = FitReport(
    verdict="GET is better",
    seconds=1.5,
    recipe={"name": "GET", "depth": 2},
    search=BestOfReport(run=1, scores=np.ones(9), base=OF_POLISH),
)
TABLE = """\
FitReport
  verdict           GET is better
  ended             finished
  ended_at
  seconds           1.5
  recipe            {name=GET, depth=2}
  search            BestOfReport
    run             1
    scores          float64 (9,)
    base            PolishedReport
      losses        [0.5 0.25]
      accepted      [1]
      base          AnnealedReport
        chosen      3
        dropped     0
        cart_loss   0.123457
        ridge_loss  nan
        sharpness   float64 (10, 2)
        losses      float64 (10, 2)
        steps       int64 (10, 2)"""


def test_a_report_prints_as_a_table_of_what_is_there():
    assert str(NESTED) == TABLE


def test_the_representation_is_one_short_line():
    assert repr(OF_POLISH) == "PolishedReport(losses=[0.5 0.25], accepted=[1], base=AnnealedReport(...))"
    fit_text = repr(NESTED.replace(verdict="a sentence of many words", recipe={"name": "x" * 1000}))
    assert "\n" not in fit_text and len(fit_text) < 300


def test_names_are_those_of_what_is_there():
    how = Preconditioning(strength=0.9, losses=np.ones(3))
    assert TrainingReport().names() == []
    assert TrainingReport(preconditioning=how).names() == ["preconditioning.strength", "preconditioning.losses"]


def test_the_chosen_start_is_found_within_the_reports_of_bases():
    assert NESTED.chosen == FitReport(search=OF_GET).chosen == 3
    assert FitReport(search=TrainingReport()).chosen is None and FitReport().chosen is None


def test_a_report_is_data():
    with pytest.raises(dataclasses.FrozenInstanceError):
        OF_GET.chosen = 2
    assert OF_GET.replace(chosen=2).chosen == 2 and OF_GET.chosen == 3
    assert dataclasses.asdict(NESTED)["search"]["base"]["base"]["chosen"] == 3


def test_a_recipe_without_a_report_of_its_own_has_an_empty_one():
    assert str(Report()) == "Report" and Report().names() == []
    with pytest.raises(AttributeError, match="chosen"):
        Report().chosen  # noqa: B018


def test_reports_of_bases_are_within_that_of_the_fit(fitted):
    fit = fitted(recipes.BAGGED)
    assert [type(report) for report in fit.report.search.bases] == [TrainingReport, TrainingReport]
    assert "search.out_of_bag_score" in str(fit) and "2 of TrainingReport" in str(fit.report)
