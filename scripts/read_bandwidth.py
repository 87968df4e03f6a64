"""How fast this machine's memory is read: the bound of whatever reads all weights for every token.

    python scripts/read_bandwidth.py --threads 2

Every thread reads an array of its own, far larger than any cache, front to back. Prints the median over many passes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time

import numba
import numpy as np

ARRAY_BYTES = 192 << 20
PASSES = 101


@numba.njit(nogil=True)
def read(words: np.ndarray) -> int:
    """All words, in a way that no compiler leaves out and every one vectorises."""
    total = np.int64(0)
    for i in range(words.shape[0]):
        total ^= words[i]
    return total


def bandwidth(threads: int, array_bytes: int = ARRAY_BYTES, passes: int = PASSES) -> float:
    """Bytes a second by all threads together, the median pass."""
    arrays = [np.ones(array_bytes // 8, np.int64) for _ in range(threads)]
    read(arrays[0][:8])  # compiled, and written before: pages that nobody has touched are not read from memory
    speeds = []
    for _ in range(passes):
        readers = [threading.Thread(target=read, args=(array,)) for array in arrays]
        started = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        speeds.append(threads * array_bytes / (time.perf_counter() - started))
    return statistics.median(speeds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, required=True)
    print(json.dumps({"read_bandwidth": bandwidth(parser.parse_args().threads)}))
