"""Speed of a sweep: 16 combinations x 4 seeds of GET, depth 4, 500 steps each, on kin8nm (embedded).

python -m experiments.bench_sweep [--samples 64] [--write]

One run times the following. First, a single compiled fit; its rounds use mostly one core, while a sweep has a run on
each core. Second, the sweep, once with compilation and then with other values. Third, processes that each make one of
the fits, two at a time, with and without a cache of compiled programs. Fourth, draws from a space with three depths, as
a compiled sweep and as compiled sequential fits. Fifth, the memory of a sweep of 1000 runs in a process of its own.
"""

from concurrent.futures import ThreadPoolExecutor
import tempfile
import time
from typing import Any

import numpy as np

from experiments import benchmark, data

RATES, PENALTIES, SEEDS = np.geomspace(0.003, 0.1, 8), (0.0, 1e-4), 4
EPOCHS = 250  # for each of two scale factors
REPEATS, SPACE_REPEATS, MANY = 5, 3, 1000


def single_fit() -> float:
    """Makes one fit in this process; returns its loss."""
    import jax

    import jtrees

    recipe, table = jtrees.GET(depth=4, starts=1, epochs=EPOCHS, learning_rate=0.01, precondition=0.0), data.load()
    return float(jtrees.fit(recipe, table.x, table.y, key=jax.random.key(0)).loss)


def many() -> dict[str, float]:
    """Makes a sweep of 1000 short runs in this process, and returns the peak memory before and after."""
    benchmark.use_all_cores()
    import jax

    import jtrees

    table, recipe = data.load(), jtrees.GET(depth=4, starts=1, epochs=10, cart=False)
    jtrees.sweep(recipe, table.x, table.y, samples=[{}], seeds=64, key=jax.random.key(0))
    before, grid = benchmark.peak_memory(), {"learning_rate": RATES.tolist()}
    losses = jtrees.sweep(recipe, table.x, table.y, grid=grid, seeds=MANY // 8, key=jax.random.key(0)).losses
    return {"before": before, "after": benchmark.peak_memory(), "runs": int(losses.size)}


def space_times(samples: int) -> dict[str, list[float]]:
    """Returns the seconds of a compiled sweep over draws from a space, and of compiled sequential fits of the draws."""
    import jax

    import jtrees

    table, recipe, key, draws = data.load(), jtrees.GET(starts=1, epochs=EPOCHS), jax.random.key(0), []
    space: dict[str, Any] = {"learning_rate": jtrees.LogUniform(0.003, 0.1), "l1": jtrees.LogUniform(1e-7, 1e-3)}
    space |= {"depth": (3, 4, 5)}

    def sweep() -> None:
        draws[:] = jtrees.sweep(recipe, table.x, table.y, space=space, samples=samples, key=key).options

    def fits() -> None:
        for options in draws:
            jtrees.fit(recipe.replace(**options), table.x, table.y, key=jax.random.fold_in(key, 0))

    return benchmark.in_turn({"sweep": sweep, "fits": fits}, SPACE_REPEATS)


def processes(cache: str | None) -> float:
    """Returns the seconds of 64 processes of one fit, two at a time, extrapolated from four processes."""
    environment = {"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: benchmark.isolated(single_fit, environment=environment), range(4)))
    return (time.perf_counter() - start) * 16


def main(arguments: list[str] | None = None) -> None:
    """Measures all parts and writes the table."""
    options = benchmark.parse("bench_sweep", __doc__, arguments, samples=64)
    benchmark.use_all_cores()
    import jax

    import jtrees

    table, key, recipe = data.load(), jax.random.key(0), jtrees.GET(depth=4, starts=1, epochs=EPOCHS)
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    fit = lambda: jtrees.fit(recipe.replace(learning_rate=0.02), table.x, table.y, key=key)
    fit()
    grid = lambda shift: {"learning_rate": RATES * (1 + shift), "l1": PENALTIES}
    sweep = lambda shift: jtrees.sweep(recipe, table.x, table.y, grid=grid(shift), seeds=SEEDS, key=key)
    compiled.clear()
    [cold] = benchmark.seconds(lambda: sweep(0), 1)
    programs = sum(seconds > 0.1 for seconds in compiled)
    alone, together = [], []
    for i in range(REPEATS):
        alone += benchmark.seconds(fit, 3)
        together += benchmark.seconds(lambda i=i: sweep(0.01 * (1 + i)), 1)
    runs = RATES.size * len(PENALTIES) * SEEDS
    fits, all_runs = np.median(alone) * runs, np.median(together)
    with tempfile.TemporaryDirectory() as folder:
        fresh, _, cached = processes(None), processes(folder), processes(folder)
    memory, space = benchmark.isolated(many), space_times(options.samples)
    results, draws = benchmark.Table("what", "s", "s for all runs", "of compiled fits in turn"), options.samples
    for name, times, seconds, reference in (
        ("one fit, compiled", benchmark.spread(alone, 1), fits, fits),
        (f"sweep of {runs}, compiled", benchmark.spread(together, 1), all_runs, fits),
        (f"sweep of {runs}, with compilation", f"{cold:.1f}", cold, fits),
        ("processes, two at a time", "", fresh, fits),
        ("processes, programs cached", "", cached, fits),
        *(
            (f"{draws} {text} a space, compiled", benchmark.spread(space[name], 1), np.median(space[name]), None)
            for text, name in (("fits of draws from", "fits"), ("samples of", "sweep"))
        ),
    ):
        reference = np.median(space["fits"]) if reference is None else reference
        results.add(name, times, f"{seconds:.1f}", f"{seconds / reference:.2f}")
    notes = (
        f"GET, depth 4, one start, {2 * EPOCHS} steps, {len(table.x)} rows; median ± half the middle half. The sweep "
        f"compiled {programs} programs that each took more than a tenth of a second (a sweep needs the start of a "
        f"search, a round, its end, and predictions of a tree). Processes take {fresh / cold:.1f} times the seconds of "
        f"the sweep with its compilation, and {fresh / all_runs:.1f} times the seconds of the compiled sweep. The "
        "draws from a space have depths 3, 4 and 5.\n\n"
        f"A sweep of {memory['runs']} runs of 20 steps takes at most {memory['after']:.2f} GB of memory; an earlier "
        f"sweep of 64 runs in the same process took {memory['before']:.2f} GB."
    )
    benchmark.write(options, results, notes)


if __name__ == "__main__":
    benchmark.compile_all_programs()
    main()
