"""Compile every variant of every kernel for every GPU, without one, and say what it takes.

    python scripts/compile_kernels.py [--arch sm_90] [KERNEL ...]

A line a variant: registers, local and shared memory, and what is wrong with it. Ends with one line; exit status 1 if
anything was wrong. Needs CuPy and the CUDA compiler's wheels (it says which).
"""

from __future__ import annotations

import argparse
import sys

from cupaged.backends import nvrtc
from cupaged.backends.kernel_specs import SPECS, variants
from cupaged.errors import BackendError


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile every variant of the CUDA kernels, without a GPU.")
    parser.add_argument("kernels", nargs="*", choices=[*SPECS, []], metavar="KERNEL", help="default: all")
    parser.add_argument("--arch", choices=nvrtc.ARCHITECTURES, action="append", help="default: all")
    options = parser.parse_args()
    reason = nvrtc.missing()
    if reason is not None:
        print(f"error: {reason}", file=sys.stderr)
        return 1
    total = wrong = 0
    for name in options.kernels or SPECS:
        for variant in variants(SPECS[name]):
            for architecture in options.arch or nvrtc.ARCHITECTURES:
                total += 1
                try:
                    used = nvrtc.compile_variant(variant, architecture)
                    found = nvrtc.complaints(SPECS[name], used)
                    text = f"{used.registers:3} registers {used.local_bytes:4} B local {used.shared_bytes:6} B shared"
                except BackendError as error:
                    found, text = [str(error)], ""
                wrong += bool(found)
                print(f"{name:20} {architecture}  {text}  {' '.join(variant.options)}  {'; '.join(found)}".rstrip())
    print(f"{total} variants, {wrong} with something wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
