"""required: imports an optional package where it is used."""

import importlib
from typing import Any


def required(owner: str, package: str, extra: str) -> Any:
    """Imports a package that an extra of flaxfit installs.

    Raises:
      ImportError: it is not installed; says how to install it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f'{owner} needs {package}: pip install "flaxfit[{extra}]"') from error
