"""The choice of what a product asks for ahead of the next attention (cpu_prefetch.py)."""

from __future__ import annotations

from numba import carray

from cupaged.backends.cpu_batch import BLOCKS, NUM_BLOCKS
from cupaged.backends.cpu_kernels.ir import pointer_to_int32, set_word, word
from cupaged.backends.cpu_kernels.jit import kernel
from cupaged.backends.cpu_kernels.program import share
from cupaged.backends.cpu_prefetch import BATCH, BLOCK_BYTES, KEYS, PIECE, VALUES
from cupaged.backends.cpu_program import CURSOR, PART, PARTS


@kernel
def take_piece(member: int, ahead: int, idle: int) -> tuple[int, int, int]:
    """The member's next piece: its keys, its values, and the bytes of each; (idle, idle, 0) when there is none (any more)."""
    batch, block_bytes = word(ahead, BATCH), word(ahead, BLOCK_BYTES)
    if batch == 0:
        return idle, idle, 0
    pieces = (block_bytes + PIECE - 1) // PIECE
    cursor = word(member, CURSOR)
    blocks, part, parts = word(batch, NUM_BLOCKS), word(member, PART), word(member, PARTS)
    number = share(blocks, part, parts) + cursor // pieces
    if number >= share(blocks, part + 1, parts):
        return idle, idle, 0
    set_word(member, CURSOR, cursor + 1)
    block, first = carray(pointer_to_int32(word(batch, BLOCKS) + 4 * number), 1)[0], cursor % pieces * PIECE
    place = block * block_bytes + first
    return word(ahead, KEYS) + place, word(ahead, VALUES) + place, min(PIECE, block_bytes - first)
