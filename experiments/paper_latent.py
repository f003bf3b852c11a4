"""LatentTree's tables: regression and classification beside CART, an MLP and boosting (Tables 1 and 2), hierarchical
clustering (Table 3), and the share of active nodes (Figures 6 and 7).

python -m experiments.paper_latent --data-dir DATA [--seeds 4] [--datasets kin8nm ...] [--parts tables ...]

The result of a (part, set) is a row of --out. The paper's own sets are too large to ship. Name them (Year, Higgs, ...)
as OpenML does, and they are fetched over the network.

A quarter of the rows are test rows, the same for all seeds. A fifth of the other rows is the validation set, which
chooses every method's options with the first seed. The final fit takes all rows that are not test rows; LatentTree and
the MLP hold out a tenth of them to choose the epoch. Test rows choose nothing.
"""

import argparse
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.cluster.hierarchy import linkage
from sklearn.cluster import Birch, KMeans
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

from experiments import benchmark, data, studies
from experiments.studies import percent, spread
import jtrees
from jtrees import routing
from jtrees.methods.latent_tree.architecture import Architecture
from jtrees.methods.latent_tree.modules import network_of
from jtrees.tasks import Regression

SETS = {  # passes over the data
    "cpu-act": 100,
    "ailerons": 100,
    "elevators": 100,
    "kin8nm": 100,
    "spambase": 100,
    "churn": 100,
    "connect-4": 20,
}
# Width of the predictor's hidden layers; 0 is a linear predictor.
GRID = {"depth": (4, 6), "width": (0, 64, 256), "learning_rate": (0.001, 0.01)}
PENALTY = 0.1
CLUSTERING = ((4, 5, 6), (0.1, 1.25), (0.001, 0.01))  # depth, penalty, learning rate
METHODS = ("LatentTree", "hierarchical k-means", "BIRCH")  # methods of clustering
PURITY = {"LatentTree": (0.468, 0.028), "hierarchical k-means": (0.508, 0.008), "BIRCH": (0.429, 0.013)}  # Table 3
ONLY = {"clustering": ("glass",), "pruning": ("glass",)}  # sets of the parts
PRUNED = ("batches of 8", "all rows")  # what the pruning is solved on
PENALTIES, PRUNING_DEPTH, PRUNING_BATCH, PRUNING_EPOCHS = (1.0, 10.0, 100.0), 6, 8, 60

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # training x and y, validation x and y


def parts_of(name: str, seed: int, data_dir: str | None) -> tuple[Split, Split, bool]:
    """Returns training and validation set; training and test set; and whether the task is classification."""
    table, _ = data.load_as_published(name, data_dir)
    classes = table.is_classification
    x, x_test, y, y_test = cut(table.x, table.y, 0.25, 0, classes)
    a, b, ya, yb = cut(x, y, 0.2, seed, classes)
    return (a, ya, b, yb), (x, y, x_test, y_test), classes


def cut(x: np.ndarray, y: np.ndarray, part: float, seed: int, classes: bool) -> Any:
    """Splits x and y into two parts."""
    return train_test_split(x, y, test_size=part, random_state=seed, stratify=y if classes else None)


def peers(classes: bool, seed: int) -> dict[str, list[Any]]:
    """Returns the rival methods, each as a list of candidates."""
    tree = DecisionTreeClassifier if classes else DecisionTreeRegressor
    boost = HistGradientBoostingClassifier if classes else HistGradientBoostingRegressor
    mlp = partial(MLPClassifier if classes else MLPRegressor, early_stopping=True, max_iter=200, random_state=seed)
    models = {
        "CART": [tree(max_depth=depth, random_state=seed) for depth in range(2, 17)],
        "MLP": [make_pipeline(StandardScaler(), mlp(hidden_layer_sizes=width)) for width in ((64, 64), (256, 256))],
        "boosting": [boost(learning_rate=rate, random_state=seed) for rate in (0.03, 0.1)],
    }
    if classes:
        return models
    # Their tolerances are absolute, and therefore all targets have unit variance.
    scaled = lambda model: TransformedTargetRegressor(model, transformer=StandardScaler())
    return {label: list(map(scaled, candidates)) for label, candidates in models.items()}


def recipe(width: int, epochs: int, **options: Any) -> jtrees.LatentTree:
    """Returns LatentTree with a predictor of some width."""
    mlp: Any = {"predictor": "mlp", "hidden": width, "dropout": 0.1} if width else {}
    plain: Any = {"precondition": 0.0, "early_stopping": False, "weight_decay": 0.0}
    return jtrees.LatentTree(penalty=PENALTY, epochs=epochs, **plain, **mlp, **options)


