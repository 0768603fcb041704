"""The ops in Triton, one file per op: kernels, launchers, and the configurations they are compiled in.

Imported where an op first meets a tensor that Triton runs: nothing here is needed on a CPU.
"""
