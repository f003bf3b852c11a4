"""Fused kernels for the routing hot path, on TPUs and GPUs. They depend only on JAX.

Each kernel is a function with a plain definition (``implementation="xla"``), one body for all backends, and a custom
derivative. ``jtrees.ops`` calls a kernel where it is faster (``default.py``), or on request.

Start reading with ``routing.py``, which holds the body. ``layout.py`` defines the layout of a tree in memory,
``fold.py`` routes samples down the tree, and ``routes.py`` defines the factors of a routing. ``mosaic_tpu.py`` and
``triton.py`` read, write and sum.
"""

from pallas_kernels.choice import IMPLEMENTATIONS, Choice, Implementation, choose, differentiable, named, run
from pallas_kernels.config import DEEPEST, Config, Sizes
from pallas_kernels.default import Decision, Decisions, choices
from pallas_kernels.expected_loss import expected_loss
from pallas_kernels.hard_routing import hard_routing
from pallas_kernels.path_sum import path_sum
from pallas_kernels.soft_routing import soft_routing
from pallas_kernels.timing import Program
from pallas_kernels.unsupported import Unsupported

__all__ = [
    "DEEPEST",
    "IMPLEMENTATIONS",
    "Choice",
    "Config",
    "Decision",
    "Decisions",
    "Implementation",
    "Program",
    "Sizes",
    "Unsupported",
    "choices",
    "choose",
    "differentiable",
    "expected_loss",
    "hard_routing",
    "named",
    "path_sum",
    "run",
    "soft_routing",
]
