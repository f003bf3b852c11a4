"""What a training step costs on many devices, worked out on paper: the table of docs/scaling.md.

python -m experiments.scaling
"""

from experiments import benchmark

# Of one device: a TPU v5e's size. Products in float32 (six passes of bfloat16 each: 33e12 operations a second at most)
# at a third of their peak; a ring of links; and what a reduction takes however small it is, by the number of devices.
OPERATIONS, LINK = 1e13, 1e11  # a second; bytes a second
LATENCY = {8: 10e-6, 64: 30e-6, 512: 80e-6}  # seconds

MODELS = {  # trees, nodes, leaves, features
    "GET, depth 6, p = 64": (1, 63, 64, 64),
    "DGT, depth 10, p = 64": (1, 1023, 1024, 64),
    "TEL, 100 trees, depth 6, p = 64": (100, 63, 64, 64),
    "DGT, depth 12, p = 784": (1, 4095, 4096, 784),
}


def cost(trees: int, nodes: int, leaves: int, p: int, devices: int) -> tuple[float, float, float]:
    """Bytes that a device sends in a step; its seconds; rows of a device that take as long to compute."""
    parameters = trees * (nodes * (p + 1) + leaves)
    sent = 2 * (devices - 1) / devices * 4 * parameters
    seconds = LATENCY[devices] + sent / LINK
    return sent, seconds, seconds * OPERATIONS / operations(trees, nodes, p)


def operations(trees: int, nodes: int, p: int) -> int:
    """Floating-point operations for a row: the scores, and their product back into the gradient."""
    return 4 * trees * nodes * (p + 1)


def main() -> None:
    """Prints the table."""
    header = ["model", "operations a row", "devices", "kB sent", "microseconds", "rows a device", "rows a batch"]
    rows = []
    for name, (trees, nodes, leaves, p) in MODELS.items():
        for devices in LATENCY:
            sent, seconds, least = cost(trees, nodes, leaves, p, devices)
            figures = [f"{sent / 1e3:,.0f}", f"{1e6 * seconds:.0f}", f"{least:,.0f}", f"{least * devices:,.0f}"]
            rows.append([name, f"{operations(trees, nodes, p):,}", str(devices), *figures])
    print(benchmark.markdown(header, rows))


if __name__ == "__main__":
    main()
