"""Finds arrays that are whole on one device while others are being placed."""

import jax
import jax.numpy as jnp


class WholeArrays:
    """Records the shapes of live arrays of a size that are whole on a device, after each placement.

    Args:
      monkeypatch: pytest's.
      size: the least number of elements that counts.
    """

    def __init__(self, monkeypatch, size):
        self.n_placed, self.found, self._size = 0, set(), size
        self._known = {id(array) for array in jax.live_arrays()}
        for module, name in [
            (jnp, "array"),
            (jnp, "asarray"),
            (jax, "device_put"),
            (jax, "make_array_from_callback"),
        ]:
            monkeypatch.setattr(module, name, self._watched(getattr(module, name)))

    def _watched(self, place):
        def placed(*args, **kwargs):
            result = place(*args, **kwargs)
            self.n_placed += 1
            self.look()
            return result

        return placed

    def look(self):
        """Looks at the arrays that have been made since the beginning."""
        for array in jax.live_arrays():
            if id(array) in self._known or array.size < self._size:
                continue
            if any(shard.data.shape == array.shape for shard in array.addressable_shards):
                self.found.add(array.shape)
