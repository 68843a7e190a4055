"""The tables of the page on Keras: every name and argument of Keras 3, and what it is here.

A row names a method or a class of Keras, its counterpart, and each of its arguments:
`a`, `b` are taken by the counterpart under these names; `a` is `c`, or `a` is `other(c)`, has
another name; `a`: words, is taken and means something else; no `a`: words, is not taken. Words
that follow a counterpart say what differs; a row without one says why.
"""

import functools
import inspect
import re
from pathlib import Path
from typing import NamedTuple

import pytest

import flaxfit as ff

PAGE = Path(__file__).parents[1] / "docs" / "migrating-from-keras.md"
METHODS = (
    "compile",
    "fit",
    "evaluate",
    "predict",
    "train_on_batch",
    "test_on_batch",
    "predict_on_batch",
)
ROOMS = {"Losses": "losses", "Metrics": "metrics", "Callbacks": "callbacks"}
TABLES = ("Trainer", *ROOMS)
FIGURE = 0.95  # Of what Keras has, the share that is here under the same or another name.
CODE = r"`([^`]+)`"


class Entry(NamedTuple):
    """What became of a name of Keras: its counterpart, and words on what differs."""

    counterpart: str | None
    words: str

    @property
    def is_here(self):
        return self.counterpart is not None and not self.words


def arguments_of(cell):
    """The arguments that the last cell of a row names.

    >>> arguments_of("`a`, `b`; `c` is `d`; `e`: other; no `f`: why")["c"]
    Entry(counterpart='d', words='')
    """
    found = {}
    for part in filter(None, cell.split("; ")):
        names, _, words = part.partition(": ")
        if renamed := re.fullmatch(f"{CODE} is {CODE}", names):
            found[renamed[1]] = Entry(renamed[2], words)
            continue
        is_absent = names.startswith("no ")
        names = names.removeprefix("no ")
        assert re.fullmatch(f"{CODE}(, {CODE})*", names), f"{part!r} names no argument"
        assert words or not is_absent, f"{part!r} gives no reason"
        for name in re.findall(CODE, names):
            assert name not in found, name
            found[name] = Entry(None if is_absent else name, words)
    return found


def section(title):
    return PAGE.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


@functools.cache
def table(title):
    """The rows of a table: `{name of Keras: (Entry, {argument: Entry})}`."""
    lines = section(title).splitlines()
    cells = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines if line[:1] == "|"]
    found = {}
    for name, here, arguments in cells[2:]:
        code = re.match(CODE, here)
        words = here.partition(": ")[2] if code else here
        found[name.strip("`")] = Entry(code[1] if code else None, words), arguments_of(arguments)
    return found


def public_classes(room):
    return {name: each for name, each in vars(room).items() if inspect.isclass(each)}


@pytest.fixture(scope="session")
def surface(keras):
    """What Keras has: `{title: {name: [argument, ...]}}`."""
    trainer = {name: getattr(keras.Model, name) for name in METHODS}
    rooms = {title: public_classes(getattr(keras, room)) for title, room in ROOMS.items()}
    return {
        title: {name: named_parameters(each) for name, each in found.items()}
        for title, found in ({"Trainer": trainer} | rooms).items()
    }


def named_parameters(function):
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind not in variable and each.name != "self"]


def resolved(path):
    """What a dotted name means, from flaxfit on."""
    return functools.reduce(getattr, path.removeprefix("ff.").split("."), ff)


def taken_by(counterpart):
    """The names of the arguments that something of flaxfit takes."""
    if isinstance(counterpart, ff.metrics.Metric):
        configured = counterpart.configure
        return {"ignore_label", *(named_parameters(configured) if configured else ())}
    return set(named_parameters(counterpart))


def assert_taken(argument, of):
    """That an argument is one of a counterpart, or of another that it names, `other(argument)`."""
    if other := re.fullmatch(r"([\w.]+)\((\w+)(?:=[^)]*)?\)", argument):
        assert other[2] in taken_by(resolved(other[1])), argument
    elif "." in argument or not argument.isidentifier():
        resolved(argument.removesuffix("()"))
    else:
        assert argument in taken_by(of), (argument, of)


def common(title):
    """The arguments that all classes of a table have, in a row of their own."""
    return next((named for name, (_, named) in table(title).items() if name.startswith("each")), {})


def rows(title):
    return {name: row for name, row in table(title).items() if not name.startswith("each")}


@pytest.mark.slow
@pytest.mark.parametrize("title", TABLES)
def test_the_page_names_all_that_keras_has(title, surface):
    assert set(rows(title)) == set(surface[title])
    shared = set(common(title))
    for name, (entry, named) in rows(title).items():
        if entry.counterpart is not None:
            assert set(named) - shared == set(surface[title][name]) - shared, name


@pytest.mark.parametrize("title", TABLES)
def test_what_the_page_names_is_here(title):
    for name, (entry, named) in rows(title).items():
        if entry.counterpart is None:
            assert entry.words, f"{name} has neither a counterpart nor a reason"
            continue
        counterpart = resolved(entry.counterpart)
        for argument in named.values():
            if argument.counterpart is not None:
                assert_taken(argument.counterpart, counterpart)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("room", "known"), [("losses", ff.losses.resolve), ("metrics", ff.metrics.as_metrics)]
)
def test_names_in_strings_are_taken(room, known, keras):
    functions = [n for n, each in vars(getattr(keras, room)).items() if inspect.isfunction(each)]
    for name in set(functions) - {"get", "serialize", "deserialize"}:
        assert known(name), name


def share(entries):
    return sum(entry.is_here for entry in entries.values()) / len(entries)


def test_nearly_all_is_here():
    """Of the arguments of the trainer and the classes. The options of these are printed, too."""
    of_trainer = {
        f"{method}({name})": each
        for method, (entry, named) in rows("Trainer").items()
        for name, each in (named or {"...": entry}).items()
    }
    classes = {f"{t}.{name}": entry for t in ROOMS for name, (entry, _) in rows(t).items()}
    options = {
        f"{title}.{name}({argument})": entry
        for title in ROOMS
        for name, (_, named) in rows(title).items()
        for argument, entry in named.items()
    } | {f"{t}.each({name})": entry for t in ROOMS for name, entry in common(t).items()}
    for entries in (of_trainer | classes, options):
        rest = {name: entry.words for name, entry in entries.items() if not entry.is_here}
        print(f"{share(entries):.1%} of {len(entries)}", *rest.items(), sep="\n")
    assert share(of_trainer | classes) >= FIGURE
