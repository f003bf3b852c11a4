"""Decides what runs by default on an accelerator: XLA or a kernel.

The first call of a kind of work decides for the process, and for later processes if programs are kept in a folder
(``jax_compilation_cache_dir``). Work has a kind of device, a program that calls a kernel, and sizes. In this order:

1. a decision of an earlier process, from the folder;
2. a timing on made data, within :data:`SECONDS`, if the device is here;
3. the estimate of ``estimate.py``.

The first process decides for all processes. On a CPU, and with ``JTREES_KERNELS=xla``, XLA runs by default, and nothing
is decided.
"""

from collections.abc import Callable, Sequence
import contextlib
from functools import partial
import json
import os
from pathlib import Path
import re
import tempfile
import threading
from typing import Any, NamedTuple

import jax
from jax._src import distributed as coordinator

from pallas_kernels import estimate, timing
from pallas_kernels.config import HEURISTIC, Config, Sizes, device_kind
from pallas_kernels.unsupported import Unsupported

MODES = ("auto", "xla")
SECONDS = 2.0  # for all candidates of a kind of work
_MOST = 2**20  # samples of the largest bucket; times beyond are proportional
_WAIT = 60_000  # milliseconds for which a process waits for the decision of the first process
_PLATFORMS = {"tpu": "mosaic_tpu", "gpu": "triton", "cuda": "triton"}
Key = tuple[str, str, Sizes]  # kind of device, name of the program, sizes
_DECISIONS: dict[Key, "Decision"] = {}
_LOCK = threading.Lock()


class Decision(NamedTuple):
    """What runs by default for a kind of work.

    Attributes:
      device: kind of device.
      program: name of the kernel, and the variant of the program that calls it.
      sizes: sizes of the calls, with the largest number of samples of their bucket.
      config: the kernel's sizes of blocks; None: XLA.
      reason: why.
    """

    device: str
    program: str
    sizes: Sizes
    config: Config | None
    reason: str

    def __str__(self) -> str:
        name = "XLA" if self.config is None else self.config.backend
        sizes = ", ".join(f"{name} = {value:,}" for name, value in self.sizes._asdict().items())
        return f"{self.program} on {self.device} ({sizes}): {name}. {self.reason}"


class Decisions(tuple[Decision, ...]):
    """Decisions of this process; ``print`` shows one in each line."""

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) or "No decision yet: nothing ran on an accelerator, or all was requested."


def choices() -> Decisions:
    """Returns what this process chose to run by default on accelerators, and why."""
    return Decisions(_DECISIONS.values())


def default(
    program: timing.Program, sizes: Sizes, check: Callable[[Config], None], not_by: Sequence[str] = ()
) -> Config | None:
    """Returns the kernel that runs by default, or None for XLA.

    A timing runs the program. ``check`` raises :class:`Unsupported` for a configuration that cannot run the call. The
    backends ``not_by`` cannot run the kernel at any size.
    """
    how = os.environ.get("JTREES_KERNELS") or "auto"
    if how not in MODES:
        raise ValueError(f"JTREES_KERNELS must be one of {', '.join(map(repr, MODES))}, got {how!r:.80}")
    if how == "xla":
        return None
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    platform = abstract.platform if abstract else jax.default_backend()
    backend = _PLATFORMS.get(platform)
    if backend is None or backend in not_by or program.kernel not in estimate.WORK[backend]:
        return None
    bucket = sizes._replace(n=min(_MOST, 1 << (sizes.n - 1).bit_length()))
    return decide(program, bucket, backend, check, None if abstract else partial(timing.seconds_of, program)).config


def decide(
    program: timing.Program,
    sizes: Sizes,
    backend: str,
    check: Callable[[Config], None],
    seconds_of: timing.SecondsOf | None,
    limit: float = SECONDS,
) -> Decision:
    """Returns the decision for a kind of work, with the sizes of a bucket, which is made once.

    ``check`` is as for :func:`default`. ``seconds_of`` times a candidate, within ``limit`` seconds for all timings;
    None if the device is not here.
    """
    key = device_kind(), program.name, sizes
    with _LOCK:
        if key not in _DECISIONS:
            rule = _estimated(key, program.kernel, backend, check)
            make = lambda: _decided(rule, backend, check, seconds_of, limit)
            _DECISIONS[key] = rule if seconds_of is None else _agreed(key, make, rule)
        return _DECISIONS[key]


