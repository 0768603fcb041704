"""Each op against plain torch, on shapes of real models: ``python -m tokenspeed_rl_kernels.bench``."""
