"""Speed of a sweep: 16 combinations x 4 seeds of GET, depth 4, 500 steps each, on kin8nm (embedded).

python -m experiments.bench_sweep [--write]
python -m experiments.bench_sweep --space [--samples 64]

One run times the following. First, a single compiled fit; its rounds use mostly one core, while a sweep has a run on
each core. Second, the sweep, once with compilation and then with other values. Third, processes that each make one of
the fits, two at a time, with and without a cache of compiled programs. Fourth, draws from a space with three depths, as
a compiled sweep and as compiled sequential fits; ``--space`` measures only this part. Fifth, the memory of a sweep
of 1000 runs in a process of its own.
"""

from concurrent.futures import ThreadPoolExecutor
import tempfile
import time

import numpy as np

from experiments import benchmark, data

RATES, PENALTIES, SEEDS = np.geomspace(0.003, 0.1, 8), (0.0, 1e-4), 4
EPOCHS = 250  # for each of two scale factors
REPEATS = 5
MANY = 1000
SAMPLES, SPACE_REPEATS = 64, 3
HEADER = ("what", "s", "s for all runs", "of compiled fits in turn")


def table() -> tuple[np.ndarray, np.ndarray]:
    """Returns features and targets."""
    loaded = data.load()
    return loaded.x, loaded.y


def single_fit() -> float:
    """Makes one fit in this process; returns its loss."""
    import jax

    import jtrees

    recipe = jtrees.GET(depth=4, starts=1, epochs=EPOCHS, learning_rate=0.01, precondition=0.0)
    return float(jtrees.fit(recipe, *table(), key=jax.random.key(0)).loss)


def many() -> dict[str, float]:
    """Makes a sweep of 1000 short runs in this process, and returns the peak memory before and after."""
    benchmark.use_all_cores()
    import jax

    import jtrees

    x, y = table()
    recipe = jtrees.GET(depth=4, starts=1, epochs=10, cart=False)
    jtrees.sweep(recipe, x, y, samples=[{}], seeds=64, key=jax.random.key(0))
    before = benchmark.peak_memory()
    grid = {"learning_rate": RATES.tolist()}
    losses = jtrees.sweep(recipe, x, y, grid=grid, seeds=MANY // 8, key=jax.random.key(0)).losses
    return {"before": before, "after": benchmark.peak_memory(), "runs": int(losses.size)}


def space_times(samples: int) -> dict[str, list[float]]:
    """Returns the seconds of a compiled sweep over draws from a space, and of compiled sequential fits of the draws."""
    import jax

    import jtrees

    x, y = table()
    recipe = jtrees.GET(starts=1, epochs=EPOCHS)
    ranges = {"learning_rate": jtrees.LogUniform(0.003, 0.1), "l1": jtrees.LogUniform(1e-7, 1e-3)}
    space, key = ranges | {"depth": (3, 4, 5)}, jax.random.key(0)
    draws = []

    def sweep() -> None:
        draws[:] = jtrees.sweep(recipe, x, y, space=space, samples=samples, key=key).options

    def fits() -> None:
        for options in draws:
            jtrees.fit(recipe.replace(**options), x, y, key=jax.random.fold_in(key, 0))

    return benchmark.in_turn({"sweep": sweep, "fits": fits}, SPACE_REPEATS)


def add_space(results: benchmark.Table, samples: int) -> None:
    """Adds the rows of the space."""
    times = space_times(samples)
    for label, name in (("fits of draws from", "fits"), ("samples of", "sweep")):
        seconds, ratio = np.median(times[name]), benchmark.ratio(times[name], times["fits"])
        text = f"{samples} {label} a space, compiled"
        results.add(text, benchmark.spread(times[name], 1), f"{seconds:.1f}", "1" if name == "fits" else ratio)


def processes(cache: str | None) -> float:
    """Returns the seconds of 64 processes of one fit, two at a time, extrapolated from four processes."""
    environment = {"JAX_COMPILATION_CACHE_DIR": cache} if cache else {}
    start = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: benchmark.isolated(single_fit, environment=environment), range(4)))
    return (time.perf_counter() - start) * 16


def main(arguments: list[str] | None = None) -> None:
    """Measures all parts and writes the table."""
    options = benchmark.parse("bench_sweep", __doc__, arguments, space=False, samples=SAMPLES)
    results = benchmark.Table(*HEADER)
    benchmark.use_all_cores()
    if options.space:
        add_space(results, options.samples)
        return print(results)
    import jax

    import jtrees

    x, y = table()
    key = jax.random.key(0)
    recipe = jtrees.GET(depth=4, starts=1, epochs=EPOCHS)
    compiled = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    fit = lambda: jtrees.fit(recipe.replace(learning_rate=0.02), x, y, key=key)
    fit()
    grid = lambda shift: {"learning_rate": RATES * (1 + shift), "l1": PENALTIES}
    sweep = lambda shift: jtrees.sweep(recipe, x, y, grid=grid(shift), seeds=SEEDS, key=key)
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
    memory = benchmark.isolated(many)
    results.add("one fit, compiled", benchmark.spread(alone, 1), f"{fits:.1f}", "1")
    spread, ratio = benchmark.spread(together, 1), all_runs / fits
    results.add(f"sweep of {runs}, compiled", spread, f"{all_runs:.1f}", f"{ratio:.2f}")
    results.add(f"sweep of {runs}, with compilation", f"{cold:.1f}", f"{cold:.1f}", f"{cold / fits:.2f}")
    results.add("processes, two at a time", "", f"{fresh:.0f}", f"{fresh / fits:.2f}")
    results.add("processes, programs cached", "", f"{cached:.0f}", f"{cached / fits:.2f}")
    add_space(results, options.samples)
    notes = (
        f"GET, depth 4, one start, {2 * EPOCHS} steps, {len(x)} rows; median ± half the middle half. The sweep "
        f"compiled {programs} programs that each took more than a tenth of a second (a sweep needs the start of a "
        f"search, a round, its end, and predictions of a tree). Processes take {fresh / cold:.1f} times the seconds of "
        f"the sweep with its compilation, and {fresh / all_runs:.1f} times the seconds of the compiled sweep. The "
        "draws from a space have depths 3, 4 and 5.\n\n"
        f"A sweep of {memory['runs']} runs of 20 steps takes at most {memory['after']:.2f} GB of memory; an earlier "
        f"sweep of 64 runs in the same process took {memory['before']:.2f} GB."
    )
    benchmark.write(options, results, notes)


if __name__ == "__main__":
    main()
