"""Costs of a training step on many devices, by a formula: the table of docs/scaling.md.

python -m experiments.scaling
"""

from experiments import benchmark

# Figures of one device like a TPU v5e. Float32 products (six bfloat16 passes, at most 33e12 operations per second) run
# at a third of their peak. The links form a ring. The latency is the minimum time of a reduction, by number of devices.
OPERATIONS, LINK = 1e13, 1e11  # operations per second; bytes per second
LATENCY = {8: 10e-6, 64: 30e-6, 512: 80e-6}  # seconds

MODELS = {  # trees, nodes, leaves, features
    "GET, depth 6, p = 64": (1, 63, 64, 64),
    "DGT, depth 10, p = 64": (1, 1023, 1024, 64),
    "TEL, 100 trees, depth 6, p = 64": (100, 63, 64, 64),
    "DGT, depth 12, p = 784": (1, 4095, 4096, 784),
}


def cost(trees: int, nodes: int, leaves: int, p: int, devices: int) -> tuple[float, float, float]:
    """Returns the bytes that a device sends per step, their seconds, and the rows that compute for the same seconds."""
    parameters = trees * (nodes * (p + 1) + leaves)
    sent = 2 * (devices - 1) / devices * 4 * parameters
    seconds = LATENCY[devices] + sent / LINK
    return sent, seconds, seconds * OPERATIONS / operations(trees, nodes, p)


def operations(trees: int, nodes: int, p: int) -> int:
    """Returns the floating-point operations per row: the scores, and their product in the gradient."""
    return 4 * trees * nodes * (p + 1)


def main() -> None:
    """Prints the table."""
    header = ["model", "operations a row", "devices", "kB sent", "microseconds", "rows a device", "rows a batch"]
    rows = []
    for name, (trees, nodes, leaves, p) in MODELS.items():
        for devices in LATENCY:
            sent, seconds, minimum = cost(trees, nodes, leaves, p, devices)
            figures = [f"{sent / 1e3:,.0f}", f"{1e6 * seconds:.0f}", f"{minimum:,.0f}", f"{minimum * devices:,.0f}"]
            rows.append([name, f"{operations(trees, nodes, p):,}", str(devices), *figures])
    print(benchmark.markdown(header, rows))


if __name__ == "__main__":
    main()
