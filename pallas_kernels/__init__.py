"""Fused kernels for the routing hot path, depending on jax alone. None yet: XLA serves every operation."""
