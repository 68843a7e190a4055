"""Division: whether batches may be divided and padded; proved by traces, or tried on a batch."""

import copy
import functools
import warnings
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import jax
import numpy as np

from flaxfit.data._batch import Batch, has_rows, n_examples
from flaxfit.distributed._processes import exchange
from flaxfit.optim._averaged import like
from flaxfit.step._companions import states_of
from flaxfit.step._compare import ForwardPass, weights_of
from flaxfit.step._passes import (
    MODEL,
    OBJECTIVE,
    Proof,
    comparison_of,
    has_statistics,
    outputs_of,
    pass_of,
    prove,
)
from flaxfit.step._trial import Difference, try_halves, try_rows
from flaxfit.strategies import Strategy
from flaxfit.task._multi_output import LossByOutput
from flaxfit.task._task import EvalTask, TrainTask
from flaxfit.tree._functions import runs_eagerly
from flaxfit.tree._shapes import structure_of
from flaxfit.tree._types import Function, PyTree

MIXES = "the model computes outputs from several examples of the batch"


def examine(
    task: TrainTask | EvalTask,
    strategy: Strategy,
    state: PyTree,
    batch: Batch,
    result: ForwardPass,
    known: dict[Hashable, str],
    *,
    may_pad: bool,
) -> str:
    """Checks that batches of a task may be divided as they are, and finds why not to pad them.

    Args:
      task: what to train or to measure.
      strategy: the strategy, which may divide batches.
      state: the state.
      batch: the first batch.
      result: the shapes of the results of its forward pass.
      known: what was found before, by the shapes of state and batch; it is added to.
      may_pad: whether a batch may have to be padded.

    Returns:
      Why rows of weight 0 would change results; "" if they would not, or none are added.

    Raises:
      ValueError: a batch is divided, or padded, and something would not be what it is for a whole
        batch.
    """
    n_parts = task.accumulate if isinstance(task, TrainTask) else 1
    why_not, is_replaced = _why_not_pad(task, result), _replaces_targets(task, batch)
    # A loss that may not be divided is given the rows of all replicas, where that can be.
    is_apart = n_parts > 1 or strategy.virtual_replicas is not None
    may_gather = not (is_apart or isinstance(task.loss, LossByOutput))
    with_losses = is_replaced or task.across is None and (task.pad or not may_gather)
    run, is_noisy = pass_of(task, with_losses=with_losses), has_statistics(task, state)
    division = Division(strategy, run, n_parts, is_noisy, _values_of(task))
    is_asked = division.text or is_replaced or may_pad and not why_not
    # Such a hook is given examples one by one, and nothing else is allowed there.
    if not is_asked or getattr(task, "example_grads_hook", None) is not None:
        return why_not
    key = (structure_of((state, batch)), may_pad)
    if key in known:
        return known[key]
    states = states_of(task)
    mixed, changed = division.find(state, batch, states)
    if task.objective is None and (mixed == MODEL or division.is_noisy):
        # Losses and metrics of outputs that depend on other rows may combine rows themselves.
        own = division._replace(run=comparison_of(task, with_losses=with_losses))
        load = functools.partial(division.with_outputs, task, state, batch, states)
        shapes = batch._replace(inputs=result.outputs)
        compared, changed_by_loss = own.find(state, shapes, states, load)
    else:
        compared, changed_by_loss = mixed, changed
    if is_replaced and compared.startswith(("The loss", OBJECTIVE)):
        raise ValueError(_about_targets(compared, task, batch))
    division.check(changed, pad=task.pad)
    division.check(changed_by_loss, pad=task.pad)
    if may_pad and not why_not and compared not in ("", MODEL):
        raise ValueError(_about_rows(compared, division.text, n_parts, pad=task.pad))
    why_not = why_not or (MIXES if mixed else "")
    if task.objective is not None and task.metrics and isinstance(task, EvalTask):
        # These are measured of outputs of their own.
        beside, plain = copy.copy(task), result._replace(values=None, penalty=None)
        beside.__dict__.update(objective=None, loss=None)
        other = examine(beside, strategy, state, batch, plain, {}, may_pad=may_pad)
        why_not = why_not or other
    known[key] = why_not
    return why_not


def _why_not_pad(task: TrainTask | EvalTask, result: ForwardPass) -> str:
    """Why rows of weight 0 would change results, by the task and the shapes of its results."""
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
    """The values of metrics of their sums, which may represent the same in several ways."""
    metrics = {f"The metric {name!r}": metric for name, metric in task.metrics.items()}

    def compute(owner: str, sums: PyTree) -> PyTree:
        if owner not in metrics:
            return sums
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                return metrics[owner].compute(sums)
            except Exception:  # Of so few rows there may be no value.
                return ()

    return compute


