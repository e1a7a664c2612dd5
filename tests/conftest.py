"""Settings of the whole suite."""

import torch

# The suite runs in several processes at once: one thread each is faster than two in each other's
# way, and results do not depend on the machine's number of cores.
torch.set_num_threads(1)
