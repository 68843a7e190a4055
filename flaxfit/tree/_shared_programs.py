"""Programs that a process has compiled, for others that are the same in every respect.

The rule: a program is shared where its lowered text, which holds all of its operations and
constants, is equal, and so is everything else that the compiler or the caller of the result
depends on: trees, types, shardings, devices and layouts of arguments and results, the compiler's
options and JAX's configuration. Two models of one class that are made alike lower to the same
text, although their functions are different objects. A closed-over array, a seed or a rate that
differs is another constant, and so another text.

A program is never shared where the text does not say everything: where it calls back to Python,
has effects, arguments of its own, or calls code that is not known to be determined by its text.
"""

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax

from flaxfit.tree._types import Function

_MOST = 32
"""Programs are code, without parameters or data; the least recently used ones go."""
_LONGEST = 8_000_000
"""Characters of a text: one that holds large constants is not kept."""
# Calls whose text determines what they do: marks of shardings, linear algebra, random bits.
_KNOWN_CALL = re.compile(
    r"Sharding|SPMD\w+Shape|lapack_\w+_ffi|cu_threefry2x32_ffi|(mhlo|chlo)\.\w+"
)
_CALL = re.compile(r'custom_call @"?([^"(\s]+)')
_EMPTY = ("host_callbacks", "keepalive", "unordered_effects", "ordered_effects", "mut")
_EQUAL = (
    "global_in_avals",
    "global_out_avals",
    "in_shardings",
    "out_shardings",
    "in_layouts",
    "out_layouts",
    "kept_var_idx",
    "intermediate_shardings",
    "tuple_args",
    "num_devices",
    "committed",
    "backend",
    "context_mesh",
)

_programs: OrderedDict[Hashable, Function] = OrderedDict()
_lock = threading.Lock()


def shared(
    lowered: jax.stages.Lowered,
    options: Mapping[str, Any] | None,
    compile_it: Callable[[], Function],
) -> Function:
    """Returns the program of an equal lowered function if there is one, else compiles this one."""
    key = key_of(lowered, options)
    if key is None:
        return compile_it()
    with _lock:
        if key in _programs:
            _programs.move_to_end(key)
            return _programs[key]
    program = compile_it()
    with _lock:
        _programs[key] = program
        while len(_programs) > _MOST:
            _programs.popitem(last=False)
    return program


def key_of(lowered: jax.stages.Lowered, options: Mapping[str, Any] | None) -> Hashable | None:
    """The key that equal programs have in common; None for one that is not to be shared."""
    # JAX has no public form of what it compiles with: a version that renames it shares nothing.
    try:
        lowering: Any = lowered._lowering
        arguments, devices = lowering.compile_args, tuple(lowering._device_list)
        has_more = lowering.const_args or any(arguments[name] for name in _EMPTY)
        details = [arguments[name] for name in _EQUAL]
        details += [lowering._donated_invars, lowering._compiler_options_kvs, devices]
        # The text leaves out arguments that are not used; the call still checks them.
        inputs = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(lowered.args_info))
        settings = sorted((name, repr(value)) for name, value in jax.config.values.items())
    except (AttributeError, KeyError, TypeError):
        return None
    # One of several processes that compile together must not leave it out.
    if has_more or len({device.process_index for device in devices}) > 1:
        return None
    text = lowered.as_text()
    if len(text) > _LONGEST or not all(map(_KNOWN_CALL.fullmatch, _CALL.findall(text))):
        return None
    chosen = sorted((options or {}).items())
    key = (
        hashlib.sha256(text.encode()).digest(),
        lowered.in_tree,
        inputs,
        lowered.out_tree,
        _hashable(details),
        _hashable(chosen),
        _hashable(settings),
    )
    try:
        hash(key)
    except TypeError:  # What a tree holds besides arrays need not be hashable.
        return None
    return key


def _hashable(value: object) -> Hashable:
    if isinstance(value, list | tuple):
        return tuple(map(_hashable, value))
    return frozenset(value) if isinstance(value, set) else value
