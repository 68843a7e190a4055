"""DividedBatch: the weight, the loss and the gradient of a batch that replicas divide."""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from flaxfit.data._batch import Batch, n_examples
from flaxfit.data._sample_weights import without_idle_targets
from flaxfit.optim._averaged import like
from flaxfit.optim._freeze import mask, merge
from flaxfit.state import TrainState
from flaxfit.step._compare import weight_sums
from flaxfit.step._gradient import (
    ForwardArguments,
    Gradient,
    accumulated_gradient,
    count_parts,
    gradient,
    loss_sums,
    weight_of_loss,
)
from flaxfit.step._random import step_key
from flaxfit.step._replicas import AnyReplicas
from flaxfit.step._whole_batch import weight_of_whole_loss, whole_batch_gradient
from flaxfit.task import TrainTask
from flaxfit.tree import ArrayLike, Params, PyTree


@dataclasses.dataclass(frozen=True)
class DividedBatch:
    """A batch divided among replicas; each replica uses the same random key in every method."""

    task: TrainTask
    batch: Batch
    replicas: AnyReplicas
    may_be_idle: bool
    """Whether there may be rows of weight 0, whose targets a loss must not see."""
    loss_has_weights: bool

    def weights(self, state: TrainState) -> PyTree:
        """Returns the sum of the weights of the batch, or sums by output."""

        def weight_of(replica: ArrayLike, part: Batch) -> PyTree:
            if not self.loss_has_weights:
                return weight_sums(self.task.loss, part)
            find = weight_of_loss if self.task.across is None else weight_of_whole_loss
            return find(self._arguments(state, replica, part))

        return self.replicas.sum(self.replicas.each(weight_of)(self.batch))

    @property
    def n_examples(self) -> jax.Array:
        """The number of examples over all replicas."""
        count = self.replicas.each(lambda replica, part: jnp.float32(n_examples(part)))
        return self.replicas.sum(count(self.batch))

    def gradient(self, state: TrainState, weights: PyTree) -> Gradient:
        """Computes the `Gradient` of each replica, before reduction."""
        gradient_of_parts = whole_batch_gradient if self._sees_all_parts else accumulated_gradient
        # mean_r(sum_r / (W / n)) = sum / W: dividing by W / n on each of n replicas makes their
        # mean the weighted mean over the examples, however the weights are spread.
        weight = jax.tree.map(lambda total: total / self.replicas.n, weights)

        def gradient_of(replica: ArrayLike, part: Batch) -> Gradient:
            arguments = self._arguments(state, replica, self._without_idle_targets(part))
            if (n_parts := count_parts(arguments)) == 1:
                return gradient(arguments, weight)
            return gradient_of_parts(arguments, weight, n_parts)

        return self.replicas.each(gradient_of)(self.batch)

    def loss(self, state: TrainState) -> jax.Array:
        """Computes the mean loss plus the penalty, as trained."""
        if self._sees_all_parts:
            return self._of_gradient(self.gradient(state, self.weights(state)))

        def loss_of(replica: ArrayLike, part: Batch) -> tuple[PyTree, PyTree]:
            return loss_sums(self._arguments(state, replica, self._without_idle_targets(part)))

        sums, penalty = self.replicas.each(loss_of)(self.batch)
        return mean_of_sums(self.replicas.sum(sums), self.mean(penalty))

    def _arguments(self, state: TrainState, replica: ArrayLike, part: Batch) -> ForwardArguments:
        key = step_key(state.key, state.step, replica)
        return ForwardArguments(self.task, state, part, key, self.replicas)

    def _without_idle_targets(self, part: Batch) -> Batch:
        """Replaces the targets of weight 0, unless the loss compares the others with them."""
        may_replace = self.may_be_idle and self.task.across is None
        return without_idle_targets(part) if may_replace else part

    @property
    def _sees_all_parts(self) -> bool:
        return self.task.accumulate > 1 and self.task.across == "batch"

    def _of_gradient(self, found: Gradient) -> jax.Array:
        """Returns the loss that belongs to a gradient."""
        return mean_of_sums(self.replicas.sum(found.sums["loss"]), self.mean(found.penalty))

    def mean(self, penalty: jax.Array | None) -> jax.Array | None:
        """Returns the mean of the penalty over the replicas; None without a penalty."""
        return None if penalty is None else self.replicas.mean(penalty)

    def loss_function(self, state: TrainState) -> Callable[[Params], jax.Array]:
        """Returns the loss as a function of the trained parameters, or of some of them.

        Its gradient equals that of a step to the bit: computed part by part, then averaged. It can
        be differentiated once more in forward mode.
        """

        trained = mask(state.params, self.task.freeze)
        # Optimizers call it inside of loops and branches, where a tracer cannot index NumPy arrays.
        traceable = dataclasses.replace(self, batch=jax.tree.map(jnp.asarray, self.batch))

        def at(trained: Params) -> TrainState:
            return state.replace(params=merge(trained, state.params))

        # A custom VJP, so that the gradient is computed part by part, exactly as in a step.
        @jax.custom_vjp
        def loss(trained: Params) -> jax.Array:
            return traceable.loss(at(trained))

        def forward(trained: Params) -> tuple[jax.Array, Params]:
            found = traceable.gradient(at(trained), traceable.weights(at(trained)))
            return self._of_gradient(found), self.replicas.mean(found.grads)

        def backward(grads: Params, cotangent: jax.Array) -> tuple[Params]:
            return (jax.tree.map(lambda g: (cotangent * g).astype(g.dtype), grads),)

        loss.defvjp(forward, backward)
        return lambda params: loss(like(merge(params, trained), trained))


def mean_of_sums(sums: PyTree, penalty: jax.Array | None) -> jax.Array:
    """Returns the trained loss: sum / weight, added over outputs, plus the penalty."""
    pairs = list(sums.values()) if isinstance(sums, Mapping) else [sums]
    means = [total / jnp.where(weight > 0, weight, 1) for total, weight in pairs]
    terms = means if penalty is None else [*means, penalty]
    return functools.reduce(jnp.add, terms)
