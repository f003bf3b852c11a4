"""What runs by default on an accelerator: timings on a made device, estimates, files, and nothing at all on a CPU."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial
import json
import threading
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jtrees
from jtrees import leaves as kinds
import pallas_kernels as kernels
from pallas_kernels import Sizes, Unsupported, choice, default, estimate, timing
from pallas_kernels.config import HEURISTIC
from pallas_kernels.routes import ROUTES

KINDS = {"v5e": "TPU v5 lite", "v6e": "TPU v6 lite", "H100": "NVIDIA H100 80GB HBM3"}
LARGE, SMALL = Sizes(65_536, 32, 8, 1), Sizes(64, 3, 2, 2)
EXPECTED_LOSS = kernels.Program("expected_loss", "", kernels.expected_loss)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Each test begins without a decision, with an empty folder."""
    default._DECISIONS.clear()
    monkeypatch.delenv("JTREES_KERNELS", raising=False)
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)
    default._DECISIONS.clear()


def on(kind):
    """Context of a made device, on which nothing can run."""
    platform = "tpu" if kind.startswith("TPU") else "cuda"
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def accept(config):
    """A check that refuses nothing."""


FIRST, SECOND = default.candidates("mosaic_tpu")
MADE = {None: 3e-3, FIRST: 2e-3, SECOND: 1e-3}


PATH_SUM = kernels.Program("path_sum", "", lambda how, x, y, *tree: kernels.path_sum(x, *tree, implementation=how))


def decide(times, program=PATH_SUM, sizes=LARGE, **options):
    """The decision on a made TPU, where a candidate takes its seconds, or fails with its error."""
    calls = []

    def seconds_of(sizes, candidate):
        calls.append(candidate)
        if isinstance(times[candidate], Exception):
            raise times[candidate]
        return times[candidate]

    with on("TPU v9"):
        return default.decide(program, sizes, "mosaic_tpu", accept, seconds_of, **options), calls


LARGER = RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("times", "best", "reason"),
    [
        (MADE, SECOND, "Timed: XLA"),
        (MADE | {SECOND: 9.0}, FIRST, "Timed: XLA"),
        (MADE | {None: 1e-4}, None, "Timed: XLA"),
        (MADE | {SECOND: LARGER}, FIRST, "failed: RuntimeError: out of memory"),
        (MADE | {None: LARGER}, None, "No figures for this kind of device."),
    ],
)
def test_the_fastest_candidate_is_chosen(times, best, reason):
    """Without a time of XLA, the estimate decides."""
    decision, calls = decide(times)
    assert decision.config == best and reason in decision.reason and calls == [None, FIRST, SECOND]


def test_a_kind_of_work_is_timed_once():
    first, _ = decide(MADE)
    second, calls = decide(MADE | {None: 0.0})
    assert second is first and calls == []
    _, calls = decide(MADE, sizes=LARGE._replace(p=33))
    assert calls
    assert len(kernels.choices()) == 2 and "path_sum on TPU v9" in str(jtrees.kernels.choices())


def test_timings_end_at_the_limit():
    """By a fake clock. A time that comes after the limit does not count."""
    moments = iter([0.0, 0.0, 0.5, 1.0, 1.5, 2.5, 2.5, 2.5])
    times, notes = timing.timed(LARGE, [None, FIRST, SECOND], lambda *_: 1.0, 1.0, lambda: next(moments))
    assert list(times) == [None] and not notes


def test_decisions_are_kept_in_a_folder(folder):
    first, _ = decide(MADE)
    [file] = (folder / "kernels").glob("*.json")
    assert jax.__version__.replace(".", "-") in file.name
    default._DECISIONS.clear()
    second, calls = decide(MADE)
    assert second == first and calls == []
    file.write_text('{"config": 3')  # a damaged file is replaced
    default._DECISIONS.clear()
    third, calls = decide(MADE)
    assert third == first and calls and json.loads(file.read_text())["config"]["tile"] == SECOND.tile


