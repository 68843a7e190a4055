"""Contenders on the first device: hand-written loops, flaxfit, Keras and torch."""

import itertools
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import flaxfit as ff
from benchmarks.accelerator.jobs import Job
from benchmarks.contenders import Contender
from benchmarks.linen_models import build


def hand_written(
    job: Job, params: Any, *, per_call: int = 1, resident: bool = False, data: Any = None
) -> Contender:
    """A `jit` step with donated state, whose metrics are read once an epoch.

    Host-fed, the next batch is put on the device while a step runs. Resident data is gathered
    within the step, by rows from the host. Several steps per call run under `lax.scan`. `data` is
    an endless iterable of batches.
    """
    device = jax.devices()[0]
    model: Any = build(job)
    optimizer = optax.adam(job.learning_rate)

    def down(tree: Any) -> Any:
        if job.precision is None:
            return tree
        low = jnp.dtype(job.precision)
        return jax.tree.map(lambda a: a.astype(low) if a.dtype == jnp.float32 else a, tree)

    def measure(params: Any, x: Any, y: Any) -> Any:
        logits = model.apply({"params": down(params)}, down(x)).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        n_correct = (logits.argmax(-1) == y).sum(dtype=jnp.float32)
        sums = {"loss": losses.sum(), "correct": n_correct, "n": jnp.float32(y.size)}
        return losses.mean(), sums

    def update(carry: Any, batch: Any) -> Any:
        params, opt_state, totals = carry
        (_, sums), grads = jax.value_and_grad(measure, has_aux=True)(params, *batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        totals = jax.tree.map(jnp.add, totals, sums)
        return optax.apply_updates(params, updates), opt_state, totals

    def gather(rows: Any, data: Any) -> Any:
        return [array.at[rows].get(mode="promise_in_bounds") for array in data]

    def call(carry: Any, batch: Any, data: Any) -> Any:
        def one(carry: Any, batch: Any) -> Any:
            return update(carry, gather(batch, data) if resident else batch)

        if per_call == 1:
            return one(carry, batch)
        return jax.lax.scan(lambda c, b: (one(c, b), None), carry, batch)[0]

    lead = (-1, job.batch_size) if per_call == 1 else (-1, per_call, job.batch_size)
    rows = np.arange(len(job.x), dtype=np.int32).reshape(lead)
    x, y = (a.reshape(*lead, *a.shape[1:]) for a in (job.x, job.y))
    whole = jax.device_put((job.x, job.y), device) if resident else None
    step = jax.jit(call, donate_argnums=0)
    params = jax.device_put(params, device)
    params = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(params)  # Its own, to donate.
    carry = [(params, jax.jit(optimizer.init)(params), None)]
    endless = None if data is None else iter(data)

    def batches() -> Iterator[Any]:
        if endless is not None:
            return itertools.islice(endless, len(rows))
        return iter(rows) if resident else zip(x, y, strict=True)

    def train(epochs: int) -> float:
        totals = {}
        for _ in range(epochs):
            zeros = {name: np.zeros((), np.float32) for name in ("loss", "correct", "n")}
            carry[0] = (*carry[0][:2], jax.device_put(zeros, device))
            source = batches() if resident else put_ahead(batches(), device)
            for batch in source:
                carry[0] = step(carry[0], batch, whole)
            totals = jax.device_get(carry[0][2])
        return float(totals["loss"] / totals["n"])

    return Contender(lambda: count(carry[0][0]), train)


def put_ahead(batches: Iterable[Any], device: Any) -> Iterator[Any]:
    """Puts each batch on the device while the step of the previous one runs."""
    iterator = iter(batches)
    ahead = [jax.device_put(batch, device) for batch in itertools.islice(iterator, 2)]
    while ahead:
        yield ahead.pop(0)
        ahead += [jax.device_put(batch, device) for batch in itertools.islice(iterator, 1)]


def read_ahead(batches: Iterable[Any], n: int) -> Iterator[Any]:
    """Reads up to `n` batches ahead in a thread."""
    waiting: queue.Queue[Any] = queue.Queue(n)

    def read() -> None:
        for batch in batches:
            waiting.put(batch)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield waiting.get()


def train_loop(
    job: Job,
    params: Any,
    *,
    steps_per_call: int | str = 1,
    resident: bool | str = "auto",
    prefetch: int = 0,
    data: Any = None,
    snapshot: str = "device",
    implementation: str = "auto",
) -> Contender:
    """A TrainLoop with a metric and a checkpoint each epoch."""
    model, optimizer = build(job), optax.adam(job.learning_rate)
    if data is None:
        data = ff.ArrayStream(job.x, job.y, batch_size=job.batch_size, resident=resident)
    if prefetch:
        data = ff.data.prefetch(data, prefetch)
    task = ff.TrainTask(
        model.apply, optimizer, "crossentropy", data, ["accuracy"], precision=job.precision
    )
    loop = ff.TrainLoop(
        ff.TrainState.create(optimizer, {"params": params}),
        task,
        n_steps_per_checkpoint=job.n_steps,
        first_checkpoint=job.n_steps,
        steps_per_call=steps_per_call,
        strategy=ff.DataParallel(jax.devices()[:1], implementation=implementation),
        grad_norm=False,
        snapshot=snapshot,
        stdout=False,
    )

    def train(epochs: int) -> float:
        *_, loss = (checkpoint.loss for checkpoint in loop.run(epochs * job.n_steps))
        return loss

    return Contender(lambda: count(loop.state_in_place.params), train)


def fit(job: Job, params: Any) -> Contender:
    """`Model.fit` as it is, without a bar."""
    network: Any = (lambda rngs, x: {"params": params}, build(job).apply)
    model = ff.Model(
        network,
        optax.adam(job.learning_rate),
        "crossentropy",
        metrics=["accuracy"],
        precision=job.precision,
        strategy=ff.DataParallel(jax.devices()[:1]),
    )

    def train(epochs: int) -> float:
        options = {"batch_size": job.batch_size, "shuffle": False, "verbose": 0}
        return model.fit(job.x, job.y, epochs=epochs, **options)["loss"][-1]

    return Contender(lambda: count(model.state.params), train)


def keras(job: Job, params: Any) -> Contender:
    """Keras on JAX, as it is."""
    from benchmarks import with_keras

    with_keras.keras.config.set_dtype_policy(
        "float32" if job.precision is None else f"mixed_{job.precision}"
    )
    return with_keras.make(job, params)


def torch(job: Job, params: Any, *, compiled: bool = False) -> Contender:
    """A plain loop of torch over tensors on the device, its metrics read once an epoch.

    Raises:
      RuntimeError: torch cannot use the device that JAX uses.
    """
    import torch
    from torch.nn import functional as F

    from benchmarks import torch_models

    platform = jax.devices()[0].platform
    device = {"cpu": "cpu", "gpu": "cuda"}.get(platform)
    if device is None or (device == "cuda" and not torch.cuda.is_available()):
        raise RuntimeError(f"this torch {torch.__version__} cannot use a {platform} device")
    if device == "cpu":  # In the quick form alone, on a machine that may be busy.
        torch.set_num_threads(1)
    torch.set_float32_matmul_precision("high")  # TensorFloat-32, which JAX uses by default, too.
    model: Any = torch_models.build(job, params).to(device)
    optimizer = torch.optim.Adam(model.parameters(), job.learning_rate, fused=True)
    x, y = torch.from_numpy(job.x).to(device), torch.from_numpy(job.y).long().to(device)
    batches = [*zip(x.split(job.batch_size), y.split(job.batch_size), strict=True)]
    forward = torch.compile(model) if compiled else model
    autocast = torch.autocast(device, torch.bfloat16, enabled=job.precision is not None)

    def train(epochs: int) -> float:
        loss_sum = torch.zeros(())
        for _ in range(epochs):
            loss_sum, n_correct = torch.zeros(2, device=device)
            for x, y in batches:
                optimizer.zero_grad()
                with autocast:
                    logits = forward(x)
                logits = logits.float().flatten(0, -2)
                loss = F.cross_entropy(logits, y.flatten())
                loss.backward()
                optimizer.step()
                loss_sum += loss.detach()
                n_correct += (logits.argmax(-1) == y.flatten()).sum()
        return float(loss_sum) / len(batches)

    return Contender(lambda: sum(p.numel() for p in model.parameters()), train)


def count(params: Any) -> int:
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))


Make = Callable[[Job, Any], Contender]
