"""Imports matplotlib, which is optional."""

from typing import Any


def pyplot(otherwise: str = "") -> Any:
    """Imports `matplotlib.pyplot`; the error if it is missing ends with `otherwise`."""
    try:
        from matplotlib import pyplot as module
    except ImportError as error:
        message = 'plot needs matplotlib: pip install "flaxfit[plot]"'
        raise ImportError(" ".join(filter(None, (message, otherwise)))) from error
    return module
