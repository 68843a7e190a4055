"""The devices of a strategy, and which of them belong to this process."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import jax

from flaxfit.tree import Device


def given_devices(devices: Iterable[Device] | None) -> tuple[Device, ...]:
    """Checks the `devices` argument of a strategy; None: all devices, of all processes."""
    given = jax.devices() if devices is None else devices
    is_sequence = isinstance(given, Iterable) and not isinstance(given, str)
    found = tuple(given) if is_sequence else (given,)
    if not is_sequence or not all(hasattr(device, "process_index") for device in found):
        raise TypeError(
            f"devices must be a sequence of devices, such as jax.devices()[:2], got {given!r:.60}."
        )
    if not found:
        raise ValueError("A strategy needs at least one device, got an empty sequence.")
    return found


def local_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """Returns this process's devices; checks that all processes have equally many, contiguous."""
    owners = [device.process_index for device in devices]
    counts = [(owner, len([*group])) for owner, group in groupby(owners)]
    this = jax.process_index() if len({*owners}) > 1 else owners[0]
    is_even = len({count for _, count in counts}) == 1 and len(counts) == len({*owners})
    if not is_even or this not in owners:
        raise ValueError(
            "Every process must have the same number of devices, all of them in a row; got "
            f"{', '.join(f'{count} of process {owner}' for owner, count in counts)}, in process "
            f"{jax.process_index()}."
        )
    return tuple(device for device in devices if device.process_index == this)
