"""Trains a tree on all devices of a pod. SIGTERM, or the end of another process, exits with status 75; rerun to resume.

python pod.py --out gs://bucket/run     # on every host of a TPU pod, with srun under Slurm, or on one machine
python pod.py --compile-only v5e:8x8    # prints memory and communication of a round; needs libtpu but no TPU
Elsewhere set JAX_COORDINATOR_ADDRESS=host:1234 JAX_NUM_PROCESSES=2 JAX_PROCESS_ID=0 for each process.
"""

import argparse
import os
import re
import signal
import sys

from etils import epath
import grain
import jax
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding, PartitionSpec as Spec
import numpy as np
import optax
import orbax.checkpoint as ocp

import jtrees

METHOD, OPTIMIZER = jtrees.methods.dgt(depth=6), optax.adam(0.01)
BLOCKS, ROWS, FEATURES, BATCH = 1000, 4096, 64, 256  # each device takes one block in a round, in mini-batches
LOG_EVERY, PROFILED = 10, (3, 6)  # in rounds; --profile FOLDER traces rounds 3 to 5
begin = lambda data: jtrees.training.start(METHOD, jtrees.Batch(**data), key=jax.random.key(0), optimizer=OPTIMIZER)


def block(i):  # replace this by a reader of your table
    x = np.random.default_rng(i).standard_normal((ROWS, FEATURES), np.float32)
    return {"x": x, "y": np.where(x[:, 0] > 0, np.abs(x[:, 1]), x[:, 2])}


def advance(state, data):
    options = {"optimizer": OPTIMIZER, "steps": ROWS // BATCH, "batch_size": len(data["x"]) // ROWS * BATCH}
    state, history = jtrees.training.advance(METHOD, state, jtrees.Batch(**data), **options)
    return state, history.losses.mean()


def compiled(mesh):
    """Returns a round, compiled for a mesh of possibly absent devices, and the sharding of its state."""
    n, replicated, shared = mesh.size * ROWS, NamedSharding(mesh, Spec()), NamedSharding(mesh, Spec("data"))
    data = jax.tree.map(lambda a: jax.ShapeDtypeStruct((n, *a.shape[1:]), a.dtype), block(0))
    places = jax.tree.map(lambda a: shared if a.shape == (n,) else replicated, state := jax.eval_shape(begin, data))
    update = jax.jit(advance, in_shardings=(places, shared), out_shardings=(places, replicated), donate_argnums=0)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return update.lower(state, data).compile(), places


def compile_only(pod):
    jax.config.update("jax_platforms", "cpu")
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"  # this machine has no TPU
    try:
        devices = topologies.get_topology_desc(pod, platform="tpu").devices
    except Exception as error:
        raise SystemExit(f"--compile-only needs libtpu, and a pod such as v5e:8x8, got {pod!r}: {error}") from error
    program, _ = compiled(jax.make_mesh((1, len(devices)), ("starts", "data"), (AxisType.Auto,) * 2, devices=devices))
    print(len(devices), "chips, each with", program.memory_analysis())
    for shapes, kind in re.findall(r"= (\S+|\(.*?\)) ([a-z-]+)\(.*?replica_groups", str(program.as_text())):
        print(kind, re.sub(r"\{.*?\}", "", shapes))


def train(out, rounds, save_every, profile):
    out, requests = epath.Path(out if "://" in out else os.path.abspath(out)), []
    jtrees.distributed.initialize()  # with several processes, JAX handles SIGTERM, as all must agree
    signal.signal(signal.SIGTERM, lambda *_: requests.append(True)) if jax.process_count() == 1 else None
    jtrees.distributed.check_folder(out)
    jax.set_mesh(mesh := jtrees.sharding.mesh())
    program, places = compiled(mesh)
    order = grain.MapDataset.range(BLOCKS).shuffle(seed=0).repeat(rounds)[jax.process_index() :: jax.process_count()]
    source = order.map(block).batch(jax.local_device_count()).map(lambda batch: jax.tree.map(np.concatenate, batch))
    first = jtrees.sharding.join_rows(source[0])
    state = jax.tree.map(jax.numpy.copy, jax.jit(begin, out_shardings=places)(first))  # for donation: no shared buffers
    say = lambda text: print(text, flush=True) if jax.process_index() == 0 else None
    manager = ocp.CheckpointManager(out / "checkpoints", options=ocp.CheckpointManagerOptions(max_to_keep=3))
    with manager, jtrees.distributed.resumable():
        if before := manager.latest_step() or 0:
            state = manager.restore(before, args=ocp.args.StandardRestore(state))
            say(f"resumed from round {before}")
        for done, rows in enumerate(source[before:rounds].to_iter_dataset(), before + 1):
            if profile and done - before in PROFILED:
                jax.block_until_ready(state)
                jax.profiler.stop_trace() if done - before == PROFILED[1] else jax.profiler.start_trace(profile)
            state, loss = program(state, jtrees.sharding.join_rows(rows))
            say(f"round {done}: loss {loss:.4f}") if done % LOG_EVERY == 0 else None
            if (stop := requests or manager.reached_preemption(done)) or done % save_every == 0 or done == rounds:
                manager.save(done, args=ocp.args.StandardSave(state), force=True)  # written during training
            sys.exit(os.EX_TEMPFAIL) if stop else None
    tree = jax.jit(METHOD.harden, out_shardings=places.step)(state.params, jtrees.Batch(**first))
    jtrees.save(tree, out / "tree.jtrees")  # the first process writes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"out": "run", "rounds": 1000, "save-every": 100, "profile": "", "compile-only": ""}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    pod = (options := vars(parser.parse_args())).pop("compile_only")
    compile_only(pod) if pod else train(**options)
