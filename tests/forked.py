"""What happens to models in forked processes, one case a line of JSON: ``python tests/forked.py FOLDER``.

The parent uses JAX and loads models; each case runs in a child of its own, which is ended after some seconds.
"""

import json
import multiprocessing
import os
from pathlib import Path
import sys
import warnings

SECONDS = 60
CONTEXT = multiprocessing.get_context("fork")


def in_child(case):
    """What a case returns in a forked child, the error that it ends with, or that it hung."""
    mine, its = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_send, args=(case, its))
    child.start()
    result = mine.recv() if mine.poll(SECONDS) else "it hung"
    child.kill()
    child.join()
    return result


def _send(case, to):
    try:
        to.send(case())
    except Exception as error:  # of any kind: the test shows it
        to.send(f"{type(error).__name__}: {error}")


def without_a_parents_backend():
    """JAX is imported and models are not loaded: the child has an XLA of its own."""
    import jax
    import numpy as np

    import jtrees

    recipe = jtrees.DGT(depth=1, epochs=2, batch_size=20, widths=())
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 2))
    return jtrees.fit(recipe, x, x[:, 0], key=jax.random.key(0)).predict(x).shape


def main(folder):
    """Prints the results."""
    warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
    print(json.dumps({"own backend": in_child(without_a_parents_backend)}), flush=True)
    import jax
    import numpy as np
    import pandas as pd

    import jtrees
    from jtrees import explain, selection
    from jtrees.estimators import TreeClassifier

    stored = dict(np.load(folder / "rows.npz"))  # read now: children share the place in an open file
    x = stored["x"]
    models = {path.stem: jtrees.load(path) for path in sorted(folder.glob("*.jtrees"))}
    table = pd.read_pickle(folder / "table.pickle")
    rows = lambda name: table if name == "table" else x
    key, recipe = jax.random.key(0), jtrees.DGT(depth=1, epochs=2, batch_size=20, widths=())
    tree = models["tree"]

    def difference(name):
        actual = models[name].predict(rows(name))
        return float(np.abs(np.asarray(actual, float) - stored[name]).max())

    def grandchild():
        if (child := os.fork()) == 0:
            os._exit(0 if difference("tree") < 1e-6 else 1)
        return os.waitpid(child, 0)[1]

    cases = {name: lambda name=name: difference(name) for name in models}
    cases |= {
        "leaf": lambda: int((tree.leaf_index(x) != stored["leaf"]).sum()),
        "decision path": lambda: int((tree.decision_path(x)[-1] - 3 != stored["leaf"]).sum()),
        "rules": lambda: len(tree.to_text()),
        "path": lambda: str(explain.path(tree, x[0])),
        "loaded in the child": lambda: float(
            np.abs(jtrees.load(folder / "tree.jtrees").predict(x) - stored["tree"]).max()
        ),
        "child of the child": grandchild,
        "not finite": lambda: tree.predict(np.where(x > 0, np.nan, x)).shape,
        "fit": lambda: jtrees.fit(recipe, x, x[:, 0], key=key).loss,
        "sweep": lambda: selection.sweep(recipe, x, x[:, 0], key=key).best,
        "tune": lambda: selection.tune(recipe, x, x[:, 0], key=key, grid={"depth": [1, 2]}).loss,
        "estimator fit": lambda: TreeClassifier(recipe).fit(x, x[:, 0] > 0).loss_,
        "shapley": lambda: explain.shapley_values(tree, x[:2], x[:4]).values.shape,
    }
    for name, case in cases.items():
        print(json.dumps({name: in_child(case)}), flush=True)
    print(json.dumps({"parent": difference("tree")}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
