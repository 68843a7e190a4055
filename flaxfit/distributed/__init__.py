"""The processes of a run: which one this is, and how they meet."""

from flaxfit.distributed._initialize import PEER_FAILED, initialize
from flaxfit.distributed._processes import (
    agree,
    exchange,
    from_main,
    is_main,
    is_preempted,
    process_count,
    process_index,
)
