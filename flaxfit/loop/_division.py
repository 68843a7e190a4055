"""Division: proves by traces, or tests on a batch, that batches may be divided and padded."""

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flaxfit.data._batch import Batch, has_rows, n_examples
from flaxfit.distributed import exchange
from flaxfit.loop._division_errors import about_change, about_rows, about_size, about_targets
from flaxfit.optim._averaged import like
from flaxfit.step import (
    MODEL,
    OBJECTIVE,
    SUMS,
    Difference,
    ForwardPass,
    Proof,
    comparison_of,
    has_statistics,
    outputs_of,
    own_metrics,
    pass_of,
    prove,
    reduces_over,
    rows_alone,
    some_rows,
    states_of,
    try_doubled,
    try_halves,
    try_parts,
    try_rows,
    try_weights,
    varies,
    wave,
    weights_of,
    with_tangents,
)
from flaxfit.strategies import Strategy
from flaxfit.task import EvalTask, LossByOutput, TrainTask
from flaxfit.tree import Array, ArrayLike, Function, PyTree, runs_eagerly, structure_of

_AMOUNT = 0.2
"""The amplitude of the parameter perturbation in later trials."""
_LATER = 101, 10_007
"""By how many steps counters are advanced: into a schedule, and beyond its end."""
MIXES = "the model computes outputs from several examples of the batch"


def examine(
    task: TrainTask | EvalTask,
    strategy: Strategy,
    state: PyTree,
    batch: Batch,
    result: ForwardPass,
    known: dict[Hashable, Any],
    *,
    may_pad: bool,
) -> str:
    """Checks that dividing batches keeps the results of a task; returns why padding is unsafe.

    Args:
      task: the task to train or to measure.
      strategy: the strategy, which may divide batches.
      state: the state.
      batch: the first batch.
      result: the shapes of the forward pass on this batch.
      known: a cache of earlier answers, by the shapes of state and batch; extended in place.
      may_pad: whether a batch may have to be padded.

    Returns:
      Why rows of weight 0 would change results; "" if they would not, or are never added.

    Raises:
      ValueError: dividing or padding a batch would change a result.
    """
    is_trained = isinstance(task, TrainTask)
    n_parts = task.accumulate if is_trained else 1
    why_not, is_replaced = _why_not_pad(task, result), _replaces_targets(task, batch)
    # A loss that combines rows receives the rows of all replicas, unless replicas or parts run one
    # after the other (`is_sequential`), or there is a loss for each output.
    is_sequential = n_parts > 1 or strategy.virtual_replicas is not None
    may_gather = not (is_sequential or isinstance(task.loss, LossByOutput))
    with_losses = is_replaced or task.across is None and (task.pad or not may_gather)
    run, is_noisy = pass_of(task, with_losses=with_losses), has_statistics(task, state)
    evaluation = pass_of(task, with_losses=with_losses, evaluates=True) if is_trained else None
    adds_penalty = result.penalty is not None and result.sown is None
    is_scalar = result.values is not None and not result.values.ndim
    is_whole = task.across is not None or not task.pad or adds_penalty
    division = Division(
        *(strategy, run, n_parts, is_noisy, _values_of(task), evaluation),
        by_example=getattr(task, "example_grads_hook", None) is not None,
        is_trained=is_trained,
        averages=MODEL if task.objective is None and (is_scalar or may_gather and is_whole) else "",
        has_sums=bool(own_metrics(task)) and not isinstance(batch.weights, Mapping),
        may_pad=may_pad,
    )
    is_asked = division.text or is_replaced or may_pad and not why_not
    if not is_asked:
        return why_not
    if task.objective is not None and may_pad and not why_not and batch.weights is None:
        # Padded batches have weights, which an objective may read.
        batch = batch._replace(weights=np.ones(n_examples(batch), np.float32))
    key = (structure_of((state, batch)), may_pad)
    if key in known:
        return known[key]
    states = states_of(task)
    mixed, changed = division.find(state, batch, states)
    if task.objective is None and (mixed.startswith(MODEL) or division.is_noisy):
        # A model that mixes rows hides whether losses and metrics do so: examine these alone.
        own = division._replace(
            run=comparison_of(task, with_losses=with_losses),
            evaluation=None,
            averages="",
            has_sums=False,
            is_trained=False,
        )
        load = functools.partial(division.with_outputs, task, state, batch, states)
        shapes = batch._replace(inputs=result.outputs)
        compared, changed_by_loss = own.find(state, shapes, states, load)
    else:
        compared, changed_by_loss = mixed, changed
    if is_replaced and compared.startswith(("The loss", OBJECTIVE)):
        raise ValueError(about_targets(compared, is_by_output=_is_by_output(task, batch)))
    division.check(changed, pad=task.pad)
    division.check(changed_by_loss, pad=task.pad)
    if may_pad and not why_not and compared and not compared.startswith(MODEL):
        raise ValueError(about_rows(compared, division.text, pad=task.pad))
    why_not = why_not or (MIXES if mixed else "")
    if task.objective is not None and task.metrics and isinstance(task, EvalTask):
        # Evaluation computes outputs for the metrics by a separate call: examine that, too.
        beside, plain = copy.copy(task), result._replace(values=None, penalty=None)
        beside.__dict__.update(objective=None, loss=None)
        other = examine(beside, strategy, state, batch, plain, {}, may_pad=may_pad)
        why_not = why_not or other
    known[key] = why_not
    return why_not


