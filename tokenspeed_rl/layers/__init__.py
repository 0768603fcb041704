"""Modules of the decoder: each one holds no state but numbers and calls into the kernels."""
