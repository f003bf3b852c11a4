"""LatentTree's tree as a layer (Zantedeschi et al., "Learning Binary Decision Trees by Argmin
Differentiation", ICML 2021).
"""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import routing, topology, validation
from jtrees.methods.latent_tree.architecture import MAX_DEPTH, Split
from jtrees.methods.latent_tree.modules import make_split, split_scores


class LatentTree(nnx.Module):
    """A layer that maps samples to their traversals of a tree that is pruned during training (Zantedeschi et al. 2021).

    The layer maps ``(..., features)`` to ``(..., nodes)``. The output is z of :func:`jtrees.routing.position`, between
    0 and the activity of the node, for the ``2**(depth + 1) - 1`` nodes of the whole tree.

    The layer has two modes, like batch normalisation (``model.train()``, ``model.eval()``). Training uses the activity
    of the nodes on the batch. Evaluation uses the running mean of the activity, so outputs do not depend on the batch.

    Attributes:
      split: module of the split functions.
      bias: biases of the splits, ``(2**depth - 1,)``.
      active: running mean of the activity.
    """

    def __init__(
        self,
        features: int,
        depth: int,
        *,
        penalty: float,
        split: Split = "linear",
        hidden: int = 64,
        momentum: float = 0.9,
        use_running_average: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """Initialises a layer with random splits.

        Args:
          features: size of the last axis of the input.
          depth: depth of the tree, 1 to 10.
          penalty: penalty of an active node per sample, above 0, as for :func:`jtrees.methods.latent`.
          split: as for :class:`jtrees.LatentTree`.
          hidden: width of the hidden layer of ``split="mlp"``.
          momentum: momentum of the running mean.
          use_running_average: whether to use the running mean. ``model.eval()`` sets this option.
          dtype: dtype of the parameters.
          rngs: random streams for the parameters.

        Raises:
          ValueError: for a count, a penalty, a momentum or a depth out of range, or an unknown split.
        """
        validation.check_count("features", features)
        validation.check_count("hidden", hidden)
        validation.check_depth(depth, MAX_DEPTH)
        validation.check_number("penalty", penalty, above=0)
        validation.check_number("momentum", momentum, least=0, below=1)
        nodes = topology.num_nodes(depth)
        self.split = make_split(split, features, nodes, hidden=hidden, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(nodes, dtype))
        # The running mean has at least 32 bits. Rounding would remove small steps in fewer bits.
        self.active = nnx.BatchStat(jnp.ones(2 * nodes + 1, jnp.float32 if jnp.dtype(dtype).itemsize < 4 else dtype))
        self.features, self.penalty = features, penalty
        self.momentum, self.use_running_average = momentum, use_running_average

    def __call__(
        self, x: Float[Array, "*n features"], *, use_running_average: bool | None = None
    ) -> Float[Array, "*n nodes"]:
        """Returns traversals.

        Args:
          x: samples, any leading axes.
          use_running_average: overrides the setting of the layer.

        Raises:
          ValueError: if the size of the last axis differs from ``features``, if there are no samples, or if a split has
            the wrong shape.
        """
        flat = validation.flat_samples(x, self.features)
        scores = split_scores(self.split, self.bias[...], flat)
        if self.use_running_average if use_running_average is None else use_running_average:
            active = self.active[...].astype(scores.dtype)
        else:
            active = routing.activity(scores, self.penalty)
            mean = self.active[...]
            current = jax.lax.stop_gradient(active).astype(mean.dtype)
            self.active[...] = self.momentum * mean + (1 - self.momentum) * current
        return routing.position(routing.rewards(scores), active).T.reshape(*x.shape[:-1], -1)