def _why_not_pad(task: TrainTask | EvalTask, result: ForwardPass) -> str:
    """Returns why padding is unsafe, from the options and result shapes alone; "" if unknown."""
    if task.across is not None:
        return "the loss sees the whole batch"
    if not task.pad:
        return "the task has pad=False"
    if result.values is not None and not result.values.ndim:
        return "the loss returns a scalar, not one value per example"
    if result.penalty is not None:
        return "the penalty that is added to the loss is one number for the batch"
    is_kept = isinstance(task, TrainTask) and task.mutable not in (False, (), [])
    if is_kept and jax.tree.leaves(result.model_state):
        return "the model keeps statistics of its inputs, such as BatchNorm's"
    return ""


def _values_of(task: TrainTask | EvalTask) -> Function:
    """Returns a function from the sums of a metric to its value.

    Values are compared, not sums, since different sums may stand for one value.
    """
    metrics = {SUMS.format(name): metric for name, metric in task.metrics.items()}

    def compute(owner: str, sums: PyTree) -> PyTree:
        if owner not in metrics:
            return sums
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                return metrics[owner].compute(sums)
            except Exception:  # A metric may be undefined on so few rows.
                return ()

    return compute


def _replaces_targets(task: TrainTask | EvalTask, batch: Batch) -> bool:
    """Returns whether a task without padding replaces targets of weight 0, which may be invalid.

    With padding, a loss that compares examples is refused in any case.
    """
    if task.pad or batch.weights is None or not jax.tree.leaves(batch.targets):
        return False
    if task.objective is not None:
        return isinstance(task, TrainTask)
    is_trained = task.across is None and isinstance(task, TrainTask)
    return is_trained or _is_by_output(task, batch)


def _is_by_output(task: TrainTask | EvalTask, batch: Batch) -> bool:
    return isinstance(weights_of(batch, task.loss), Mapping)


