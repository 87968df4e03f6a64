"""Keys and values on their way before they are needed: what a product is told of the attention that follows it.

A product of many rows is bound by arithmetic and leaves the memory idle; attention over many sequences does the reverse. So
while registers multiply, the cache lines of the blocks that come next are asked for, now and then a few, and
lie in the last-level cache when attention begins (cpu_kernels/prefetch.py). It is a hint only: results do not depend on it.

What is fetched is cut into pieces of PIECE bytes of a block's keys, and as many of its values. Every member of a crew takes
those of its share of the batch's list (cpu_batch.BLOCKS), which is about what it will read, and remembers in its word CURSOR
how far it is.
"""

from __future__ import annotations

KEYS, VALUES, BATCH, BLOCK_BYTES = range(4)
"""Words about the next attention, in a product's operation: its caches, its batch (0: there is none), and the bytes of all heads of a block."""

FETCHING_ROWS = 24
"""Of more rows products ask for what attention reads, and it does not ask again, which costs more than it gives; of fewer it asks itself."""

PIECE = 8192
"""Bytes of keys, and of values, that are asked for during one run over k."""
