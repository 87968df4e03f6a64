"""Keys and values on their way before they are needed: matrix products ask for what the next attention will read.

A product of many rows is bound by arithmetic and leaves the memory idle; attention over many sequences does the reverse. So
while registers multiply, the cache lines of the blocks that come next are asked for, now and then a few, and
lie in the last-level cache when attention begins. It is a hint only: results do not depend on it.

What is fetched is cut into pieces of PIECE bytes of a block's keys, and as many of its values. Member p of a team takes
those of the blocks p, p + parts, ... of the batch's list (cpu_batch.BLOCKS), and remembers in its word CURSOR how far it is.
"""

from __future__ import annotations

from numba import carray

from cupaged.backends.cpu_batch import BLOCKS, NUM_BLOCKS
from cupaged.backends.cpu_ir import pointer_to_int32, set_word, word
from cupaged.backends.cpu_jit import kernel
from cupaged.backends.cpu_program import CURSOR, PART, PARTS

KEYS, VALUES, BATCH, BLOCK_BYTES = range(4)
"""Words about the next attention, in a product's operation: its caches, its batch (0: there is none), and the bytes of all heads of a block."""

PIECE = 8192
"""Bytes of keys, and of values, that are asked for during one run over k."""


@kernel
def take_piece(team: int, ahead: int, idle: int) -> tuple[int, int, int]:
    """The member's next piece: its keys, its values, and the bytes of each; (idle, idle, 0) when there is none (any more)."""
    batch, block_bytes = word(ahead, BATCH), word(ahead, BLOCK_BYTES)
    if batch == 0:
        return idle, idle, 0
    pieces = (block_bytes + PIECE - 1) // PIECE
    cursor = word(team, CURSOR)
    number = cursor // pieces * word(team, PARTS) + word(team, PART)
    if number >= word(batch, NUM_BLOCKS):
        return idle, idle, 0
    set_word(team, CURSOR, cursor + 1)
    block, first = carray(pointer_to_int32(word(batch, BLOCKS) + 4 * number), 1)[0], cursor % pieces * PIECE
    place = block * block_bytes + first
    return word(ahead, KEYS) + place, word(ahead, VALUES) + place, min(PIECE, block_bytes - first)
