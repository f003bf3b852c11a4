"""TEL in place of a network's dense layers: CNN-Dense and CNN-TEL on MNIST (section 4.3, Table 4 of the paper).

python -m experiments.cnn_tel --data-dir DATA [--rows 10000] [--seeds 3] [--write]

The table has parameters, accuracy and test loss. A network has two convolutions, max pooling and dropout. Then come two
dense layers, or a narrow layer with batch normalisation and trees. The optimiser is Adam. The validation set is a tenth
of the training rows: its loss chooses the epoch and one of two learning rates.
"""

from functools import partial
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.model_selection import train_test_split

from experiments import benchmark, data, studies
from jtrees import nn

FILTERS, BATCH, EPOCHS, DROPOUT = 16, 128, 10, 0.3
RATES = (0.001, 0.003)
CLASSES = 10


class Network(nnx.Module):
    """Maps images ``(n, 28, 28, 1)`` to logits; ``trees`` chooses the head."""

    def __init__(self, trees: bool, *, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, FILTERS, (3, 3), padding="VALID", rngs=rngs)
        self.second = nnx.Conv(FILTERS, FILTERS, (3, 3), padding="VALID", rngs=rngs)
        self.dropout = nnx.Dropout(DROPOUT, rngs=rngs)
        wide = 12 * 12 * FILTERS
        self.norm = nnx.BatchNorm(16 if trees else wide, momentum=0.9, rngs=rngs)
        if trees:
            self.narrow = nnx.Linear(wide, 16, rngs=rngs)
            self.head = nn.TreeEnsemble(16, num_trees=10, depth=4, out_features=CLASSES, rngs=rngs)
        else:
            self.narrow = None
            self.hidden = nnx.Linear(wide, 128, rngs=rngs)
            self.head = nnx.Linear(128, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        features = nnx.relu(self.second(nnx.relu(self.first(images))))
        features = self.dropout(nnx.max_pool(features, (2, 2), strides=(2, 2)).reshape(len(images), -1))
        if self.narrow is not None:
            return self.head(self.norm(nnx.relu(self.narrow(features))))
        return self.head(nnx.relu(self.hidden(self.norm(features))))


def loss_of(model: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean log loss."""
    return optax.losses.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


# This is not a scan over steps: within a loop, XLA's convolutions on CPUs run on one core, several times slower.
@nnx.jit
def step(model: Network, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> None:
    """Makes a step of Adam."""
    optimizer.update(model, nnx.grad(loss_of)(model, images, labels))


@nnx.jit
def loss_and_accuracy(model: Network, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns log loss and accuracy."""
    logits = jnp.concatenate([model(part) for part in jnp.array_split(images, -(-len(images) // 1000))])
    loss = optax.losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (logits.argmax(1) == labels).mean()


def run(trees: bool, rate: float, seed: int, parts: Any) -> dict[str, float]:
    """Trains a network; returns the results of the epoch with the lowest validation loss."""
    (images, labels), validation, test = parts
    model = Network(trees, rngs=nnx.Rngs(seed))
    optimizer = nnx.Optimizer(model, optax.adam(rate), wrt=nnx.Param)
    evaluated = nnx.view(model, deterministic=True, use_running_average=True)
    numbers = sum(a.size for a in jax.tree.leaves(nnx.state(model, nnx.Param)))
    rng, best = np.random.default_rng(seed), {"validation": np.inf}
    used = len(images) // BATCH * BATCH
    for i in range(EPOCHS):
        for rows in rng.permutation(len(images))[:used].reshape(-1, BATCH):
            step(model, optimizer, images[rows], labels[rows])
        if (validation_loss := float(loss_and_accuracy(evaluated, *validation)[0])) < best["validation"]:
            loss, accuracy = map(float, loss_and_accuracy(evaluated, *test))
            best = {"validation": validation_loss, "loss": loss, "accuracy": accuracy, "epoch": i + 1}
    return best | {"numbers": numbers, "rate": rate}


def main(arguments: list[str] | None = None) -> None:
    """Measures, and writes the table."""
    options = benchmark.parse("cnn_tel", __doc__, arguments, data_dir=None, rows=10_000, seeds=3)
    table = data.load("mnist", data_dir=options.data_dir)
    x = jnp.asarray(table.x.reshape(-1, 28, 28, 1) / table.x.max(), jnp.float32)
    y = jnp.asarray(table.y, jnp.int32)
    split: Any = partial(train_test_split, random_state=0)
    rest, test = split(np.arange(len(y)), test_size=min(10_000, len(y) // 7), stratify=table.y)
    train, validation = split(rest[: options.rows], test_size=0.1)
    parts = [(x[rows], y[rows]) for rows in (train, validation, test)]
    results = benchmark.Table("network", "numbers", "accuracy", "test loss", "learning rate")
    for name, trees in (("CNN-Dense", False), ("CNN-TEL", True)):
        first = min((run(trees, rate, 0, parts) for rate in RATES), key=lambda result: result["validation"])
        runs = [first, *(run(trees, first["rate"], seed, parts) for seed in range(1, options.seeds))]
        accuracy, loss = (studies.spread([result[key] for result in runs], 4) for key in ("accuracy", "loss"))
        results.add(name, f"{first['numbers']:,}", accuracy, loss, f"{first['rate']:g}")
    notes = (
        f"MNIST, {len(train)} rows to train, {len(validation)} to validate, {len(test)} to test; {EPOCHS} epochs, "
        f"batches of {BATCH}, {FILTERS} filters. Mean and standard deviation over {options.seeds} seeds."
    )
    benchmark.write(options, results, notes)


if __name__ == "__main__":
    main()
