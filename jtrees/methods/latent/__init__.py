"""LatentTree: a pruned tree trained by differentiating an argmin (Zantedeschi et al. 2021)."""

from jtrees.methods.latent.latent import LatentModel as LatentModel, LatentTree as LatentTree, latent as latent
from jtrees.methods.latent.network import (
    Architecture as Architecture,
    LatentNetwork as LatentNetwork,
    Network as Network,
    outputs_of as outputs_of,
    scores_of as scores_of,
)
