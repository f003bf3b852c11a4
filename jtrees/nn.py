"""Trees as layers of flax (nnx) models, trained end to end with what is before and behind them."""

from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jtrees import routing, topology, validation
from jtrees.methods import latent


class LatentTree(nnx.Module):
    """How far each sample gets at every node of a tree that is pruned while it is learnt (Zantedeschi et al. 2021).

    ``(..., features) -> (..., nodes)``: z of :func:`jtrees.routing.traverse`, between 0 and the activity of the node,
    over the ``2**(depth + 1) - 1`` nodes of the whole tree. As with batch normalisation, the activity of the nodes is
    solved for on the batch in training, and its running mean is used in evaluation (``model.train()``,
    ``model.eval()``), so that an answer does not depend on the batch.

    Attributes:
      split: the split functions, as given.
      bias: of the splits, ``(2**depth - 1,)``.
      active: running mean of the activity.
    """

    def __init__(
        self,
        features: int,
        depth: int,
        *,
        penalty: float,
        split: latent.Split = "linear",
        hidden: int = 64,
        momentum: float = 0.9,
        use_running_average: bool = False,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        """A layer with random splits.

        Args:
          features: size of the last axis of what comes in.
          depth: depth of the tree, 1 to 10.
          penalty: price of an active node per sample, above 0, as for :func:`jtrees.latent`.
          split: as for :func:`jtrees.latent`.
          hidden: width of the hidden layer of ``split="mlp"``.
          momentum: of the running mean.
          use_running_average: whether to use that rather than the batch, as ``model.eval()`` sets it.
          dtype: of the parameters.
          rngs: for the parameters.

        Raises:
          ValueError: for a count, a penalty, a momentum or a depth out of range, or an unknown split.
        """
        validation.check_count("features", features)
        latent.check_depth(depth)
        validation.check_number("penalty", penalty)
        validation.check_part("momentum", momentum)
        nodes = topology.num_nodes(depth)
        self.split = latent.make_split(split, features, nodes, hidden=hidden, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(nodes, dtype))
        self.active = nnx.BatchStat(jnp.ones(2 * nodes + 1, dtype))
        self.features, self.penalty = features, penalty
        self.momentum, self.use_running_average = momentum, use_running_average

    def __call__(
        self, x: Float[Array, "*n features"], *, use_running_average: bool | None = None
    ) -> Float[Array, "*n nodes"]:
        """Traversals.

        Args:
          x: samples, any leading axes.
          use_running_average: instead of what the layer is set to.

        Raises:
          ValueError: for another last axis than ``features``, or a split that gives another shape than it should.
        """
        if x.ndim == 0 or x.shape[-1] != self.features:
            raise ValueError(f"x must have {self.features} features on its last axis, got shape {x.shape}")
        flat = x.reshape(-1, self.features)
        scores = latent.split_scores(self.split, flat, len(self.bias)) + self.bias[...][:, None]
        if self.use_running_average if use_running_average is None else use_running_average:
            active = self.active[...]
        else:
            active = latent.activity(scores, self.penalty)
            old = self.momentum * self.active[...]
            self.active[...] = old + (1 - self.momentum) * jax.lax.stop_gradient(active)
        return routing.position(routing.rewards(scores), active).T.reshape(*x.shape[:-1], -1)
