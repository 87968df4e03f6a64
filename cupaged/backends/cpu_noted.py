"""What a product notes of the logits that it makes, for the choice of the likeliest token right behind it in a program.

A vocabulary of logits for many rows is larger than a core's caches. A task of the product looks at its columns while they lie
there, and notes the extremes of each row; the choice then reads the part of a row where the largest is, and nothing else.

    word 0          1 .. 7   8 ..
         columns    .        a pair of int32 for every row, the smallest and the largest in order (cpu_kernels/extremes.py): first all rows
         of a task           of the tasks of the first columns, then those of the next ones
"""

from __future__ import annotations

from itertools import pairwise

from cupaged.backends import cpu_gemm, cpu_sampling
from cupaged.backends.cpu_code import address, loaded
from cupaged.backends.cpu_formats import TILE_COLUMNS
from cupaged.backends.cpu_gemm import LONGEST_TASK, TASKS_A_MEMBER
from cupaged.backends.cpu_program import KERNEL, Words, aligned

WIDTH, FIRST_PAIR = 0, 8


def connect(table: Words, rows: int, members: int) -> list[Words]:
    """Let every product of a program of up to `rows` rows note what the choice right behind it wants to know; the memory for that."""
    memory = []
    products, choice = loaded("gemm"), address("greedy_rows")
    for product, chosen in pairwise(table):
        if chosen[KERNEL] != choice or product[KERNEL] not in products:
            continue
        logits = chosen[cpu_sampling.LOGITS], chosen[cpu_sampling.VOCAB], cpu_gemm.PLAIN
        if logits == (product[cpu_gemm.Y], product[cpu_gemm.N], product[cpu_gemm.EPILOGUE]):
            tiles = -(-int(logits[1]) // TILE_COLUMNS)
            most = 2 * TASKS_A_MEMBER * members + -(-tiles // LONGEST_TASK) + 2 * members  # tasks of the same rows
            noted = aligned((FIRST_PAIR + most * rows,), "int64")
            product[cpu_gemm.NOTED] = chosen[cpu_sampling.NOTED] = noted.ctypes.data
            memory.append(noted)
    return memory
