"""InputSpec: the shape and dtype of an input, with symbolic dimensions; makes matching inputs."""

import ast
import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from flaxfit.tree import ArrayLike, Function, PyTree

Specs: TypeAlias = PyTree
"""A tree of `InputSpec`s: the positional inputs in a tuple, or a dict of keywords."""

_FUNCTIONS = {"mod": operator.mod, "floordiv": operator.floordiv, "max": max, "min": min}
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Eq: operator.eq,
    ast.GtE: operator.ge,
    ast.LtE: operator.le,
}
_LARGEST = 64


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """The shape and dtype of one input of an exported function.

    >>> InputSpec(("batch", 28, 28, 1), "uint8").dtype
    dtype('uint8')
    >>> InputSpec(("b", "2*t"), constraints=("t >= 4", "mod(t, 2) == 0")).shape
    ('b', '2*t')

    Args:
      shape: sizes, and names or expressions of dimensions whose size the caller chooses; a name
        means the same size in every input of a method.
      dtype: a NumPy dtype or its name; 64 bits are narrowed as JAX does.
      constraints: the promises of the caller about the names: comparisons by "==", ">=" or "<=".

    Raises:
      ValueError: a dimension is neither a size nor a string.
    """

    shape: tuple[int | str, ...]
    dtype: Any = "float32"
    constraints: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        shape = self.shape
        is_sequence = isinstance(shape, Sequence) and not isinstance(shape, str)
        if not is_sequence or not all(isinstance(d, str | int | np.integer) for d in shape):
            raise ValueError(
                "The shape of an InputSpec is a tuple of sizes and of names of dimensions, such "
                f"as ('batch', 28, 28), got {shape!r}."
            )
        if isinstance(self.constraints, str):
            object.__setattr__(self, "constraints", (self.constraints,))
        sizes = tuple(d if isinstance(d, str) else int(d) for d in shape)
        object.__setattr__(self, "shape", sizes)
        dtype = jax.dtypes.canonicalize_dtype(jnp.dtype(self.dtype))
        object.__setattr__(self, "dtype", dtype)


def as_specs(tree: PyTree) -> Specs:
    """Converts leaves with a shape and a dtype to InputSpecs; InputSpecs stay."""

    def as_spec(leaf: ArrayLike) -> InputSpec:
        if isinstance(leaf, InputSpec):
            return leaf
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
            return InputSpec(tuple(leaf.shape), leaf.dtype)
        raise TypeError(
            f"input_spec must be made of InputSpec(shape, dtype), got {type(leaf).__name__}: "
            f"{leaf!r:.60}."
        )

    return jax.tree.map(as_spec, tree)


def batch_specs(inputs: PyTree) -> Specs:
    """Returns specs with a symbolic batch size, from the inputs of a batch.

    >>> batch_specs((np.zeros((32, 8), np.float32),))
    (InputSpec(shape=('batch', 8), dtype=dtype('float32'), constraints=()),)
    """
    return jax.tree.map(lambda x: InputSpec(("batch", *x.shape[1:]), x.dtype), inputs)


def shape_structs(specs: Specs) -> PyTree:
    """Converts specs to `jax.ShapeDtypeStruct`s whose symbols share one scope."""
    scope = jax.export.SymbolicScope(_constraints(specs))

    def struct(spec: InputSpec) -> jax.ShapeDtypeStruct:
        dims = ", ".join(map(str, spec.shape)) + ("," if len(spec.shape) == 1 else "")
        return jax.ShapeDtypeStruct(jax.export.symbolic_shape(dims, scope=scope), spec.dtype)

    return jax.tree.map(struct, specs)


def _constraints(specs: Specs) -> tuple[str, ...]:
    return tuple(dict.fromkeys(c for spec in jax.tree.leaves(specs) for c in spec.constraints))


def two_sizes(specs: Specs) -> list[dict[str, int]]:
    """Returns two sizes for every symbol, or fewer if the constraints do not allow two.

    >>> two_sizes((InputSpec(("b", "t")), InputSpec(("b", 3))))
    [{'b': 1, 't': 2}, {'b': 5, 't': 6}]
    >>> two_sizes(InputSpec((2, 3)))
    [{}]
    """
    dims = [d for spec in jax.tree.leaves(specs) for d in spec.shape if isinstance(d, str)]
    expressions = [_parse(text) for text in dims]
    conditions = [_parse(text) for text in _constraints(specs)]
    names = dict.fromkeys(
        node.id
        for tree in expressions
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id not in _FUNCTIONS
    )

    def is_allowed(sizes: Mapping[str, int]) -> bool:
        return all(_value(c, sizes) for c in conditions) and all(
            _value(d, sizes) >= 1 for d in expressions
        )

    found: list[dict[str, int]] = []
    for smallest in (1, 5):
        allowed = (s for s in _candidates(list(names), smallest) if is_allowed(s))
        sizes = next(allowed, None)
        if sizes is not None and sizes not in found:
            found.append(sizes)
    return found


def random_inputs(specs: Specs, sizes: Mapping[str, int]) -> PyTree:
    """Returns random arrays for the specs: normal floats, and zeros and ones of other types."""
    random = np.random.default_rng((0, *sizes.values()))

    def array(spec: InputSpec) -> np.ndarray:
        shape = [d if isinstance(d, int) else _value(_parse(d), sizes) for d in spec.shape]
        if jnp.issubdtype(spec.dtype, jnp.inexact):
            return random.standard_normal(shape).astype(spec.dtype)
        return random.integers(0, 2, shape).astype(spec.dtype)

    return jax.tree.map(array, specs)


def example(specs: PyTree) -> PyTree:
    """Returns the smallest inputs that fit the specs, as a tuple (or a dict of keywords).

    >>> example(InputSpec(("batch", 3)))[0].shape
    (1, 3)
    """
    specs = as_arguments(as_specs(specs))
    sizes = two_sizes(specs)
    return random_inputs(specs, sizes[0] if sizes else {})


def as_arguments(inputs: PyTree) -> tuple[PyTree, ...] | dict[str, PyTree]:
    """Wraps a single input in a tuple; a tuple (positional) or dict (keywords) stays."""
    return inputs if isinstance(inputs, tuple | dict) else (inputs,)


def call_with(function: Function, inputs: tuple[PyTree, ...] | dict[str, PyTree]) -> PyTree:
    """Calls a function with positional or keyword inputs."""
    return function(**inputs) if isinstance(inputs, dict) else function(*inputs)


def _candidates(names: list[str], smallest: int) -> Iterator[dict[str, int]]:
    """Yields sizes to try: first different sizes, which reveal swapped dimensions."""
    for size in range(smallest, _LARGEST):
        yield {name: size + i for i, name in enumerate(names)}
    for size in range(smallest, _LARGEST):
        yield dict.fromkeys(names, size)
    random = np.random.default_rng(0)
    for _ in range(2000 if names else 0):
        sizes = random.integers(smallest, _LARGEST, len(names)).tolist()
        yield dict(zip(names, sizes, strict=True))


def _parse(text: str) -> ast.expr:
    return ast.parse(text.strip().replace("^", "**"), mode="eval").body


def _value(node: ast.expr, sizes: Mapping[str, int]) -> int:
    """Evaluates an expression in JAX's grammar of symbolic dimensions."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return sizes.get(name, 1)  # A name that occurs only in constraints is free.
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _OPERATORS[type(op)](_value(left, sizes), _value(right, sizes))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            return _FUNCTIONS[name](*(_value(argument, sizes) for argument in arguments))
    raise ValueError(f"{ast.unparse(node)!r} is not a dimension or constraint that JAX supports.")
