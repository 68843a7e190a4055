"""Tracebacks: the user's frames, and the sentence last.

The frames of the library, JAX, Flax and Optax are removed where an error leaves what a public
module exports: a worded error, or one from a function of the user. `FLAXFIT_FULL_TRACEBACKS=1`
keeps all frames.
"""

import dis
import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import FunctionType, TracebackType
from typing import Any

from flaxfit.display._streams import write

_OWN = "flaxfit"
_LIBRARIES = (_OWN, "jax", "jaxlib", "flax", "optax", "redex", "tqdm")
_STDLIB = sysconfig.get_path("stdlib"), "<frozen "
_RAISE = dis.opmap["RAISE_VARARGS"]
_SPECIAL = (
    "__init__",
    "__call__",
    "__next__",
    "__getitem__",
    "__getattr__",
    "__setattr__",
    "__reduce__",
)
_OF_JAX = "JAX_TRACEBACK_FILTERING"
_IS_WORDED, _NOTICE = "_flaxfit_is_worded", "_flaxfit_notice"


def hide_internals(module: str) -> None:
    """Makes what a public module exports raise short worded errors.

    A function is also replaced where it is defined: pickle looks it up there.
    """
    public = sys.modules[module]
    for name in public.__all__:
        value = getattr(public, name)
        if isinstance(value, type):
            _hide_internals_of(value)
        elif isinstance(value, FunctionType):
            home = sys.modules[value.__module__]
            function = short(getattr(home, name))  # Once, where two modules export it.
            setattr(home, name, function)
            setattr(public, name, function)


def _hide_internals_of(public: type) -> None:
    """Makes the public methods of a class, inherited ones too, raise short worded errors."""
    for each in public.__mro__:
        if _package(each.__module__) != _OWN:
            continue
        for name, value in list(vars(each).items()):
            if name.startswith("_") and name not in _SPECIAL:
                continue
            if isinstance(value, FunctionType):
                setattr(each, name, short(value))
            elif isinstance(value, classmethod | staticmethod):
                setattr(each, name, type(value)(short(value.__func__)))
            elif isinstance(value, property):
                setattr(each, name, value.getter(short(value.fget)).setter(short(value.fset)))


def short(function: Any) -> Any:
    """Makes a function of the library raise short worded errors; others are returned unchanged.

    It is wrapped once. `typing` compares its own `__init__` of protocols.
    """
    if not isinstance(function, FunctionType) or _package(function.__module__) != _OWN:
        return function
    if function.__code__.co_filename == __file__:
        return function
    tidied = shorten  # Not a global, see below.
    if inspect.isgeneratorfunction(function):

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return (yield from function(*args, **kwargs))
            except (Exception, KeyboardInterrupt) as error:
                tidied(error)
                raise
    else:

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except (Exception, KeyboardInterrupt) as error:
                tidied(error)
                raise

    # With the globals of the function, by which doctest finds it.
    wrapper = FunctionType(
        call.__code__, function.__globals__, function.__name__, None, call.__closure__
    )
    return functools.update_wrapper(wrapper, function)


def shorten(error: BaseException) -> None:
    """Removes internal frames from an error, unless it has no others and is not worded."""
    if _shows_all():
        return
    here = error.__traceback__
    error.with_traceback(None if here is None else here.tb_next)
    if isinstance(error, KeyboardInterrupt) or is_worded(error):
        vars(error)[_IS_WORDED] = True  # Once its last frame is gone, nothing else tells.
        _tidy(error)
    elif _has_own(error):
        _tidy(error)


def is_worded(error: BaseException) -> bool:
    """Whether an error explains itself: the library raised it, or it names a file."""
    if _IS_WORDED in vars(error):
        return True
    *_, last = None, *_entries(error.__traceback__)
    if last is None:
        return False
    if isinstance(error, OSError) and error.filename is not None:
        return _is_internal(last)
    is_raised = last.tb_frame.f_code.co_code[last.tb_lasti] == _RAISE
    return _package_of(last) == _OWN and is_raised


def show_one_line(error: KeyboardInterrupt, notice: str, *, is_shown: bool) -> None:
    """Makes an interrupt that nobody catches print a line in place of a traceback.

    Args:
      error: the interrupt.
      notice: the line, which becomes its message.
      is_shown: whether the line is on the screen already.
    """
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


def _tidy(error: BaseException, *seen: int) -> None:
    """Removes internal frames from an error and its causes, and contexts of only these frames."""
    error.with_traceback(_without_internals(error.__traceback__))  # An error may be frozen.
    notes = getattr(error, "__notes__", None)
    if notes is not None:
        notes[:] = [note for note in notes if _OF_JAX not in note]
    cause, context = error.__cause__, error.__context__
    if cause is not None:
        if _IS_WORDED in vars(error) and _package(type(cause).__module__) in ("jax", "jaxlib"):
            cause.args = (str(cause).partition("\n")[0],)  # The sentence says the rest.
        if id(cause) not in seen:  # `raise a from b`, where b was raised from a.
            _tidy(cause, id(error), *seen)
    elif context is not None and _has_own(context):
        _tidy(context, id(error), *seen)
    else:
        BaseException.__setattr__(error, "__suppress_context__", True)


def _has_own(error: BaseException) -> bool:
    return _without_internals(error.__traceback__) is not None


def _without_internals(where: TracebackType | None) -> TracebackType | None:
    kept = None
    for entry in reversed(list(_entries(where))):
        if not _is_internal(entry):
            kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _is_internal(entry: TracebackType) -> bool:
    """Whether a frame is of the library, of what it is built on, or of Python itself."""
    name = _package_of(entry)
    is_python = name in sys.stdlib_module_names  # Or a file of the user with such a name.
    file = entry.tb_frame.f_code.co_filename
    return name in _LIBRARIES or (is_python and file.startswith(_STDLIB))


def _package_of(entry: TracebackType) -> str:
    return _package(entry.tb_frame.f_globals.get("__name__") or "")


def _package(module: str) -> str:
    return module.partition(".")[0]


def _entries(where: TracebackType | None) -> Iterator[TracebackType]:
    while where is not None:
        yield where
        where = where.tb_next