def _decided(rule: Decision, backend: str, check: Any, seconds_of: Any, limit: float) -> Decision:
    key = rule[:3]
    if (stored := _read(key)) is not None:
        return stored
    configs = [config for config in candidates(backend) if _runs(check, config)]
    if not configs:
        return rule
    times, notes = timing.timed(key[2], [None, *configs], seconds_of, limit)
    if None not in times or len(times) == 1:
        why = f"Nothing to compare within {limit:g} s: {notes}" if notes else f"No timing within {limit:g} s."
        return rule._replace(reason=f"{rule.reason} {why}")
    best = min(times, key=lambda config: times[config])
    texts = [f"{'XLA' if config is None else config.backend} {1e3 * value:.3g} ms" for config, value in times.items()]
    decision = Decision(*key, best, f"Timed: {', '.join(texts)}.{f' {notes}' if notes else ''}")
    _write(key, decision)
    return decision


def candidates(backend: str) -> list[Config]:
    """Returns the sizes of blocks to time, the most promising first."""
    first = HEURISTIC[backend]
    tile = 32 if backend == "triton" else 1024
    return [first, Config(**{**first.__dict__, "tile": tile})]


def _estimated(key: Key, kernel: str, backend: str, check: Any) -> Decision:
    kind, _, sizes = key
    config, chip = HEURISTIC[backend], estimate.chip_of(kind)
    if chip is None:
        return Decision(*key, None, "No figures for this kind of device.")
    if not _runs(check, config):
        return Decision(*key, None, "The kernel does not support these sizes.")
    seconds = estimate.estimated(kernel, sizes, chip)
    text = f"Estimated: XLA at least {1e3 * seconds.plain:.3g} ms, the kernel {1e3 * seconds.kernel:.3g} ms."
    if not seconds.plain:
        text = "Estimated: XLA can keep its arrays in fast memory."
    return Decision(*key, config if seconds.wins else None, text)


def _runs(check: Callable[[Config], None], config: Config) -> bool:
    try:
        check(config)
    except Unsupported:
        return False
    return True


def _agreed(key: Key, make: Callable[[], Decision], rule: Decision) -> Decision:
    """Returns the decision of the first process; the estimate if it does not come."""
    client = coordinator.global_state.client
    if client is None or jax.process_count() == 1:
        return make()
    name = f"jtrees-kernels/{_name(key)}"
    if jax.process_index() == 0:
        decision = make()
        client.key_value_set(name, _text(decision))
        return decision
    with contextlib.suppress(Exception):  # the first process may be gone, or does other work
        return _parsed(key, client.blocking_key_value_get(name, _WAIT))
    return rule._replace(reason=f"{rule.reason} The first process decided nothing.")


def _name(key: Key) -> str:
    kind, program, sizes = key
    return re.sub(r"\W+", "-", f"{kind}-{program}-{'-'.join(map(str, sizes))}-jax-{jax.__version__}")


def _file(key: Key) -> Path | None:
    folder = jax.config.jax_compilation_cache_dir
    return None if not folder or "://" in str(folder) else Path(folder) / "kernels" / f"{_name(key)}.json"


def _text(decision: Decision) -> str:
    config = None if decision.config is None else decision.config.__dict__
    return json.dumps({"config": config, "reason": decision.reason})


def _parsed(key: Key, text: str) -> Decision:
    entry = json.loads(text)
    return Decision(*key, None if entry["config"] is None else Config(**entry["config"]), str(entry["reason"]))


def _read(key: Key) -> Decision | None:
    """Returns a stored decision; None if there is none, or it cannot be read."""
    file = _file(key)
    try:
        return None if file is None else _parsed(key, file.read_text())
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(key: Key, decision: Decision) -> None:
    if (file := _file(key)) is None:
        return
    with contextlib.suppress(OSError):  # the decision holds for this process in any case
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as part:
            part.write(_text(decision))
        os.replace(part.name, file)
