"""What runs by default on accelerators: XLA or a kernel."""

from pallas_kernels import choices as choices

__all__ = ["choices"]
