"""The dtypes that files may name: numbers only, by the names that NumPy and JAX give them."""

import ml_dtypes
import numpy as np

_EXTENDED = {
    name: np.dtype(getattr(ml_dtypes, name))
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "int4", "uint4")
}


def as_dtype(name: object) -> np.dtype:
    """The dtype of a name that a file gives.

    >>> as_dtype("bfloat16"), as_dtype("<f4")
    (dtype(bfloat16), dtype('float32'))

    Raises:
      ValueError: it names none, or one that is not of numbers (such as objects and text).
    """
    if name in _EXTENDED:
        return _EXTENDED[str(name)]
    try:
        dtype = np.dtype(name) if isinstance(name, str) else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "biufc":
        raise ValueError(f"it names the dtype {str(name)!r:.40}, which is not of numbers")
    return dtype
