"""Paths of this machine: URLs, which would become folders of odd names, are refused."""

import os
import re
from pathlib import Path

# "gs://bucket", and "gs:/bucket" as pathlib writes it.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")


def local_path(path: str | os.PathLike[str]) -> Path:
    """The path with the user's home in the place of "~".

    >>> local_path("gs://bucket/run")
    Traceback (most recent call last):
    ValueError: Cannot use the URL 'gs://bucket/run': a path on this machine is needed. Mount ...

    Raises:
      ValueError: it is a URL.
    """
    text = os.fspath(path)
    if _URL.match(text):
        raise ValueError(
            f"Cannot use the URL {text!r}: a path on this machine is needed. Mount the store, or "
            "write to a local folder and copy it."
        )
    return Path(path).expanduser()