def task(classes: bool) -> Any:
    """Returns the task as jtrees.fit names it."""
    return "classification" if classes else "regression"


def fitted(latent: jtrees.LatentTree, split: Split, seed: int, classes: bool) -> jtrees.FitResult:
    """Fits LatentTree; the validation set chooses the epoch."""
    x, y, x_new, y_new = split
    return jtrees.fit(latent, x, y, key=jax.random.key(seed), validation=(x_new, y_new), task=task(classes))


def chosen(split: Split, seed: int, epochs: int, classes: bool) -> dict[str, Any]:
    """Returns the options of the grid with the lowest validation loss; the same rows choose the epoch."""
    (x, y, *validation), trials = split, []
    grid: Any = {name: GRID[name] for name in ("depth", "learning_rate")}
    how: Any = {"key": jax.random.key(seed), "validation": tuple(validation), "task": task(classes)}
    for width in GRID["width"]:
        tuned = jtrees.tune(recipe(width, epochs), x, y, grid=grid, **how).report.tuning.trials
        trials += [(trial.loss, trial.options | {"width": width}) for trial in tuned]
    return min(trials, key=lambda trial: trial[0])[1]


def tables_part(name: str, seeds: int, data_dir: str | None) -> dict[str, Any]:
    """Returns the test scores of every method; the first seed chooses the options."""
    out: dict[str, Any] = {"LatentTree": [], "train": [], "active": [], "tree": []}
    epochs, options = SETS.get(name, 20), {}
    for seed in range(seeds):
        part, (x, y, x_test, y_test), classes = parts_of(name, seed, data_dir)
        if seed == 0:
            options = chosen(part, seed, max(1, epochs // 4), classes)
        a, b, ya, yb = cut(x, y, 0.1, seed, classes)
        model = fitted(recipe(epochs=epochs, **options), (a, ya, b, yb), seed, classes).model
        out["LatentTree"].append(percent(model.predict(x_test), y_test))
        out["train"].append(percent(model.predict(x), y))
        out["active"].append(100 * float((model.network.active > 0).mean()))
        # The score of the tree without the predictor.
        alone = recipe(epochs=epochs, **options | {"width": 0, "inputs": "z"})
        tree: Any = fitted(alone, (a, ya, b, yb), seed, classes).tree
        out["tree"].append(percent(tree.predict(x_test), y_test))
        for label, models in peers(classes, seed).items():
            if seed == 0:
                scores = [percent(m.fit(*part[:2]).predict(part[2]), part[3]) for m in models]
                out[label], out[f"{label} chosen"] = [], int(np.argmax(scores))
            model = models[out[f"{label} chosen"]]
            out[label].append(percent(model.fit(x, y).predict(x_test), y_test))
        jax.clear_caches()
    return {"options": options, "classification": classes, **out}


def hierarchical_kmeans(x: np.ndarray, new: np.ndarray, depth: int, seed: int) -> np.ndarray:
    """Returns leaf numbers of new samples in a binary tree of two-means."""
    leaf, leaf_new = np.zeros(len(x), int), np.zeros(len(new), int)
    for _ in range(depth):
        right, right_new = np.zeros(len(x), int), np.zeros(len(new), int)
        for node in np.unique(leaf):
            inside, inside_new = leaf == node, leaf_new == node
            if len(np.unique(x[inside], axis=0)) > 1:
                means = KMeans(2, random_state=seed).fit(x[inside])
                right[inside] = means.labels_
                if inside_new.any():
                    right_new[inside_new] = means.predict(new[inside_new])
        leaf, leaf_new = 2 * leaf + right, 2 * leaf_new + right_new
    return leaf_new


def birch(x: np.ndarray, new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the nodes of new samples, and the parents in the dendrogram over BIRCH's subclusters."""
    clusters = Birch(threshold=0.5, n_clusters=None).fit(x)  # type: ignore[arg-type]
    joined = linkage(clusters.subcluster_centers_, "ward")
    subclusters = len(joined) + 1
    parent = np.full(subclusters + len(joined), -1)
    for i, (a, b, *_) in enumerate(joined):
        parent[[int(a), int(b)]] = subclusters + i
    turned = len(parent) - 1 - np.arange(len(parent))  # numbers parents before their children
    renumbered = np.full(len(parent), -1)
    renumbered[turned] = np.where(parent >= 0, len(parent) - 1 - parent, -1)
    return turned[clusters.predict(new)], renumbered


def dendrogram_purity(leaves: np.ndarray, labels: np.ndarray, parent: Any = None) -> float:
    """Returns the dendrogram purity of a hierarchy (Heller & Ghahramani, 2005), between 0 and 1.

    For a pair of samples of one class, take the samples below their lowest common ancestor, and the fraction of that
    class among these samples. The purity is the mean of this fraction over all such pairs. The pairs that meet at a
    node are the pairs below it without the pairs below its children.

    Args:
      leaves: leaf of each sample of a perfect binary tree, from 0; with ``parent``, the node of each sample.
      labels: class of each sample.
      parent: parent of each node of an arbitrary tree, -1 for the root. Parents come before their children.
    """
    if parent is None:
        inner = 2 ** int(leaves.max()).bit_length() - 1
        leaves, parent = leaves + inner, (np.arange(2 * inner + 1) - 1) // 2
    classes, class_index = np.unique(labels, return_inverse=True)
    below = np.zeros((len(parent), len(classes)))
    np.add.at(below, (leaves, class_index), 1)
    for node in range(len(parent) - 1, 0, -1):
        below[parent[node]] += below[node]
    pairs = below * (below - 1) / 2
    meet = pairs.copy()
    np.subtract.at(meet, parent[1:], pairs[1:])
    size = below.sum(1, keepdims=True)
    return float((meet * below / np.maximum(size, 1)).sum() / meet.sum())


def clustering_part(name: str, seeds: int, data_dir: str | None) -> dict[str, Any]:
    """Returns dendrogram purity on test rows and on all rows; the trees predict refractive index and sodium."""
    table = data.load(name, data_dir=data_dir)
    out: dict[str, Any] = {f"{method}, {rows}": [] for method in METHODS for rows in ("test", "all")}
    grid: Any = dict(zip(("depth", "penalty", "learning_rate"), CLUSTERING, strict=True))
    picked = []
    for seed in range(seeds):
        rows, rest = train_test_split(np.arange(len(table.x)), test_size=0.4, random_state=seed, stratify=table.y)
        validation, test = train_test_split(rest, test_size=0.5, random_state=seed)
        clusters, held_out = (
            jtrees.LatentClustering(target_features=(0, 1), early_stopping=False),
            (table.x[validation], table.y[validation]),
        )
        fit: Any = jtrees.tune(clusters, table.x[rows], key=jax.random.key(seed), grid=grid, validation=held_out)
        picked.append(list(fit.report.tuning.options.values()))
        means = hierarchical_kmeans(table.x[rows], table.x, fit.report.tuning.options["depth"], seed)
        nodes, parent = birch(table.x[rows], table.x)
        ends = dict(zip(METHODS, (fit.tree.leaf_index(table.x), means, nodes), strict=True))
        for method, leaves in ends.items():
            above = parent if method == "BIRCH" else None
            for label, index in (("test", test), ("all", np.arange(len(table.x)))):
                purity = dendrogram_purity(leaves[index], table.y[index], above)
                out[f"{method}, {label}"].append(purity)
    return {"chosen": picked, **out}


def pruning_part(name: str, seeds: int, data_dir: str | None) -> dict[str, Any]:
    """Returns active nodes, per cent, at the start of each epoch: in training batches, and on all rows."""
    table = data.load(name, data_dir=data_dir)
    x = (table.x - table.x.mean(0)) / np.sqrt(table.x.var(0)[2:].mean())
    inputs = jnp.asarray(x[:, 2:])
    targets = jnp.asarray((table.x[:, :2] - table.x[:, :2].mean(0)) / table.x[:, :2].std(0))
    batch = jtrees.Batch(inputs, targets)
    steps = len(x) // PRUNING_BATCH
    architecture = Architecture(PRUNING_DEPTH, inputs="z")
    order = np.random.default_rng(0).permutation(len(x))  # the file is sorted by class; batches must be mixed
    batches = inputs[order][: steps * PRUNING_BATCH].reshape(steps, PRUNING_BATCH, -1)

    def run(key: jax.Array, penalty: jax.Array, over: jax.Array) -> jax.Array:
        def active(params: Any) -> jax.Array:
            scores = jax.vmap(lambda x: network_of(params, x, architecture, Regression(2)).scores(x))(over)
            return 100 * (jax.vmap(routing.activity, (0, None))(scores, penalty) > 0).mean()

        method = jtrees.methods.latent(architecture, penalty, task=Regression(2))
        how: Any = {"steps": PRUNING_EPOCHS * steps, "batch_size": PRUNING_BATCH}
        how |= {"score_every": steps, "score": active}
        result: Any = jtrees.train(method, batch, key=key, optimizer=optax.adam(0.01), **how)
        return result.scores[::steps]

    keys = jax.random.split(jax.random.key(0), seeds)
    out = {}
    for label, over in zip(PRUNED, (batches, inputs[None]), strict=True):
        per_key = jax.vmap(run, (0, None, None))
        curves = jax.jit(jax.vmap(per_key, (None, 0, None)))(keys, jnp.asarray(PENALTIES) / PRUNING_BATCH, over)
        out[label] = np.asarray(curves).tolist()  # (penalties, seeds, epochs)
    return out


PARTS = {"tables": tables_part, "clustering": clustering_part, "pruning": pruning_part}


def settings(part: str, name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Returns the settings of a part; None if the set does not have the part."""
    if name not in ONLY.get(part, (name,)) or (part == "tables" and name == "glass"):
        return None
    return {
        "tables": {"epochs": SETS.get(name, 20), "grid": GRID, "penalty": PENALTY},
        "clustering": {"grid": CLUSTERING},
        "pruning": {"lambdas": PENALTIES, "epochs": PRUNING_EPOCHS},
    }[part]


def measure(part: str, name: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measures a part with all seeds."""
    return PARTS[part](name, options.seeds, options.data_dir)


# --- The report ------------------------------------------------------------------------------------------------------


def report(results: studies.Results, command: str) -> str:
    """Returns the tables, from the existing rows."""
    text = [
        "# LatentTree: the paper's tables\n",
        f"Made by `{command}` on {results.machines}. Mean ± standard deviation over seeds. Except for Glass, "
        "the sets differ from the paper's sets, which are too large to ship.\n",
    ]
    if tables := results.select("tables").rows:
        rows = []
        for row in tables:
            value = row.value
            metric = "accuracy" if value["classification"] else "R²"
            cells = [spread(value[method]) for method in ("LatentTree", "tree", "CART", "MLP", "boosting")]
            options = ", ".join(f"{name} {value['options'][name]}" for name in GRID)
            cells += [f"{np.mean(value['active']):.0f}", options, f"{row.seconds:.0f}"]
            rows.append([row.dataset, metric, str(len(value["CART"])), *cells])
        header = ["set", "", "seeds", "LatentTree", "its tree alone", "CART", "MLP", "boosting", "active nodes, %"]
        text.append(
            "## Test scores, per cent (Tables 1 and 2)\n\nAll seeds have the same test part. A fifth of the training "
            "part of the first seed chooses the options of every method. *Its tree alone*: trained with a linear "
            "predictor that sees z only, then hardened to one oblique tree with a constant in each leaf.\n\n"
            + benchmark.markdown([*header, "chosen", "seconds, all"], rows)
        )
    for row in results.select("clustering").rows:
        cells = lambda method, value=row.value: [spread(value[f"{method}, {rows}"], 3) for rows in ("test", "all")]
        rows = [[method, *cells(method)] for method in METHODS]
        paper = {method: f"{mean} ± {deviation}" for method, (mean, deviation) in PURITY.items()}
        text.append(
            f"## Dendrogram purity, {row.dataset} (Table 3)\n\nThe paper's figures: {paper['LatentTree']}, "
            f"hierarchical k-means {paper['hierarchical k-means']}, BIRCH {paper['BIRCH']} (214 rows; 205 rows here). "
            "60 % of the rows are training rows, 20 % validation rows, 20 % test rows. The validation error of the "
            "predicted features chooses depth, penalty, learning rate and epoch; labels choose nothing. The other two "
            "methods are fitted to the training rows, on all features without scaling: k-means to the same depth, "
            f"BIRCH with a threshold of 0.5. Chosen (depth, penalty, rate): {row.value['chosen']}. LatentTree's "
            "predictor sees z alone.\n\n" + benchmark.markdown(["", "test rows", "all rows"], rows)
        )
    for row in results.select("pruning").rows:
        rows = []
        for label in PRUNED:
            for penalty, curve in zip(PENALTIES, np.mean(row.value[label], axis=1), strict=True):
                shown = [f"{curve[min(i, len(curve) - 1)]:.0f}" for i in (0, 5, 10, 20, 40, 59)]
                rows.append([label, f"{penalty:.0f}", *shown])
        text.append(
            f"## Active nodes, per cent, {row.dataset} (Figures 6 and 7)\n\nDepth {PRUNING_DEPTH}, batches of "
            f"{PRUNING_BATCH}, the paper's penalty lambda for a batch; mean over seeds, at the start of an epoch. A "
            "node is active if any sample has q > -1/2 in it. More samples therefore activate more nodes.\n\n"
            + benchmark.markdown(["solved on", "lambda", *(f"epoch {i}" for i in (0, 5, 10, 20, 40, 59))], rows)
        )
    return "\n".join(text)


STUDY = studies.Study("paper_latent", __doc__, PARTS, [*SETS, "glass"], 4, measure, report, settings, together=True)

if __name__ == "__main__":
    studies.program(STUDY)
