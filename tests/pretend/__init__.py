"A CUDA machine that is only pretended: numbers on the CPU, the rules of a device around them."
from .machine import PretendedCuda, limits
from .orders import Race

__all__ = ["PretendedCuda", "Race", "limits"]
