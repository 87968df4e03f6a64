"""TensorSource: a stored tensor that is read on demand. Checkpoints offer them, backends pack them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt


class TensorSource(Protocol):
    """A stored tensor that is read on demand, so that a load holds one piece at a time.

    `storage` names the stored type ("F32", "BF16", "Q4_1", ...).
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def storage(self) -> str: ...

    def read(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.float32]:
        """Rows start..stop of the first axis as float32, shape [stop - start, *shape[1:]]; all of it by default."""
        ...

    def read_blocks(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """The same rows as they are stored: uint8 [stop - start, bytes of a row], blocks in the order of the values.

        Only for a tensor whose rows are whole blocks: every matrix, of which a backend knows the layout by `storage`.
        It may be a view of the file that cannot be written, at any alignment; it stays valid.
        """
        ...
