"""The seal of a step: the checksum of every file in its folder, written last."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

SEAL = "seal.json"
_OTHER_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Damaged(Exception):
    """The files of a step are not those that were written."""


def write(folder: Path) -> None:
    """Seals a folder whose files are complete."""
    text = json.dumps(_checksums(folder), separators=(",", ":"))
    (folder / SEAL).write_text(text, encoding="utf-8")


def problem(folder: Path) -> str | None:
    """Returns why `check` refuses a folder, or None."""
    try:
        check(folder)
    except Damaged as error:
        return str(error)
    return None


def check(folder: Path, item: str = "") -> None:
    """Compares the files of a folder, or of one folder in it, with its seal.

    The digests of the arrays find damage that matters; this finds all, and names the file.
    """
    try:
        sealed = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        expected = {name: text for name, text in sealed.items() if name.startswith(item)}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise_if_unread(error, folder)
        raise Damaged(f"its {SEAL} is missing or was changed") from error
    # Names in the seal are only compared with those of the files, never opened.
    try:
        found = _checksums(folder, item)
    except OSError as error:
        raise_if_unread(error, folder)
        raise Damaged(f"its files cannot be read ({error.strerror}: {error.filename})") from error
    for name, checksum in expected.items():
        if found.get(name) != checksum:
            raise Damaged(f"its file {name} {'was changed' if name in found else 'is missing'}")
    if not expected:
        raise Damaged(f"its {SEAL} was changed")


def _checksums(folder: Path, item: str = "") -> dict[str, str]:
    checksums = {}
    for parent, names in walk(folder / item):
        for path in (Path(parent, name) for name in names):
            name = path.relative_to(folder).as_posix()
            if name != SEAL:
                with path.open("rb") as file:
                    checksums[name] = hashlib.file_digest(file, "sha256").hexdigest()
    return checksums


def walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields the folders in a folder and the names of their files; none if it is missing."""

    def fail(error: OSError) -> None:  # `os.walk` would pass over the folder.
        if not isinstance(error, _OTHER_FILES):
            raise error

    return ((parent, names) for parent, _, names in os.walk(folder, onerror=fail))


def raise_if_unread(error: Exception, folder: Path) -> None:
    """Raises an error of reading a step that tells nothing of its content: it may be intact."""
    # TensorStore raises a ValueError with the number.
    code = re.search(r"os_error_code='(\d+)'", str(error))
    cause = OSError(int(code[1]), os.strerror(int(code[1]))) if code else error
    if isinstance(cause, OSError) and not isinstance(cause, _OTHER_FILES):
        place = f" at {cause.filename}" if cause.filename else ""
        raise OSError(
            cause.errno,
            f"Cannot read a checkpoint ({cause.strerror or cause}{place}), which stays as it is: "
            "try again when the disk can be read",
            str(folder),
        ) from error