def test_the_first_process_decides_for_all(monkeypatch):
    """Two processes with a common store; the second process would decide otherwise."""
    store = {}
    jax.config.update("jax_compilation_cache_dir", None)
    get = lambda name, timeout: store[name]
    client = SimpleNamespace(key_value_set=store.__setitem__, blocking_key_value_get=get)
    monkeypatch.setattr(default.coordinator.global_state, "client", client)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    decisions = []
    for process, times in enumerate((MADE, MADE | {None: 1e-9})):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        default._DECISIONS.clear()
        decisions.append(decide(times)[0])
    assert decisions[0] == decisions[1] and decisions[1].config == SECOND
    store.clear()
    default._DECISIONS.clear()
    assert "The first process decided nothing." in decide(MADE)[0].reason


def test_threads_agree():
    barrier = threading.Barrier(4)

    def decided(_):
        barrier.wait(10)
        return decide(MADE)

    with ThreadPoolExecutor(4) as pool:
        decisions = list(pool.map(decided, range(4)))
    assert all(decision is decisions[0][0] for decision, _ in decisions)
    assert sum(bool(calls) for _, calls in decisions) == 1


def calls(module):
    """Calls of each kernel by default, by name of the program that a timing would run."""
    n, p, depth, k = SMALL
    x, y = jnp.ones((n, p)), jnp.ones((n, k))
    w, b, v = jnp.ones((2**depth - 1, p)), jnp.ones(2**depth - 1), jnp.ones((2**depth, k))
    if module == "ops":
        losses = lambda leaves, y, route: lambda: jtrees.ops.expected_loss(w, b, leaves, x, y, route=route)
        yield "hard_routing", lambda: jtrees.ops.hard(w, b, x)
        yield "path_sum", lambda: jtrees.ops.path_sum(w, b, v, x)
        for route in ("sigmoid", "violation"):
            yield f"soft_routing, {route}", partial(jtrees.ops.soft, w, b, v, x, route)
            yield f"expected_loss, {route}, squared", losses(kinds.Values(v), y, route)
            yield (
                f"expected_loss, {route}, log",
                losses(kinds.Values(v, jtrees.losses.LogLoss()), jnp.zeros(n, int), route),
            )
        return
    losses = partial(kernels.expected_loss, weights=w, bias=b, leaves=v, implementation=None)
    yield "hard_routing", lambda: kernels.hard_routing(x, w, b, v, implementation=None)
    yield "path_sum", lambda: kernels.path_sum(x, w, b, v, implementation=None)
    for route in ROUTES:
        yield f"soft_routing, {route}", partial(kernels.soft_routing, x, w, b, v, route=route, implementation=None)
        yield f"expected_loss, {route}, squared", partial(losses, x, y, route=route)
        yield f"expected_loss, {route}, log", partial(losses, x, jnp.zeros(n, int), loss="log", route=route)


@pytest.mark.parametrize("module", ["ops", "kernels"])
def test_a_timing_runs_the_program_that_the_call_would_run(module, monkeypatch):
    """The plain program and the kernel of a timing agree, and both are called through the module of the call."""
    programs = []
    monkeypatch.setattr(choice, "default", lambda program, *_: programs.append(program))
    for name, call in calls(module):
        call()
        program = programs.pop()
        assert program.name == name and not programs and module in program.call.__module__
        (plain, arrays), (fused, _) = (timing.made(program, SMALL, how) for how in ("xla", "interpret"))
        expected = jax.jit(plain)(*arrays)
        assert not programs
        if module == "ops" and "violation" not in name:  # test_kernels.py compares all kernels with their definitions
            chex.assert_trees_all_close(jax.jit(fused)(*arrays), expected, rtol=1e-3, atol=1e-4)


def test_a_timing_takes_time():
    assert timing.seconds_of(PATH_SUM, SMALL, None) > 0


KERNELS = {
    "hard_routing": "hard_routing",
    "gradient of soft_routing": "soft_routing",
    "gradient of path_sum": "path_sum",
    "step of expected_loss": "expected_loss",
}


