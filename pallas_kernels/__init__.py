"""Fused kernels for the routing hot path, on TPUs and GPUs. They depend on jax alone.

Each is a function with a plain definition (``implementation="xla"``), one body for all backends, and a custom
derivative. ``jtrees.ops`` calls them where they were measured to be faster (``backend.MEASURED``), or on request.
"""

from pallas_kernels.backend import IMPLEMENTATIONS, Config, Winner, winner
from pallas_kernels.conditional import conditional
from pallas_kernels.expected_loss import expected_loss
from pallas_kernels.hard_routing import hard_routing
from pallas_kernels.operands import DEEPEST
from pallas_kernels.path_sum import path_sum
from pallas_kernels.soft_routing import soft_routing

__all__ = [
    "DEEPEST",
    "IMPLEMENTATIONS",
    "Config",
    "Winner",
    "conditional",
    "expected_loss",
    "hard_routing",
    "path_sum",
    "soft_routing",
    "winner",
]
