"""What every test of the trainer has in common."""

import torch

# Kernels of tiny models are faster on one thread, and several test processes share the cores.
torch.set_num_threads(1)