def rows():
    """The rows of the committed table of compilations: chip, kernel, sizes, bytes of XLA and of the kernel."""
    from experiments.accelerators import TABLE

    table = json.loads(TABLE.read_text())
    for name, cost in table.items():
        chip, _, rest = name.partition(", ")
        if not name.endswith(", xla") or (kernel := KERNELS.get(rest.split(", n = ")[0])) is None:
            continue
        n, p, depth, k = (int(part.split()[-1]) for part in rest.split(", ")[1:-1])
        fused = next(c for other, c in table.items() if other.startswith(name[:-3]) and other != name)
        yield chip, kernel, Sizes(n, p, depth, k), cost.get("moved"), fused.get("moved")


def test_estimates_agree_with_compiled_programs():
    """Estimates favour XLA: its bytes are at most the compiled ones, and the kernel's bytes are at least these."""
    ratios = {"xla": [], "kernel": []}
    for chip, kernel, sizes, plain, fused in rows():
        figures = estimate.chip_of(KINDS[chip])
        if plain is not None:
            ratios["xla"].append(plain / estimate.plain_bytes(kernel, sizes, figures))
        if fused is not None and figures.backend == "mosaic_tpu":
            ratios["kernel"].append(estimate.kernel_bytes(sizes, figures) / fused)
    assert len(ratios["xla"]) > 50 and len(ratios["kernel"]) > 30
    for name, values in ratios.items():
        assert min(values) > 0.95 and max(values) < 6, name
        assert np.median(values) < 2.2, name


def test_kernels_that_run_without_a_timing():
    """Of the large size of the table: all but one on TPUs, and none on an H100."""
    chosen = {}
    for chip, kernel, sizes, *_ in rows():
        seconds = estimate.estimated(kernel, sizes, estimate.chip_of(KINDS[chip]))
        chosen[chip, kernel, sizes.n] = seconds.wins
    for kernel in KERNELS.values():
        assert chosen["v6e", kernel, LARGE.n]
        assert chosen["v5e", kernel, LARGE.n] == (kernel != "hard_routing")
        assert not chosen["H100", kernel, LARGE.n]
        assert not chosen["v5e", kernel, 4096]  # XLA can keep its arrays in fast memory


def test_an_abstract_device_is_not_timed(monkeypatch):
    with on(KINDS["v5e"]):
        assert kernels.choose(EXPECTED_LOSS, None, LARGE).configs == (HEURISTIC["mosaic_tpu"],)
        assert kernels.choose(EXPECTED_LOSS, None, LARGE._replace(n=4096)).configs == ()
        assert kernels.choose(EXPECTED_LOSS, "xla", LARGE).configs == ()
        monkeypatch.setenv("JTREES_KERNELS", "xla")
        assert kernels.choose(EXPECTED_LOSS, None, LARGE).configs == ()
        monkeypatch.setenv("JTREES_KERNELS", "fast")
        with pytest.raises(ValueError, match="JTREES_KERNELS must be one of 'auto', 'xla', got 'fast'"):
            kernels.choose(EXPECTED_LOSS, None, LARGE)
    assert all("Estimated" in decision.reason for decision in kernels.choices())


def test_sizes_that_a_kernel_refuses_run_in_xla():
    def refuse(config):
        raise Unsupported("too large")

    with on(KINDS["v5e"]):
        decision = default.decide(PATH_SUM, LARGE, "mosaic_tpu", refuse, None)
    assert decision.config is None and "does not support" in decision.reason


def test_nothing_is_decided_or_compiled_on_a_cpu(count_compilations, folder):
    x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
    tree = jax.device_put((x[:3], x[:3, 0], x[:4, :1]))
    call = jax.jit(lambda x: jtrees.ops.soft(*tree, x))
    assert count_compilations(call, x) == 1
    assert kernels.choices() == () and "No decision yet" in str(kernels.choices())
    assert not (folder / "kernels").exists()