def _moved(state: PyTree, amount: ArrayLike) -> PyTree:
    """Perturbs the parameters: a weight of exactly zero would hide what depends on it."""

    def moved(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        return (x + amount * wave(x)).astype(x.dtype)

    return state.replace(params=jax.tree.map(moved, state.params))


def _advanced(before: PyTree, after: PyTree, n_steps: int) -> PyTree:
    """Advances the counters that a pass has changed, and moves other single numbers."""

    @np.errstate(over="ignore")
    def moved(old: ArrayLike, new: ArrayLike) -> ArrayLike:
        # A constant would be another setting of the model, such as a number of iterations.
        if not _is_number(new) or np.array_equal(old, new):
            return new
        value, is_whole = np.asarray(new), jnp.issubdtype(new.dtype, jnp.integer)
        if is_whole or value == np.round(value):
            most = np.iinfo(value.dtype).max // 2 if is_whole else n_steps
            return value + np.asarray(min(n_steps, most), value.dtype)
        return value + np.asarray(_AMOUNT, value.dtype)

    model_state = jax.tree.map(moved, before.model_state, after.model_state)
    return after.replace(model_state=model_state)


def _is_number(x: Any) -> bool:
    """Returns whether a leaf is an array of one number."""
    return np.size(x) == 1 and jnp.issubdtype(getattr(x, "dtype", bool), jnp.number)


def _continued(given: tuple[PyTree, ArrayLike], new: PyTree) -> tuple[PyTree, ArrayLike]:
    """Returns the perturbed state with the model state that a pass has left."""
    state, amount = given
    old = state.model_state  # A module may have written frozen parameters, too.
    kept = {name: like(new[name], old[name]) for name in new if name in old}
    return state.replace(model_state={**old, **kept}), amount


class _Programs(NamedTuple):
    """The functions of a trial, `((state, amount), batch, seed) -> Pass`, compiled when called."""

    one: Function
    """The pass over a batch or a part of it."""
    together: Function
    """The pass over stacked parts, mapped over the axis of replicas."""
    evaluation: Function | None
    """The pass in evaluation mode; None if no trial needs it."""
    draws: bool
    """Whether the pass in evaluation mode draws random numbers."""


class Division(NamedTuple):
    """A pass, and the division of its batches among replicas and parts."""

    strategy: Strategy
    run: Function
    """The pass, see `pass_of`: `(state, batch, states of companions, seed) -> Pass`."""
    n_parts: int = 1
    """The number of parts that a replica computes one after the other."""
    is_noisy: bool = False
    """Whether the model normalizes by statistics of the batch, as BatchNorm does."""
    compute: Function = lambda owner, sums: sums
    """Computes the value of a metric from its sums, see `try_halves`."""
    evaluation: Function | None = None
    """The pass of a training task in evaluation mode, where its rows may be deterministic."""
    averages: str = ""
    """A prefix of owners whose arrays without rows are averaged; see `try_halves`."""
    may_pad: bool = False
    """Whether batches may be padded."""
    has_sums: bool = False
    """Whether user metrics return sums of a batch."""
    is_trained: bool = False
    """Whether gradients are computed, too."""
    by_example: bool = False
    """Whether `example_grads_hook` computes a batch example by example."""

    @property
    def n_replicas(self) -> int:
        """The number of replicas among which a batch is divided."""
        is_mapped = self.strategy.axis_name is not None or self.strategy.virtual_replicas
        return self.strategy.n_devices if is_mapped else 1

    @property
    def text(self) -> str:
        """The option that divides a batch, for messages; "" if it is computed as a whole."""
        if self.n_parts > 1:
            return f"accumulate={self.n_parts}"
        if self.by_example:
            return "example_grads_hook"
        if self.n_replicas == 1:
            return ""
        virtual = self.strategy.virtual_replicas
        return f"{self.n_replicas} devices" if virtual is None else f"virtual_replicas={virtual}"

    def find(
        self,
        state: PyTree,
        batch: Batch,
        states: PyTree,
        load: Callable[[], Batch] | None = None,
    ) -> tuple[str, Difference]:
        """Returns the owner of rows that depend on other rows, and the results that differ.

        Dependent rows forbid padding, but not this division if the module reduces over the axis of
        replicas itself. `states` are the variables of companions; `load` makes the batch, if
        `batch` holds shapes only.

        Raises:
          ValueError: the pass does not accept a part of the batch.
        """
        if not has_rows(batch):
            return "", Difference()
        found: tuple[str, Difference] = "", Difference()
        proof = self._prove(self.run, state, batch, states, is_chained=self.n_parts > 1)
        if proof.refusal is not None and self.text:
            words = about_size(self._part(batch), proof.refusal, self.text, self.n_parts)
            raise ValueError(words) from proof.refusal
        if not proof.is_independent:
            trials = self._trials(state, batch if load is None else load(), states, proof)
            # Some devices round products of float32 to fewer bits, by the size.
            with jax.default_matmul_precision("highest"):
                for found in trials if load is None else itertools.islice(trials, 1):
                    if found[0] or any(found[1]):
                        break
        if self.strategy.n_processes > 1:
            # Findings may differ between processes, which must decide alike: any difference counts.
            told = exchange("whether a batch may be divided", [found[0], *found[1]])
            first = next((each for each in told if any(each)), told[0])
            found = first[0], Difference(*first[1:])
        return found

    def with_outputs(
        self, task: TrainTask | EvalTask, state: PyTree, batch: Batch, states: PyTree
    ) -> Batch:
        """Returns the batch with the model's outputs as inputs, for losses and metrics."""
        run = self.strategy.bind(functools.partial(outputs_of, task))
        run = run if runs_eagerly(run) else jax.jit(run)
        # Perturbed, because the outputs of initial weights may all be zero.
        moved = _moved(self._local(state), np.float32(_AMOUNT))
        return batch._replace(inputs=run(moved, batch, states))

    def _prove(
        self,
        run: Function,
        state: PyTree,
        batch: Batch,
        states: PyTree,
        *,
        is_chained: bool = False,
    ) -> Proof:
        """Tries to prove that rows are independent; an eager pass has no trace to prove it by."""
        bound = self.strategy.bind(run)
        if runs_eagerly(bound):
            return Proof(is_independent=False)
        # Two sizes are traced: a dimension that differs between the traces is an axis of rows, and
        # one that does not is a constant.
        n = self._part(batch)
        n_parts = n_examples(batch) if self.by_example else self.n_replicas * self.n_parts
        # A single example is compared with two even if no batch is divided.
        sizes = [(n, max(2, n_parts))] if n_parts > 1 or n == 1 else []
        # A remainder may have any size, and run at another.
        least = 2, max(2, -(-n // 2))
        if self.may_pad and least not in sizes or not sizes:
            sizes.append(least)
        axis, proof = self.strategy.axis_name, Proof(is_independent=True)
        for number, (size, factor) in enumerate(sizes):
            given = state, batch, states, size, factor
            # Without the axis, a pass that names it raises a NameError, which `prove` reports.
            proof = prove(bound if axis is None else run, *given, is_chained=is_chained)
            if proof.names_axis:
                return prove(bound, *given)._replace(is_independent=False, names_axis=True)
            # Training may never run another size; one row may be too few for a loss that gathers
            # the rows of all replicas.
            if number > 0 or size != n or n == 1 or self.strategy.n_processes > 1:
                proof = proof._replace(refusal=None)
            if not proof.is_independent:
                break
        return proof

    def _part(self, batch: Batch) -> int:
        """Returns the number of examples in a part of a batch."""
        return 1 if self.by_example else -(-n_examples(batch) // (self.n_replicas * self.n_parts))

    def _trials(
        self, state: PyTree, batch: Batch, states: PyTree, proof: Proof
    ) -> Iterator[tuple[str, Difference]]:
        """Yields the results of trials: of this state, and of perturbed and later ones.

        All run the same programs, which take the amount of the perturbation as an argument.
        """
        bind, own = self.strategy.bind, self._local(state)
        run = bind(self.run)
        jit = (lambda f: f) if runs_eagerly(run) else jax.jit

        def made(function: Function) -> Function:
            is_differentiated = self.is_trained and proof.hides_gradients
            forms = [with_tangents(function)] * is_differentiated + [function]
            forms = [jit(lambda state, *others, f=f: f(_moved(*state), *others)) for f in forms]

            def call(state: PyTree, batch: Batch, seed: int) -> PyTree:
                try:
                    found = forms[0](state, batch, states, seed)
                    del forms[1:]
                except Exception:
                    if len(forms) == 1:
                        raise
                    # A `jax.custom_vjp` or a callback has no tangents.
                    found = forms[1](state, batch, states, seed)
                    del forms[0]
                return found

            return call

        evaluation, second = self.evaluation, Proof(is_independent=True)
        # A proof replaces the trial, which would refuse random numbers that a module draws from a
        # fixed key: equal for all seeds, but different for other batch sizes.
        if evaluation is not None and (proof.draws or self.is_noisy):
            second = self._prove(evaluation, state, batch, states)
            if second.draws and not self.is_noisy:
                # A state or a penalty drawn from a fixed key does not look random, either.
                evaluation = rows_alone(evaluation)
                second = self._prove(evaluation, state, batch, states)
        axes = None, 0, None, None
        programs = _Programs(
            made(run),
            made(jax.vmap(self.run, axes, axis_name=self.strategy.axis_name)),
            None if evaluation is None or second.is_independent else made(bind(evaluation)),
            second.draws,
        )

        def tried(state: PyTree, amount: float) -> tuple[str, Difference]:
            return self._tried(programs, (state, np.float32(amount)), batch, states, proof)

        yield tried(own, 0.0)
        kept = jax.tree.leaves(getattr(own, "model_state", ()))
        if not kept:
            yield tried(own, _AMOUNT)
            return
        given = own, np.float32(0)
        few = some_rows(programs.one, given, batch)
        later, _ = _continued(given, programs.one(given, few, 0).state)
        for n_steps in _LATER if any(map(_is_number, kept)) else _LATER[:1]:
            yield tried(_advanced(own, later, n_steps), _AMOUNT)

    def _tried(
        self,
        programs: _Programs,
        state: tuple[PyTree, ArrayLike],
        batch: Batch,
        states: PyTree,
        proof: Proof,
    ) -> tuple[str, Difference]:
        """Compares the pass over a batch with those over its halves, for a perturbed state."""
        axis = self.strategy.axis_name
        # The module reduces over replicas itself: only halves that see each other can agree.
        is_mapped = axis is not None and self.n_parts == 1 and not self.by_example
        is_joint = proof.names_axis and is_mapped
        found = map(self._relevant, self._differences(programs, state, batch, proof))
        changed = next(found) if is_joint else next(filter(any, found), Difference())
        mixed = changed.rows
        strictly = functools.partial(self._halves(state, proof, batch), programs.one, state)
        halves = functools.partial(strictly, batch, is_noisy=self.is_noisy, draws=proof.draws)
        # The library's losses reduce over replicas only under a mapped axis, which the trial of
        # single halves lacks: map the halves together. Random rows cannot be compared.
        may_be_joint = any(changed) and is_mapped and not proof.draws
        if is_joint or may_be_joint and reduces_over(axis, self.run, state[0], batch, states):
            joint = halves(together=programs.together)
            changed = joint if is_joint or not any(joint) else changed
        if self.n_parts > 1 and not mixed:
            # Parts run one after the other: the state after the last one must be that of the batch.
            # Means over parts matter only between replicas.
            chain = halves(continued=_continued)
            if self.is_noisy and not any(chain):
                strictly = functools.partial(strictly, continued=_continued)
                chain = try_doubled(strictly, batch, proof.draws)
            state_of_replicas = changed.state if self.n_replicas > 1 else ""
            rows = changed.rows or chain.rows  # Rows of the second half may read the model state.
            changed = changed._replace(rows=rows, state=state_of_replicas, chained=chain.chained)
        return mixed, changed

    def _relevant(self, changed: Difference) -> Difference:
        """Leaves out what only replicas, or only parts, would see."""
        if not self.text or self.by_example:  # The hook allows no new state and no penalty.
            return Difference(rows=changed.rows)
        return changed if self.n_replicas > 1 else changed._replace(state="")

    def _halves(
        self, state: tuple[PyTree, ArrayLike], proof: Proof, batch: Batch
    ) -> Callable[..., Difference]:
        return functools.partial(
            try_halves,
            part=self._part(batch) if self.text else 0,
            before=getattr(state[0], "model_state", ()),
            compute=self.compute,
            close=proof.close,
            averages=self.averages,
        )

    def _differences(
        self, programs: _Programs, state: tuple[PyTree, ArrayLike], batch: Batch, proof: Proof
    ) -> Iterator[Difference]:
        """Yields what each trial finds, of parts that do not see each other."""
        one, _, evaluation, draws = programs
        halves = self._halves(state, proof, batch)
        yield Difference(rows=try_rows(one, state, batch, all_rows=not proof.is_same_program))
        if evaluation is not None and varies(evaluation, state, batch):
            evaluation = None
        steady, draws = (evaluation, draws) if proof.draws else (one, False)
        yield halves(one, state, batch, is_noisy=self.is_noisy, draws=proof.draws)
        if evaluation is not None:
            yield halves(evaluation, state, batch, draws=programs.draws)
        if self.is_noisy:
            # Equal halves have the statistics of the whole batch, so that BatchNorm hides nothing.
            yield try_doubled(functools.partial(halves, one, state), batch, proof.draws)
        if self.has_sums and steady is not None:
            given = steady, state, batch, self.compute, proof.close
            is_divided = bool(self.text) and not draws
            yield Difference(rows=try_weights(*given, may_pad=self.may_pad, is_divided=is_divided))
        # Once: the trials of perturbed states take a few rows.
        if steady is not None and not state[1]:
            sizes = [self._part(batch)] if self.text else []
            for n in sizes if proof.is_same_program else [*sizes, n_examples(batch) // 2, 2]:
                given = steady, state, batch, n, proof.close
                yield Difference(rows=try_parts(*given, draws=draws))

    def _local(self, state: PyTree) -> PyTree:
        """Returns the state as arrays of this process; one copy if it is replicated."""
        arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
        if all(x.is_fully_replicated for x in arrays):
            return jax.tree.map(
                lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, state
            )
        return state if self.strategy.n_processes == 1 else self.strategy.collect(state)

    def check(self, changed: Difference, *, pad: bool = True) -> None:
        """Raises a ValueError if the division has `changed` results; `pad` is that of the task."""
        # Virtual replicas allow no axis, and single examples see no others.
        is_alone = self.strategy.virtual_replicas or self.by_example
        axis = None if is_alone else self.strategy.axis_name
        why = about_change(changed, self.text, self.n_parts, axis, pad=pad)
        if self.text and why:
            raise ValueError(why)
