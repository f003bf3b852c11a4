"""Strict settings for the whole suite, and the fixtures that several files share."""

import ctypes
import functools
import gc
import os
from pathlib import Path
import time

from hypothesis import settings
import jax
import jaxtyping
import numpy as np
import pytest

from tests import compiled, needs

# Shapes in signatures are checked in tests only, and the hook must be in place before jtrees is imported. Left out are
# modules whose data classes jax rebuilds with placeholders or with batch axes (tree, forest, leaves, training, search,
# methods), and isotonic, whose functions refuse wrong shapes themselves.
CHECKED = ["topology", "ops", "tasks.fits", "blocking", "validation", "warmstart", "leaves.shrunk"]
CHECKED += ["splitting"]
CHECKED += [f"routing.{name}" for name in ("steps", "soft", "hard", "path_sum", "violation", "traversal", "inference")]
jaxtyping.install_import_hook([f"jtrees.{module}" for module in CHECKED], "beartype.beartype")

# Most of the time goes into compilation, and most of that into machine code of a quality that these sizes have no use
# for. An empty XLA_FLAGS asks for the code that users get; what is marked as exact is tested so, too (make
# test-slow).
QUICK = ["backend_optimization_level=0", "llvm_disable_expensive_passes=true"]
if jax.__version_info__ < (0, 12):  # an XLA that does not know a flag ends the process
    # In one piece a program takes half the memory mappings, of which Linux allows a process 65 530.
    QUICK += ["cpu_use_fusion_emitters=false", "cpu_parallel_codegen_split_count=1"]
os.environ.setdefault("XLA_FLAGS", " ".join(f"--xla_{flag}" for flag in QUICK))

# Tests and their processes neither read nor write the user's folder of programs. A test of this folder names another.
os.environ["JTREES_CACHE"] = "0"

# Equal programs compile once, whichever process, run and checkout they are in. The count of compilations of a test also
# counts the programs that are read from the folder.
for name, value in compiled.settings().items():
    jax.config.update(name, value)

# To note where each operation of a program was written takes some per cent of the time.
jax.config.update("jax_traceback_in_locations_limit", 0)

# Tracing makes very many objects, few of them rings: to look for these as often as usual takes some per cent of the
# time.
gc.set_threshold(200_000, 50, 100)

# Dtypes never mix by accident. Rank promotion stays allowed: `y - outputs` over (n,) and (leaves, n) is how the node
# axis comes first everywhere in the library.
jax.config.update("jax_numpy_dtype_promotion", "strict")

settings.register_profile("jtrees", deadline=None, derandomize=True, max_examples=20)
settings.load_profile("jtrees")


def pytest_collection_finish():
    """What is there before the first test stays, and need not be looked through for rings."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)  # below the table of durations
def pytest_terminal_summary(terminalreporter):
    """Names what this machine lacks for the tests that were skipped."""
    if line := needs.summary(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(line)


_compilations: list[float] = []  # the seconds of each
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **_: _compilations.append(duration) if event.endswith("backend_compile_duration") else None
)

# A quick test may take so many processor seconds besides compilation. On a quiet machine it takes at most two.
_QUICK_SECONDS = 10.0


@pytest.fixture(autouse=True)
def _quick(request):
    """Fails a quick test that takes too long."""
    count, start = len(_compilations), time.process_time()
    yield
    seconds = time.process_time() - start - sum(_compilations[count:])
    if seconds > _QUICK_SECONDS and not any(map(request.node.get_closest_marker, ("slow", "wide"))):
        pytest.fail(f"took {seconds:.1f} processor seconds: make it faster, or mark it as slow", pytrace=False)


# Of memory: a process under Linux has 65 530, beyond which compilation aborts; and so many are about 4 GB.
_MAPPINGS = 30_000
_OFTEN = 100  # compilations after which to count mappings, which takes some milliseconds
_counted_at = [0]


@pytest.fixture(autouse=True)
def _few_mappings():
    """Drops the compiled programs of earlier tests before they have too many memory mappings."""
    if len(_compilations) - _counted_at[0] < _OFTEN:
        return
    _counted_at[0], maps = len(_compilations), Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MAPPINGS:
        jax.clear_caches()
        ctypes.CDLL(None).malloc_trim(0)  # else the allocator keeps all that was freed


@pytest.fixture
def count_compilations(monkeypatch):
    """A function that calls ``fn(*args)`` and says how many programs were compiled meanwhile.

    Programs of earlier tests do not make a fit drop those of this one.
    """
    from jtrees import compilation  # after the hook that checks shapes

    monkeypatch.setattr(compilation, "KEPT_PROGRAMS", 10**6)

    def count(fn, *args) -> int:
        before = len(_compilations)
        jax.block_until_ready(fn(*args))
        return len(_compilations) - before

    return count


@pytest.fixture
def x64():
    """Double precision inside one test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def standard_promotion():
    """For code that runs optax's Adam, which raises a float to an int32 power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="session")
def data() -> tuple[np.ndarray, np.ndarray]:
    """A small regression table in float32: oblique signal, some noise; x ``(200, 3)``, y ``(200,)``."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3))
    y = np.where(x[:, 0] + x[:, 1] > 0, 2.0, -1.0) + x[:, 2] + 0.1 * rng.normal(size=200)
    return x.astype(np.float32), y.astype(np.float32)


@pytest.fixture(scope="session")
def fitted():
    """A function of a recipe and of the name of targets in ``tables.TARGETS``: the result of a fit, trained once.

    Tests share the result, so they must not change its arrays.
    """
    import jtrees
    from tests import tables

    @functools.cache
    def fit(recipe, targets="regression"):
        with jax.numpy_dtype_promotion("standard"):
            options = {} if tables.TARGETS[targets].dtype.kind == "f" else {"task": "classification"}
            return jtrees.fit(recipe, tables.X, tables.TARGETS[targets], key=jax.random.key(0), **options)

    return fit


@pytest.fixture(scope="session")
def golden_dir() -> Path:
    """The folder of cases recorded from the authors' programs, beside that of the data sets."""
    data = os.environ.get("JTREES_DATA")
    folder = Path(data or ".").parent / "golden"
    needs.check(data and folder.is_dir(), "recorded cases (golden, beside JTREES_DATA)")
    return folder
