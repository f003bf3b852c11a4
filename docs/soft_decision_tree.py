"""A sixth method in one file: the soft decision tree of Frosst & Hinton, "Distilling a Neural Network Into a Soft
Decision Tree" (2017).

Each split goes right with probability ``sigmoid(beta_j (w_j x + b_j))``, where the sharpness ``beta_j`` is learnt with
the split, and a penalty asks splits to use both of their sides (their section 4.1). The loss is the one that a sample
expects over the leaves; unlike the paper's program, this one also regresses, and ends in the hard tree.

A method is three functions; a recipe is its options and a search. That is all: :class:`SoftDecisionTree` can be fitted,
tuned, swept, bagged, polished, saved, and put into the scikit-learn estimators.
"""

import jax
import jax.numpy as jnp
import optax

import jtrees
from jtrees import leaves, ops, pytree, routing, topology
from jtrees.search import Schedule, Search, minibatch, options


@pytree.dataclass
class SoftTree:
    """What is trained.

    Attributes:
      tree: splits and leaves.
      log_sharpness: logarithm of the sharpness of each split, ``(nodes,)``.
    """

    tree: jtrees.ObliqueTree
    log_sharpness: jax.Array

    def sharpened(self) -> jtrees.ObliqueTree:
        """The tree with the sharpness multiplied into its splits, which leaves the hard routing as it is."""
        sharpness = jnp.exp(self.log_sharpness)
        return self.tree.replace(weights=sharpness[:, None] * self.tree.weights, bias=sharpness * self.tree.bias)


def soft_decision_tree(depth: int, *, task: jtrees.tasks.Task, balance: float) -> jtrees.Method:
    """The method, for :func:`jtrees.train`.

    Args:
      depth: depth of the tree.
      task: what is predicted.
      balance: strength of the penalty on splits that send most samples one way; halved on each level.
    """
    kind, nodes = leaves.kind_of("constant", task), topology.num_nodes(depth)
    strength = jnp.concatenate([jnp.full(2**level, balance / 2**level) for level in range(depth)])

    def init(batch: jtrees.Batch, *, key: jax.Array) -> SoftTree:
        task.check(batch.y)
        splits_key, leaves_key = jax.random.split(key)
        splits = jax.random.normal(splits_key, (nodes, batch.x.shape[1] + 1), batch.x.dtype) / batch.x.shape[1] ** 0.5
        values = kind.start(leaves_key, nodes + 1, batch.x, batch.y, task.shape)
        tree = jtrees.ObliqueTree(splits[:, 1:], splits[:, 0], values)
        return SoftTree(tree, jnp.zeros(nodes, batch.x.dtype))

    def loss(params: SoftTree, batch: jtrees.Batch, *, key: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        tree, (x, y, weight) = params.sharpened(), batch
        expected, leaf = ops.expected_loss(tree.weights, tree.bias, tree.leaves, x, y, weight=weight)
        # alpha_j, the share of the samples at node j that goes right: cross entropy with one half (their equation 5).
        right = jax.nn.sigmoid(ops.scores(tree.weights, tree.bias, x))
        reach = routing.reach_probabilities(right)[:nodes]
        share = (reach * right).sum(1) / reach.sum(1)
        penalty = -(jnp.log(share) + jnp.log1p(-share)) / 2
        return expected + (strength * penalty).sum(), tree.leaves.criterion(leaf, x, y, weight)

    def harden(params: SoftTree, batch: jtrees.Batch) -> jtrees.ObliqueTree:
        return params.sharpened().refit(*batch)

    return jtrees.Method(init, loss, harden)


@pytree.dataclass(kw_only=True)
class SoftDecisionTree(jtrees.Recipe):
    """A soft decision tree, trained on mini-batches by Adam, as its hard tree.

    Features are scaled to mean 0 and deviation 1, targets to [0, 1]. The report has ``reached``, the number of internal
    nodes that at least one training row reaches.

    Attributes:
      depth: depth of the tree, 1 to 16.
      epochs: passes over the data.
      batch_size: samples in a mini-batch; n if that is less.
      learning_rate: of Adam.
      balance: strength of the penalty on splits that send most samples one way.
    """

    depth: int = options.depth(4)
    epochs: int = options.count(100)
    batch_size: int = options.count(128)
    learning_rate: float = options.positive(0.01)
    balance: float = options.not_negative(0.1)

    def search(self, task: jtrees.tasks.Task, shape: tuple[int, int]) -> Search:
        schedule = Schedule.of(shape[0], self.epochs, self.batch_size)
        return minibatch(
            task,
            soft_decision_tree(self.depth, task=task, balance=self.balance),
            optax.adam(self.learning_rate),
            schedule,
            elements_per_sample=8 * topology.num_nodes(self.depth),
            tree_leaves="constant",
        )
