"""Estimates whether a kernel is faster than XLA on a chip where nothing was timed.

XLA writes and reads arrays of nodes x samples many times (``passes``). Its time is at least these bytes over the
bandwidth, if one such array exceeds the fast memory. Otherwise the compiler may keep the arrays there, and the estimate
says nothing. The time of a kernel is the largest of three times: bytes over the bandwidth, products over the peak
rate, and other operations over their peak rate. This time is divided by an efficiency.

``experiments.accelerators`` compiled both without a device. ``passes`` are the least of its table, and ``operations``
the most, so an estimate favours XLA. The kernels reached a fifth to a half of these rates on an H200. There XLA's
bytes explain two thirds to all of its time (``experiments/results/kernels/nvidia-h200.md``).
"""

from typing import NamedTuple

from pallas_kernels.config import NARROW, Sizes

EFFICIENCY = 0.2  # share of the peak rates that a kernel reaches
WINS = 1.5  # speed relative to XLA from which an estimate chooses a kernel


class Chip(NamedTuple):
    """The maker's figures for a chip.

    Attributes:
      backend: backend of the kernels.
      matrix: peak products of bfloat16 numbers, operations per second.
      vector: peak of other operations per second. For TPUs an estimate: 4 operations per lane, 1024 lanes, 1.5 GHz.
      memory: bytes per second.
      fast: bytes of an array from which the compiler cannot keep it in fast memory.
    """

    backend: str
    matrix: float
    vector: float
    memory: float
    fast: int


# By the beginning of the kind of device.
CHIPS = {
    "TPU v5 lite": Chip("mosaic_tpu", 197e12, 6e12, 819e9, 32 * 2**20),
    "TPU v6 lite": Chip("mosaic_tpu", 918e12, 6e12, 1640e9, 32 * 2**20),
    "NVIDIA H100": Chip("triton", 989e12, 33e12, 3350e9, 32 * 2**20),
    "NVIDIA H200": Chip("triton", 989e12, 33e12, 4800e9, 32 * 2**20),
}


class Work(NamedTuple):
    """The work of a kernel and its gradient.

    Attributes:
      passes: times that XLA reads or writes an array of nodes x samples.
      operations: operations of the kernel for each node and sample, except products.
      products: products of all weights with all samples.
    """

    passes: float
    operations: float
    products: int


WORK = {
    "mosaic_tpu": {
        "hard_routing": Work(8, 14, 1),
        "soft_routing": Work(27, 44, 2),
        "path_sum": Work(35, 49, 2),
        "expected_loss": Work(35, 59, 2),
    },
    "triton": {
        "hard_routing": Work(1.3, 88, 1),
        "soft_routing": Work(17, 180, 2),
        "path_sum": Work(22, 265, 3),
        "expected_loss": Work(27, 215, 2),
    },
}
_SPLIT = {"mosaic_tpu": 6, "triton": 18}  # products of bfloat16 numbers that make up a product of float32 numbers


class Estimate(NamedTuple):
    """Estimated seconds of XLA, at least, and of the kernel, at most."""

    plain: float
    kernel: float

    @property
    def wins(self) -> bool:
        """Whether the kernel is clearly faster."""
        return self.plain >= WINS * self.kernel


def chip_of(kind: str) -> Chip | None:
    """Returns the figures for a kind of device, or None."""
    return next((chip for name, chip in CHIPS.items() if kind.startswith(name)), None)


def plain_bytes(kernel: str, sizes: Sizes, chip: Chip) -> float:
    """Returns the bytes that XLA moves."""
    return WORK[chip.backend][kernel].passes * _scores(sizes) + _samples(sizes, chip)


def kernel_bytes(sizes: Sizes, chip: Chip) -> float:
    """Returns the bytes that a kernel moves, at most: samples, outputs and copies of the tree in its layout."""
    n, p, depth, k = sizes
    outputs = 4 * n * (1 if k == 1 else _width(k, chip))
    samples = 4 * n * -(-p // 8) * 8 if p <= NARROW else _samples(sizes, chip)
    return 2 * samples + 8 * outputs + 100 * 4 * 2**depth * _width(p, chip)


def estimated(kernel: str, sizes: Sizes, chip: Chip) -> Estimate:
    """Returns the estimated seconds of a kernel with its gradient on a chip."""
    n, p, depth, k = sizes
    work, nodes = WORK[chip.backend][kernel], 2**depth - 1
    spills = _scores(sizes) > chip.fast
    products = _SPLIT[chip.backend] * work.products * 2 * nodes * (_width(p, chip) + k) * n
    kernel_seconds = max(
        kernel_bytes(sizes, chip) / chip.memory,
        products / chip.matrix,
        work.operations * nodes * n / chip.vector,
    )
    return Estimate(spills * plain_bytes(kernel, sizes, chip) / chip.memory, kernel_seconds / EFFICIENCY)


def _scores(sizes: Sizes) -> float:
    """Returns the bytes of an array of nodes x samples."""
    return 4.0 * (2**sizes.depth - 1) * sizes.n


def _samples(sizes: Sizes, chip: Chip) -> float:
    """Returns the bytes of the samples."""
    return 4.0 * sizes.n * _width(sizes.p, chip)


def _width(columns: int, chip: Chip) -> int:
    """Returns the number of columns in memory, which a TPU pads to 128."""
    return -(-columns // 128) * 128 if chip.backend == "mosaic_tpu" else columns
