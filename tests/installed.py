"""Uses jtrees as it is installed, without extras: see the target ``wheel`` of the Makefile."""

from pathlib import Path
import tempfile

import jax
import numpy as np

import jtrees

CHECKOUT = Path(__file__).resolve().parent.parent

assert CHECKOUT / "jtrees" not in Path(jtrees.__file__).resolve().parents, f"not installed: {jtrees.__file__}"
x = np.random.default_rng(0).normal(size=(300, 4))
y = np.where(x[:, 0] + x[:, 1] > 0, 1.0, -1.0)
for recipe in (jtrees.GET(depth=2, starts=2, epochs=100, cart=False), jtrees.DGT(depth=2, epochs=30)):
    result = jtrees.fit(recipe, x, y, key=jax.random.key(0))
    assert result.loss < 0.3, result
    with tempfile.TemporaryDirectory() as folder:
        jtrees.save(result, Path(folder) / "tree.jtrees")
        loaded = jtrees.load(Path(folder) / "tree.jtrees")
    assert np.array_equal(loaded.predict(x), result.predict(x))
assert (Path(jtrees.__file__).parent / "report" / "page.html").is_file(), "the wheel lacks the template of reports"
print(f"jtrees {jtrees.__version__} is installed and works")
