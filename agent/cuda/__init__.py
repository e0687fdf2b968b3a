"""CUDA: the driver table over a GPU's memory, by CuPy's bindings and what they lack. Needs CuPy.

Importing this imports no CuPy and makes no context: `open_driver` does, in the processes that map.
"""

from kvquota.agent.cuda.device import open_driver
from kvquota.agent.cuda.library import CudaUnavailableError

__all__ = ["CudaUnavailableError", "open_driver"]
