"""Newton boosting of any recipe that ends in a tree."""

from typing import Any

from jtrees import leaves as kinds, pytree
from jtrees.ensembles._boosting import Booster, rows_of_round
from jtrees.methods.get import GET
from jtrees.search import Recipe, Search, options
from jtrees.tasks import Policy, Regression, Task, check_log_loss
from jtrees.validation import quoted

_WEAK = GET(depth=5, starts=1, epochs=50, cart="binned", ridge=False, precondition=0, shrink=False, halving=False)


@pytree.dataclass(kw_only=True)
class Boosted(Recipe):
    """Gradient boosting with Newton steps (Friedman 2001; Friedman, Hastie & Tibshirani 2000).

    Round by round, a tree of the base is fitted by weighted least squares to the negative gradient of the loss divided
    by its curvature, on rows drawn anew, and added with a learning rate. It takes every loss of regression and
    classification, and refuses a :class:`jtrees.Policy`. The model is a :class:`jtrees.Forest` of summed outputs with
    the task's link; ``tree`` is None.

    With ``patience``, boosting ends after as many rounds without a lower loss on ``validation``, and the model has the
    rounds up to the lowest one. Without ``validation``, a fifth of the rows is held out at first to find the number of
    rounds, and then as many rounds are fitted to all rows; if that is ended by a deadline or Ctrl-C, the model is the
    first one. Fewer than 50 rows need ``patience=None``.

    The report has ``rounds``, the number of trees; ``losses``, the loss after each round on the rows that chose the
    number, on scaled targets, ``(rounds,)``, infinite for rounds not taken; ``dropped``, the number of rounds whose
    tree was not finite and was left out.

    Attributes:
      base: a recipe whose model is a tree, with constant or linear leaves; by default GET of depth 5 from CART over
        bins, 2 x 50 epochs. What a base prepares on the host, such as a tree of scikit-learn's CART, is that of the
        first round.
      rounds: largest number of trees.
      learning_rate: factor of each tree's outputs.
      subsample: part of the rows that each tree is fitted to, above 0 and up to 1; drawn without replacement.
      columns: part of the features that each tree is fitted to, likewise.
      l2: number of samples without a gradient that are added to each constant leaf.
      patience: rounds without a lower loss before boosting ends; None: it has all rounds.

    Example:
      >>> x = np.linspace(-1, 1, 40)[:, None]
      >>> base = jtrees.GET(depth=1, starts=1, epochs=10, cart="binned", halving=False)
      >>> recipe = jtrees.Boosted(base, rounds=5, learning_rate=0.5, patience=None)
      >>> fit = jtrees.fit(recipe, x, np.sign(x[:, 0]), key=jax.random.key(0))
      >>> print(len(fit.model), fit.predict(np.array([[-0.5], [0.5]])).round(1))
      5 [-1.  1.]
    """

    base: Recipe = pytree.field(kw_only=False, default=_WEAK, metadata={"check": options.checked_base})
    rounds: int = options.count(300)
    learning_rate: float = options.positive(0.1)
    subsample: float = options.share(0.8)
    columns: float = options.share(1.0)
    l2: float = options.not_negative(1.0)
    patience: int | None = options.optional_count(30)

    def targets(self, x: Any, y: Any) -> Any:
        return options.checked_base("base", self.base).targets(x, y)

    def search(self, task: Task, shape: tuple[int, int]) -> Search:
        if isinstance(task, Policy):
            raise ValueError("task must not be a Policy: a sum of trees plays no single action in a leaf")
        check_log_loss(task)
        n, p = shape
        steps_of = Regression(task.shape[0] if task.shape else None)  # what the base fits
        # The base's leaves are replaced, so it need not find out how far to shrink them.
        base = self.base.replace(shrink=False) if hasattr(self.base, "shrink") else self.base
        base = base.search(steps_of, (rows_of_round(n, self.subsample), p))
        if base.tree_leaves is None:
            raise ValueError(f"base must end in a single tree, got {quoted(self.base)}")
        booster = Booster(
            task,
            base,
            kinds.kind_of(base.tree_leaves, steps_of),
            p,
            rounds=self.rounds,
            learning_rate=self.learning_rate,
            subsample=self.subsample,
            columns=self.columns,
            l2=self.l2,
            patience=self.patience,
        )
        return booster.search()
