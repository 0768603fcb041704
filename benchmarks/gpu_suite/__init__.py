"""Sections of `benchmarks/gpu_suite.py`; found before that file, which has the same name."""
