"""The SIMT emulator: CUDA C kernels on a CPU, behind cupy.RawModule's interface, under checks that a GPU does not have.

The text of a kernel is compiled as C++17 by the machine's compiler, behind a header that stands for the device language
(runtime/simt.h). A launch runs each CUDA thread as a fiber of one operating-system thread, so it is deterministic: the
schedule decides who runs first, and `forward`, `reverse`, `depth` and `random` schedules must agree bit for bit.

    mode "fast"    compiled with -O2, arrays between guard pages
    mode "check"   every access is looked at: bounds, alignment, uninitialised values, data races in shared memory and
                   between blocks, divergent barriers, wrong warp masks, integer overflow. The first breach is a
                   KernelError that names kernel, array, source line, block and thread

What it cannot see: flags and locks built from atomics (they look like races), accesses that the compiler removed, and
time. Two threads that write the same value race.
"""

from cupaged.backends.emu.compiler import Compiler, find_compiler
from cupaged.backends.emu.memory import POISON, array, copy_blocks, empty, forget, never_written, wrote
from cupaged.backends.emu.module import Kernel, Mode, Module, Schedule

__all__ = ["POISON", "Compiler", "Kernel", "Mode", "Module", "Schedule", "array", "copy_blocks", "empty", "find_compiler", "forget", "never_written", "wrote"]
