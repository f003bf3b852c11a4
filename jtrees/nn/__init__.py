"""Trees as layers of flax (nnx) models. The layers are trained end to end."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.nn.latent_tree import LatentTree as LatentTree
from jtrees.nn.tree_ensemble import TreeEnsemble as TreeEnsemble

_list_public_names(__name__)
