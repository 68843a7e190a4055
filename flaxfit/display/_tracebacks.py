"""Shortens tracebacks to the user's frames and the message.

`short_errors` decorates the entry points of the library. Errors that leave them lose the frames of
the library, JAX, Flax and Optax. `FLAXFIT_FULL_TRACEBACKS=1` keeps all frames.
"""

import functools
import os
import sys
import sysconfig
from collections.abc import Callable
from types import FunctionType, TracebackType
from typing import Any, TypeVar

from flaxfit.display._streams import write

F = TypeVar("F", bound=Callable[..., Any])

_OWN = "flaxfit"
_LIBRARIES = (_OWN, "jax", "jaxlib", "flax", "optax", "redex", "tqdm")
_STDLIB = sysconfig.get_path("stdlib"), "<frozen "
_OF_JAX, _NOTICE = "JAX_TRACEBACK_FILTERING", "_flaxfit_notice"


def short_errors(function: F) -> F:
    """Decorates an entry point of the library: its errors show only the user's frames."""
    shorten: Any = _shorten  # Not a global, see below.

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            shorten(error)
            raise

    # doctest collects a function's examples only if `__globals__` is its module's namespace.
    space = vars(sys.modules[function.__module__])
    wrapper: Any = FunctionType(call.__code__, space, function.__name__, None, call.__closure__)
    functools.update_wrapper(wrapper, function)
    return wrapper


def show_one_line(error: KeyboardInterrupt, notice: str, *, is_shown: bool) -> None:
    """Replaces the traceback of an uncaught interrupt by a line; by nothing if it `is_shown`."""
    error.args = (notice,)
    if _shows_all():
        return
    lines = [] if is_shown else [f"flaxfit  {notice}"]
    vars(error).update({_NOTICE: lines, "_render_traceback_": lambda: lines})  # Read by IPython.
    if getattr(sys.excepthook, "__name__", None) != _excepthook.__name__:
        sys.excepthook = functools.update_wrapper(
            functools.partial(_excepthook, sys.excepthook), _excepthook
        )


def _excepthook(others: Any, kind: Any, error: BaseException, where: TracebackType | None) -> None:
    lines = vars(error).get(_NOTICE)
    if lines is None:
        others(kind, error, where)
    for line in lines or ():
        write(line)


def _shows_all() -> bool:
    given = os.environ.get("FLAXFIT_FULL_TRACEBACKS", "")
    return given not in ("", "0") or os.environ.get(_OF_JAX) == "off"


def _shorten(error: BaseException) -> None:
    """Removes internal frames, unless a library raised the error and no frame is the user's."""
    if _shows_all():
        return
    entries = _entries(error.__traceback__)[1:]
    error.with_traceback(entries[0] if entries else None)
    names_file = isinstance(error, OSError) and error.filename is not None
    is_explained = bool(entries) and (names_file or _package(entries[-1]) == _OWN)
    cause = error.__cause__
    if is_explained and cause and type(cause).__module__.startswith("jax"):
        cause.args = (str(cause).partition("\n")[0],)  # Our message says the rest.
    if is_explained or isinstance(error, KeyboardInterrupt) or _without_internals(entries):
        _tidy(error)


def _tidy(error: BaseException, *seen: int) -> None:
    """Removes internal frames from an error and its causes, and contexts with no other frames."""
    error.with_traceback(_without_internals(_entries(error.__traceback__)))
    notes = getattr(error, "__notes__", [])
    notes[:] = [note for note in notes if _OF_JAX not in note]
    before = error.__cause__ or error.__context__
    if before is None or id(before) in seen:  # `raise a from b`, where b was raised from a.
        return
    if error.__cause__ or _without_internals(_entries(before.__traceback__)):
        _tidy(before, id(error), *seen)
    else:  # Not by assignment: an error may be frozen.
        BaseException.__setattr__(error, "__suppress_context__", True)


def _without_internals(entries: list[TracebackType]) -> TracebackType | None:
    """Drops the entries of the library, of the libraries it builds on, and of Python itself."""
    kept = None
    for entry in reversed(entries):
        name, file = _package(entry), entry.tb_frame.f_code.co_filename
        is_python = name in sys.stdlib_module_names  # Or a user's file of that name.
        if name not in _LIBRARIES and not (is_python and file.startswith(_STDLIB)):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _package(entry: TracebackType) -> str:
    return (entry.tb_frame.f_globals.get("__name__") or "").partition(".")[0]


def _entries(where: TracebackType | None) -> list[TracebackType]:
    found = []
    while where is not None:
        found.append(where)
        where = where.tb_next
    return found