def _replaces_targets(task: TrainTask | EvalTask, batch: Batch) -> bool:
    """Whether targets of weight 0 are replaced although the task allows no padding.

    They may be invalid. Where batches may be padded, no loss may compare examples anyway.
    """
    if task.pad or batch.weights is None or not jax.tree.leaves(batch.targets):
        return False
    if task.objective is not None:
        return isinstance(task, TrainTask)
    is_by_output = isinstance(weights_of(batch, task.loss), Mapping)
    return is_by_output or task.across is None and isinstance(task, TrainTask)


class Division(NamedTuple):
    """How the batches of a pass are divided."""

    strategy: Strategy
    run: Function
    """The pass, see `pass_of`: `(state, batch, states of companions, seed) -> Pass`."""
    n_parts: int = 1
    """The parts that a replica computes one after the other."""
    is_noisy: bool = False
    """Whether the model keeps statistics of the batch, as BatchNorm does."""
    compute: Function = lambda owner, sums: sums
    """What the sums of a metric stand for, see `try_halves`."""

    @property
    def n_replicas(self) -> int:
        """The number of replicas that see a part of a batch only."""
        is_mapped = self.strategy.axis_name is not None or self.strategy.virtual_replicas
        return self.strategy.n_devices if is_mapped else 1

    @property
    def text(self) -> str:
        """The option that divides a batch; "" if it is computed as a whole."""
        if self.n_parts > 1:
            return f"accumulate={self.n_parts}"
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
        """Finds what a division would change.

        Args:
          state: the state.
          batch: the first batch.
          states: the variables of companions.
          load: makes the batch, if `batch` holds the shapes alone.

        Returns:
          The owner of rows that depend on other rows, or "", and what this division changes. The
          former forbids padding; a module may reduce over the axis of replicas by itself.
        """
        if not has_rows(batch):
            return "", Difference()
        n_shares = self.n_replicas * self.n_parts
        run, n = self.strategy.bind(self.run), max(2, -(-n_examples(batch) // n_shares))
        found: tuple[str, Difference] = "", Difference()
        given = state, batch, states, n, n_shares if n_shares > 1 else 2
        is_eager, proof = runs_eagerly(run), Proof(is_apart=False)
        if not is_eager:
            proof = prove(run if self.strategy.axis_name is None else self.run, *given)
            if proof.names_axis:
                proof = prove(run, *given)._replace(is_apart=False, names_axis=True)
        if not proof.is_apart:
            batch = batch if load is None else load()
            run = run if is_eager else jax.jit(run)
            found = self._tried(run, self._own(state), batch, states, proof)
        if self.strategy.n_processes > 1:
            told = exchange("whether a batch may be divided", [found[0], *found[1]])
            first = next((each for each in told if any(each)), told[0])
            found = first[0], Difference(*first[1:])
        return found

    def with_outputs(
        self, task: TrainTask | EvalTask, state: PyTree, batch: Batch, states: PyTree
    ) -> Batch:
        """The batch with the outputs of the model in the place of its inputs."""
        run = self.strategy.bind(functools.partial(outputs_of, task))
        run = run if runs_eagerly(run) else jax.jit(run)
        return batch._replace(inputs=run(self._own(state), batch, states))

    def _tried(
        self, run: Function, state: PyTree, batch: Batch, states: PyTree, proof: Proof
    ) -> tuple[str, Difference]:
        """Tries it, where it is not proved."""

        def one(state: PyTree, batch: Batch, seed: int) -> PyTree:
            return run(state, batch, states, seed)

        axis = self.strategy.axis_name
        mapped = jax.jit(jax.vmap(self.run, (None, 0, None, None), axis_name=axis))

        def together(state: PyTree, both: Batch, seed: int) -> PyTree:
            return mapped(state, both, states, seed)

        halves = functools.partial(
            *(try_halves, one, state, batch),
            compute=self.compute,
            is_noisy=self.is_noisy,
            draws=proof.draws,
        )
        mixed, changed = try_rows(one, state, batch), Difference()
        is_joint = proof.names_axis and axis is not None and self.n_parts == 1
        if not (is_joint or mixed):
            changed = halves()
            mixed = changed.rows
        if mixed and not is_joint:
            changed = Difference(rows=mixed)
        # A loss of the library looks for the axis, and finds none where none is mapped. Rows that
        # are random cannot be compared.
        may_be_joint = any(changed) and axis is not None and self.n_parts == 1 and not proof.draws
        if is_joint or may_be_joint:
            joint = halves(together=together)
            changed = joint if is_joint or not any(joint) else changed
        if self.n_parts > 1 and not mixed:

            def continued(state: PyTree, new: PyTree) -> PyTree:
                old = state.model_state  # A module may have written frozen parameters, too.
                kept = {name: like(new[name], old[name]) for name in new if name in old}
                return state.replace(model_state={**old, **kept})

            chain = halves(continued=continued)
            state_of_replicas = changed.state if self.n_replicas > 1 else ""
            changed = changed._replace(state=state_of_replicas, chained=chain.chained)
        return mixed, changed

    def _own(self, state: PyTree) -> PyTree:
        """The state in arrays of this process: on one device where each device has all of it."""
        arrays = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
        if all(x.is_fully_replicated for x in arrays):
            return jax.tree.map(
                lambda x: x.addressable_data(0) if isinstance(x, jax.Array) else x, state
            )
        return state if self.strategy.n_processes == 1 else self.strategy.collect(state)

    def check(self, changed: Difference, *, pad: bool = True) -> None:
        """Refuses a division that changes results.

        Args:
          changed: what `find` has found.
          pad: whether the task allows padding.

        Raises:
          ValueError: something is changed, named with the ways out.
        """
        if not self.text:
            return
        if changed.rows:
            raise ValueError(_about_rows(changed.rows, self.text, self.n_parts, pad=pad))
        advice = "accumulate=1" if self.n_parts > 1 else "strategy=Sharded(), or one device"
        axis = self.strategy.axis_name
        if axis is not None and self.n_parts == 1:
            advice += f", or reduce over the replicas in the module: jax.lax.psum(x, {axis!r})"
        if path := changed.state or changed.chained:
            raise ValueError(
                f"Cannot divide a batch, with {self.text}: the state {path!r} that the model "
                "updates would differ from that of the whole batch, as it is neither the mean of "
                f"those of its parts nor the same in all. Use {advice}."
            )
        if changed.penalty:
            raise ValueError(
                f"Cannot divide a batch, with {self.text}: the penalty that the model adds to the "
                "loss is not the mean of those of the parts of a batch. Return or sow a mean over "
                f"the examples instead of a sum. Or use {advice}."
            )


def _about_rows(owner: str, text: str, n_parts: int, *, pad: bool) -> str:
    if owner == MODEL:
        advice = "accumulate=1" if n_parts > 1 else "strategy=Sharded(), or one device"
        return (
            "The model computes an output of an example from other examples of its batch, such as "
            "their mean, and would see a part of the batch at a time here: its results would "
            f"differ. Use {advice}. This does not concern BatchNorm with running statistics."
        )
    if owner == OBJECTIVE:
        where = f"with {text}" if text else "with batches that may be padded"
        return (
            f"Cannot compute this objective {where}: the value of an example depends on the other "
            "examples of the batch, or on their number. Return one value per example, which "
            "depends on that example alone. Or compute batches whole: pad=False, one device or "
            "strategy=Sharded(), without accumulate and virtual_replicas. With pad=False an "
            "objective may also gather the rows of all devices itself: "
            "jax.lax.all_gather(x, 'replica', tiled=True)."
        )
    if not pad and owner.startswith("The metric"):
        return (
            f"Cannot measure {owner.removeprefix('The metric ')} with {text}: the value of an "
            "example depends on the other examples of the batch, and each part would be measured "
            "by itself. Use one device, or strategy=Sharded(), without accumulate and "
            "virtual_replicas."
        )
    if not pad:
        return (
            f"{owner} cannot be computed with {text}: the value of an example depends on the other "
            "examples of the batch, and the mean over the parts of a batch is not the loss of the "
            "batch. Return one value per example, which depends on that example alone, or set "
            "across='batch' in the task, which computes such a loss from the outputs of all parts."
        )
    return (
        f"{owner} gives each example a value that depends on the other examples of its batch, or "
        "on their number. Padding, and batches of another size, would change it. If it is meant to "
        "look across the batch, set across='batch' in the task."
    )


def _about_targets(owner: str, task: TrainTask | EvalTask, batch: Batch) -> str:
    why = (
        "compares the examples of a batch, and targets of weight 0 are replaced, as they may be "
        "invalid: the others would be compared with wrong ones."
    )
    if owner == OBJECTIVE:
        return (
            f"This objective {why} Pass what it compares as inputs, which are kept, or leave the "
            "examples of weight 0 out of the data."
        )
    is_by_output = isinstance(weights_of(batch, task.loss), Mapping)
    way_out = "Pass one weight per example" if is_by_output else "Set across='batch' in the task"
    return (
        f"{owner} {why} {way_out}, which keeps all targets, or leave the examples of weight 0 out "
        "of the data."
    )
