"""The axis of replicas, which a model may name, such as `BatchNorm(axis_name="replica")`."""

from collections.abc import Callable

from flaxfit.tree import Function, PyTree, single_replica, unbound_axis

REPLICA = "replica"


def only_replica(function: Function, strategy: object, axis: str) -> Function:
    """Makes a function the only replica of an axis that the strategy's models may name."""
    return _explained(
        single_replica(function, axis),
        lambda name: (
            f'Cannot use the axis "{name}" in the model, the loss or a metric: '
            f'{strategy} calls its replicas "{axis}". Use that name, or make the strategy with '
            f"{type(strategy).__name__}(axis_name={name!r})."
        ),
    )


def without_axis(function: Function) -> Function:
    """Explains the error of a function that names an axis: virtual replicas have none."""
    return _explained(
        function,
        lambda name: (
            f'Cannot use the axis "{name}" in the model, the loss or a metric with '
            "virtual_replicas: a device computes its replicas one after the other. Leave the axis "
            "out, as in nn.BatchNorm(), whose statistics are then those of each replica's "
            "examples; or train without virtual_replicas."
        ),
    )


def check_axis_name(axis_name: object) -> str:
    """Checks that the name of the axis of replicas is a string."""
    if not isinstance(axis_name, str) or not axis_name:
        raise TypeError(
            f"axis_name must be the name by which models refer to the replicas, such as "
            f'"batch", got {axis_name!r:.60}.'
        )
    return axis_name


def _explained(function: Function, message: Callable[[str], str]) -> Function:
    def call(*arguments: PyTree) -> PyTree:
        try:
            return function(*arguments)
        except NameError as error:
            name = unbound_axis(error)
            if name is None:
                raise
            raise ValueError(message(name)) from error

    return call
