"""Warns, once per process, if JAX uses the CPU on a machine with a GPU."""

import functools
import os
import shutil
import warnings
from pathlib import Path

import jax


@functools.cache
def warn_of_idle_gpu() -> None:
    """Warns if the machine has an NVIDIA GPU and JAX has only found the CPU.

    Silent if the user chose the CPU, by `JAX_PLATFORMS=cpu` or an empty `CUDA_VISIBLE_DEVICES`.
    """
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    is_chosen = bool(getattr(jax.config, "jax_platforms", None))
    if is_chosen or is_hidden or jax.default_backend() != "cpu" or not sees_gpu():
        return
    warnings.warn(
        "JAX computes on the CPU, though this machine has an NVIDIA GPU: JAX was installed without "
        'CUDA, or cannot load it. Install it with pip install "jax[cuda13]" and see what '
        "jax.devices('cuda') says; or set JAX_PLATFORMS=cpu to silence this warning.",
        stacklevel=4,  # Past the wrapper of a public method.
    )


def sees_gpu(root: Path = Path("/")) -> bool:
    """Returns whether the driver exposes an NVIDIA GPU, as a device file or through WSL."""
    is_wsl = (root / "dev/dxg").exists() and shutil.which("nvidia-smi") is not None
    return is_wsl or any((root / "dev").glob("nvidia[0-9]*"))
