"""Hand-written loops of flax and optax; those without a bar set the lower bound."""

from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.contenders import Contender
from benchmarks.linen_models import build, initial_params
from benchmarks.workloads import Workload


def make(
    workload: Workload,
    params: Any = None,
    *,
    resident: bool = True,
    steps_per_call: int = 1,
    bar: bool = False,
    n_devices: int = 1,
) -> Contender:
    """A donating `jit` step, or several of them under `lax.scan`.

    Either the data is `resident` on the device, where steps gather the rows that the host names; or
    a call is given slices of the NumPy arrays. The metrics are added up in the step, and read once
    an epoch. With `bar`, which is for single steps, they are shown then, on a line
    above a bar of tqdm that each step moves on; else nothing is shown.
    """
    if bar:
        from tqdm import tqdm  # Not by the others, whose start and memory are measured, too.
    model, optimizer = build(workload), optax.adam(workload.learning_rate)
    mesh = Mesh(np.array(jax.devices()[:n_devices]), ("batch",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("batch",)))
    zeros = {name: np.zeros((), np.float32) for name in ("loss", "correct", "n")}
    params = initial_params(workload) if params is None else params
    state = jax.device_put((params, jax.jit(optimizer.init)(params)), whole)
    arrays = (workload.x, workload.y)
    data = jax.device_put(arrays, whole)

    def measure(params, x, y):
        logits = model.apply({"params": params}, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        sums = {
            "loss": losses.sum(),
            "correct": (logits.argmax(-1) == y).sum(dtype=jnp.float32),
            "n": jnp.float32(y.size),
        }
        return losses.mean(), sums

    def take(data, rows):
        return [array.at[rows].get(mode="promise_in_bounds") for array in data]

    def update(carry, x, y):
        (params, opt_state), totals = carry
        (_, sums), grads = jax.value_and_grad(measure, has_aux=True)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        totals = jax.tree.map(jnp.add, totals, sums)
        return (optax.apply_updates(params, updates), opt_state), totals

    def update_from(carry, data, rows):
        """Takes a step on rows of resident data, or a step for each row of a matrix of them."""
        if steps_per_call == 1:
            return update(carry, *take(data, rows))
        return jax.lax.scan(lambda c, r: (update(c, *take(data, r)), None), carry, rows)[0]

    def update_on(carry, x, y):
        """Takes a step on a batch, or on each of several."""
        if steps_per_call == 1:
            return update(carry, x, y)
        return jax.lax.scan(lambda c, batch: (update(c, *batch), None), carry, (x, y))[0]

    compile = partial(jax.jit, donate_argnums=0)
    if n_devices > 1:
        compile = partial(compile, in_shardings=(whole, whole, split), out_shardings=whole)
    step = compile(update_from if resident else update_on)
    rows = np.arange(len(workload.x), dtype=np.int32).reshape(-1, workload.batch_size)
    batches = [array.reshape(*rows.shape, *array.shape[1:]) for array in arrays]

    def of_call(i):
        """Returns the arguments of the call whose first step is the i-th of an epoch."""
        chosen = i if steps_per_call == 1 else slice(i, i + steps_per_call)
        return (data, rows[chosen]) if resident else [array[chosen] for array in batches]

    carry = [(state, jax.device_put(zeros, whole))]

    def train_epoch(shown: Any) -> dict[str, Any]:
        state, _ = carry[0]
        carry[0] = state, jax.device_put(zeros, whole)
        for i in range(0, len(rows), steps_per_call):
            carry[0] = step(carry[0], *of_call(i))
            if shown is not None:
                shown.update()
            # Collectives of a CPU must not pile up.
            if n_devices > 1 and i % 8 == 0:
                jax.block_until_ready(carry[0])
        return jax.device_get(carry[0][1])

    def train(epochs: int) -> float:
        with tqdm(total=epochs * len(rows), leave=False) if bar else nullcontext() as shown:
            for epoch in range(epochs):
                totals = train_epoch(shown)
                loss, accuracy = (float(totals[name] / totals["n"]) for name in ("loss", "correct"))
                if shown is not None:
                    shown.write(f"epoch {epoch + 1}: loss {loss:.4f}, accuracy {accuracy:.4f}")
        return loss

    @jax.jit
    def add_measured(params, totals, data, rows):
        return jax.tree.map(jnp.add, totals, measure(params, *take(data, rows))[1])

    @jax.jit
    def forward(params, x, rows):
        return model.apply({"params": params}, take([x], rows)[0])

    def evaluate() -> tuple[float, float]:
        totals = zeros
        for batch in rows:
            totals = add_measured(carry[0][0][0], totals, data, batch)
        totals = jax.device_get(totals)
        return float(totals["loss"] / totals["n"]), float(totals["correct"] / totals["n"])

    def predict() -> np.ndarray:
        outputs = [forward(carry[0][0][0], data[0], batch) for batch in rows]
        return np.concatenate(jax.device_get(outputs))

    def count() -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(params))

    return Contender(count, train, evaluate, predict)
