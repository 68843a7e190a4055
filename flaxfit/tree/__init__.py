"""Paths, dtypes and plain forms of pytrees, and checks of arguments."""

from flaxfit.tree import _plain as plain
from flaxfit.tree._checks import (
    check_argument_order,
    check_is_function,
    check_order,
    local_path,
    whole_number,
)
from flaxfit.tree._context_mesh import without_mesh
from flaxfit.tree._digest import as_digests, digests, digests_or_sources
from flaxfit.tree._dtypes import (
    check_dense,
    is_array,
    is_key,
    is_named,
    is_node,
    is_sparse,
    narrow,
    narrow_dtype,
    of_torch,
    tangents,
    to_numpy,
    widened,
)
from flaxfit.tree._functions import by_row, is_by_row, order_of, owner_of, parameters, runs_eagerly
from flaxfit.tree._jax_debugging import check_jit, debugging_explained, explain_debugging
from flaxfit.tree._other_callbacks import COUNTERPARTS
from flaxfit.tree._paths import Rules, flat, label, match, path_of, sections
from flaxfit.tree._plain import as_plain, restore
from flaxfit.tree._put import copied, put, put_like, sharding_of
from flaxfit.tree._required import required
from flaxfit.tree._selection import Selection, is_nnx_filter, label_of
from flaxfit.tree._shapes import shapes_of, structure_of
from flaxfit.tree._single_replica import single_replica, single_replica_of_any_axis, unbound_axis
from flaxfit.tree._types import (
    ApplyFn,
    Array,
    ArrayLike,
    Data,
    Device,
    Function,
    InitFn,
    Json,
    LossFn,
    OptState,
    Params,
    PyTree,
    Rngs,
    Sums,
    Transformation,
    Variables,
)
from flaxfit.tree._weights import (
    beside,
    broadcast_weights,
    fits,
    joined_weights,
    product,
    which_count,
)
