"""Benchmarks: what flaxfit costs beside what it is compared with, as ratios in one run."""

import os

# Every start compiles, as those of rivals do.
os.environ.setdefault("FLAXFIT_COMPILATION_CACHE", "off")
