"""The small work of a transition on a GPU, each a single Triton kernel.

    raised    the powers of a small matrix: one program
    reduce    the orthogonal reduction of `linalg`: a program per matrix, all in registers
    look_up   Φ and L at a batch of times from the kept table of a `clock`: a program per time
    noised    y = r x + L ε with ε drawn on the way: x is read once, y and ε are written once
    weighed   the mean and variance of a pixel under its histogram: levels stay in registers

Written out in tensor operations these are some hundred launches, most of the time of a kernel
captured in a CUDA graph. Same formulas, same names as there. Triton comes with CUDA builds of
PyTorch; where it is missing, or a matrix is too large, callers use their tensor operations.
"""

from ornstein.gpu.launching import triton, usable
from ornstein.gpu.levels import weighed, weighs
from ornstein.gpu.lookup import look_up, looks_up
from ornstein.gpu.noise import draws, noised
from ornstein.gpu.powers import raised, raises
from ornstein.gpu.reduction import fits, reduce

__all__ = [
    "draws",
    "fits",
    "look_up",
    "looks_up",
    "noised",
    "raised",
    "raises",
    "reduce",
    "triton",
    "usable",
    "weighed",
    "weighs",
]
