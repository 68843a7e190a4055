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
    """The files of a step differ from the written files."""


def write(folder: Path) -> None:
    """Seals a folder whose files are complete."""
    text = json.dumps(_checksums(folder), separators=(",", ":"))
    (folder / SEAL).write_text(text, encoding="utf-8")


def problem(folder: Path) -> str | None:
    """Returns why `check` fails, or None."""
    try:
        check(folder)
    except Damaged as error:
        return str(error)
    return None


def check(folder: Path, item: str = "") -> None:
    """Compares the files of a folder, or of a subfolder, with its seal.

    Array digests find the damage that matters; the seal finds any damage, and names the file.
    """
    try:
        sealed = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        expected = {name: text for name, text in sealed.items() if name.startswith(item)}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise_if_unread(error, folder)
        raise Damaged(f"its {SEAL} is missing or was changed") from error
    # Never open a name from the seal: it may be forged.
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
    """Yields the subfolders of a folder and the names of their files; none if it is missing."""

    def fail(error: OSError) -> None:  # By default `os.walk` skips an unreadable folder.
        if not isinstance(error, _OTHER_FILES):
            raise error

    return ((parent, names) for parent, _, names in os.walk(folder, onerror=fail))


def raise_if_unread(error: Exception, folder: Path) -> None:
    """Raises an `OSError` if reading failed in a way that does not prove damage."""
    # TensorStore raises a ValueError that contains the errno.
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
