"""The ops that take more than a few lines of torch, for the CPU."""
