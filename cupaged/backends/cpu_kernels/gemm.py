"""The matrix products of the CPU: y = x @ W.T straight from packed weights, with what follows a product done on the way.

Quantised weights are multiplied as the bytes that they are (digit_gemm.py) where the processor can do that, and as float32
numbers (float_gemm.py), like weights of a float format, where it cannot.
"""

from __future__ import annotations

from cupaged.backends.cpu_formats import FORMATS
from cupaged.backends.cpu_kernels.digit_gemm import digit_gemm
from cupaged.backends.cpu_kernels.digits import MULTIPLIES_BYTES
from cupaged.backends.cpu_kernels.float_gemm import float_gemm
from cupaged.backends.cpu_kernels.jit import Operation


def gemm(format_index: int) -> Operation:
    """The product for weights of FORMATS[format_index]."""
    in_bytes = MULTIPLIES_BYTES and not FORMATS[format_index].is_float
    return (digit_gemm if in_bytes else float_gemm)(format_index)
