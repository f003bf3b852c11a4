"""Fused kernels for the routing hot path, on TPUs and GPUs. They depend on JAX alone.

Each is a function with a plain definition (``implementation="xla"``), one body for all backends, and a custom
derivative. ``jtrees.ops`` calls them where they were measured to be faster, or on request.

A reader begins with ``routing.py``, which holds the body. ``layout.py`` says how a tree lies in memory, ``fold.py`` how
samples go down it, ``routes.py`` by which factors. ``mosaic_tpu.py`` and ``triton.py`` read, write and sum.
"""

from pallas_kernels.choice import IMPLEMENTATIONS, Choice, Implementation, choose, differentiable, named, run
from pallas_kernels.config import DEEPEST, Config, Sizes, Winner
from pallas_kernels.expected_loss import expected_loss
from pallas_kernels.hard_routing import hard_routing
from pallas_kernels.path_sum import path_sum
from pallas_kernels.soft_routing import soft_routing
from pallas_kernels.unsupported import Unsupported

__all__ = [
    "DEEPEST",
    "IMPLEMENTATIONS",
    "Choice",
    "Config",
    "Implementation",
    "Sizes",
    "Unsupported",
    "Winner",
    "choose",
    "differentiable",
    "expected_loss",
    "hard_routing",
    "named",
    "path_sum",
    "run",
    "soft_routing",
]
