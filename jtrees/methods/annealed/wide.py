"""Linear leaves of wide tables: trees split and fit few features, which one linear map makes of all features."""

from jtrees.data.scaling import rows_for_slopes
from jtrees.leaves import narrow
from jtrees.leaves.narrow import Narrowing
from jtrees.leaves.shrunk import fit_narrowing
from jtrees.search import Problem, Run


async def narrowed(problem: Problem) -> tuple[Problem, Narrowing | None]:
    """Returns the problem of the training, which has no table, and the map to few features if leaves need one."""
    training = problem.replace(data=None)
    if problem.recipe.leaves != "linear" or problem.shape[1] <= narrow.WIDEST:
        return training, None
    rows = problem.batch
    if problem.data is not None:  # the leaves are refitted to the same rows
        rows, _ = problem.computed_once(rows_for_slopes, rows, problem.data.scaling.x_most)
    narrowing = (await training.replace(batch=rows).map(_find_narrowing)).host
    return training.preconditioned_by(narrowing.matrix), narrowing


def _find_narrowing(run: Run) -> Narrowing:
    """Returns the map to the few features that linear leaves of a wide table use."""
    return fit_narrowing(*run.batch)
