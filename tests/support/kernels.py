"""What tests of the CUDA kernels need of the machine."""

from __future__ import annotations

import pytest

from cupaged.backends.emu import find_compiler
from cupaged.errors import BackendError

compiler_is_required = False
"""Set by --require-compiler."""


def skip_without_compiler() -> None:
    """The emulator compiles kernels with the machine's C++ compiler."""
    try:
        find_compiler()
    except BackendError as error:
        if compiler_is_required:
            pytest.fail(str(error))
        pytest.skip(str(error))
