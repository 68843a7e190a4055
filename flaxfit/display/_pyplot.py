"""Matplotlib, where it is installed."""

from typing import Any


def pyplot(otherwise: str = "") -> Any:
    """Returns the module `matplotlib.pyplot`, imported when it is needed and not before.

    Raises:
      ImportError: it is not installed; `otherwise` is what serves without it.
    """
    try:
        from matplotlib import pyplot as module
    except ImportError as error:
        message = 'plot needs matplotlib: pip install "flaxfit[plot]"'
        raise ImportError(" ".join(filter(None, (message, otherwise)))) from error
    return module
