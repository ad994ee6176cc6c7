"""What the CUDA backends are made of. Public is what helps with kernels of your own.

Importing it needs neither a GPU nor CUDA packages.
"""

from mqa.cuda.tensor_map import make_tma_descriptor

__all__ = ["make_tma_descriptor"]
