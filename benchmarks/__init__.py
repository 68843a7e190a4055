"""Benchmarks: what flaxfit costs beside what it is compared with, as ratios in one run."""
