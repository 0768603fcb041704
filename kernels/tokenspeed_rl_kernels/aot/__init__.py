"""Every kernel in every listed configuration, compiled without a GPU, and what came of it.

``python -m tokenspeed_rl_kernels.aot`` prints the figures; tests compare them with those of a golden file.
"""
