"""The sources of the CPU kernels, in Numba's Python and LLVM IR, and their compiler. The engine at work imports none of it.

`compiler.py` turns them into files of machine code, which cpu_code.py maps; what they and the host both have to know,
the layout of tables and arrays, stands in the host's modules (cupaged/backends/cpu_*.py).
"""
