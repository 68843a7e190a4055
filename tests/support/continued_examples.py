"""Examples of methods continue the example of their class: they may use the names it binds."""

import ast
import builtins
import contextlib
import doctest
import io
import sys

import pytest

import flaxfit


class ContinuedExamples:
    """A plugin of pytest; the example of a class is run once more, for all that continue it."""

    def __init__(self):
        self._bound = {}

    def pytest_runtest_setup(self, item):
        """Gives an example the names that it lacks."""
        if not isinstance(item, pytest.DoctestItem):
            return
        examples, known = item.dtest.examples, item.dtest.globs
        source = "".join(example.source for example in examples)
        if owner := _owner(item.dtest.name, known):
            lacking = _names(source, ast.Load) - _names(source, ast.Store) - {*known}
            if lacking - {*dir(builtins)}:
                item.dtest.globs |= self._names_of(owner)

    def _names_of(self, owner):
        if owner not in self._bound:
            names = dict(vars(sys.modules[owner.__module__]))
            source = "".join(e.source for e in doctest.DocTestParser().get_examples(owner.__doc__))
            try:
                with contextlib.redirect_stdout(io.StringIO()):
                    exec(source, names)
            except ImportError as error:
                pytest.skip(f"{error.name} is not installed")
            used = _names(source, ast.Store) | _names(source, ast.Load)
            self._bound[owner] = {name: names[name] for name in used if name in names}
        return self._bound[owner]


def _owner(name, known):
    """The class whose example that of a method continues: its own, or the public one it is of."""
    module = known["__name__"]
    base, is_method, _ = name.removeprefix(f"{module}.").partition(".")
    if not is_method:
        return None
    if ">>> " in (getattr(known.get(base), "__doc__", None) or ""):
        return known[base]
    public = [*vars(flaxfit).values(), *vars(flaxfit.optim).values()]
    for owner in (each for each in public if isinstance(each, type)):
        # By name, as pytest may have imported the module once more.
        if (module, base) in {(each.__module__, each.__name__) for each in owner.__mro__}:
            return owner
    return None


def _names(source, kind):
    """The names that a source text reads (`ast.Load`) or binds (`ast.Store`)."""
    nodes = [*ast.walk(ast.parse(source))]
    found = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, kind)}
    if kind is ast.Store:
        found |= {(n.asname or n.name).partition(".")[0] for n in nodes if isinstance(n, ast.alias)}
        found |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
        found |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    return found
