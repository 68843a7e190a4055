"""Benchmarks: the cost of flaxfit relative to other libraries and hand-written loops."""

import os

# Every start compiles, as those of rivals do.
os.environ.setdefault("FLAXFIT_COMPILATION_CACHE", "off")
