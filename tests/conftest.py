"""What holds for every test: one thread per worker, and property tests without a clock."""

import hypothesis
import torch

pytest_plugins = ["tests.engines"]

torch.set_num_threads(1)
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True)
hypothesis.settings.load_profile("tests")
