"""Other people's kernels and engines on the same GPU, where they are installed: torch's SDPA, FlashInfer, transformers.

A GPU's figures only say something beside others of the same run. What is not installed, or refuses a shape, is said so.
FlashInfer may compile its kernels at first use; that is not timed, but it takes its time from the budget.
"""

from __future__ import annotations

import importlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from gpu import decode, prefill
from gpu.bench import Bench, Heads
from gpu.cases import Case, Figures, Skip
from gpu.end_to_end import model_path, prompts_of

SCRIPTS = Path(__file__).resolve().parent.parent
BLOCK = 16
WORKSPACE_BYTES = 256 << 20
DECODE = ((1, 4096), (8, 4096), (32, 4096), (128, 1024), (8, 16384))
PREFILL = ((1, 4096, 4096), (8, 1024, 1024), (1, 512, 16384))
REPLAYS = 20

Work = Callable[[int], object]
"""Computes on pool number i."""


@cache
def module(name: str) -> Any:
    """Raises Skip where it is not installed or cannot be loaded."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise Skip(f"{name}: {str(error).splitlines()[0]}") from error


def needs_gpu(bench: Bench) -> Any:
    """torch, on the GPU of the run."""
    if bench.device.name != "cuda":
        raise Skip("these run on a GPU only")
    torch = module("torch")
    if not torch.cuda.is_available():
        raise Skip("torch sees no GPU")
    device: Any = bench.device
    torch.cuda.set_device(device._device.id)
    return torch


def seconds_of(torch: Any, work: Work, pools: int) -> float:
    """Of one call, by events around replays of a torch graph over all pools."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            work(0)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(pools):
            work(i)
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return statistics.median(times) / pools


def figure(measure: Callable[[], float]) -> float | str:
    """Microseconds, or why there are none."""
    try:
        return 1e6 * measure()
    except Skip as reason:
        return str(reason)
    except Exception as error:  # a peer that refuses a shape is told, not a fault of ours
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:80]


def compared(ours: float, peers: dict[str, Callable[[], float]]) -> Figures:
    figures: Figures = {"ours us": 1e6 * ours}
    for name, measure in peers.items():
        theirs = figure(measure)
        figures[f"{name} us"] = theirs
        figures[f"{name} / ours"] = theirs / (1e6 * ours) if isinstance(theirs, float) else None
    return figures


# ---- decode


def decoding(bench: Bench) -> Iterator[Case]:
    for heads in bench.heads:
        for batch, context in DECODE if not bench.tiny else ((1, 32),):
            yield Case(decode.name(heads, batch, context), partial(_decoding, bench, heads, batch, context))


def _decoding(bench: Bench, heads: Heads, batch: int, context: int) -> Figures:
    torch = needs_gpu(bench)
    ours = decode.tuned_seconds(bench, heads, batch, context)
    pools = max(decode.FEWEST_CALLS, bench.copies(4 * batch * context * heads.kv * heads.head_dim))
    peers = {
        "SDPA": partial(_sdpa_decode, torch, heads, batch, context, pools),
        "FlashInfer": partial(_flashinfer_decode, torch, heads, batch, context, pools, False),
        "FlashInfer with tensor cores": partial(_flashinfer_decode, torch, heads, batch, context, pools, True),
    }
    return compared(ours, peers)


def _random(torch: Any, *shape: int) -> Any:
    return torch.rand(shape, dtype=torch.bfloat16, device="cuda") * 2 - 1


def _sdpa_decode(torch: Any, heads: Heads, batch: int, context: int, pools: int) -> float:
    query = _random(torch, batch, heads.query, 1, heads.head_dim)
    keys, values = (_random(torch, pools, batch, heads.kv, context, heads.head_dim) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return seconds_of(torch, lambda i: attend(query, keys[i], values[i], enable_gqa=True), pools)


def _pages(torch: Any, sequences: int, context: int) -> tuple[Any, Any, Any]:
    """FlashInfer's page table of shuffled pages: (indptr, indices, last_page_len)."""
    of_one = context // BLOCK
    indices = torch.from_numpy(np.random.default_rng(0).permutation(sequences * of_one).astype(np.int32)).cuda()
    indptr = torch.arange(0, sequences * of_one + 1, of_one, dtype=torch.int32, device="cuda")
    return indptr, indices, torch.full((sequences,), BLOCK, dtype=torch.int32, device="cuda")


def _paged_pool(torch: Any, heads: Heads, pools: int, sequences: int, context: int) -> list[tuple[Any, Any]]:
    shape = pools, sequences * context // BLOCK, heads.kv, BLOCK, heads.head_dim
    keys, values = (_random(torch, *shape) for _ in range(2))
    return [(keys[i], values[i]) for i in range(pools)]


def _flashinfer_decode(torch: Any, heads: Heads, batch: int, context: int, pools: int, tensor_cores: bool) -> float:
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = module("flashinfer").BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=tensor_cores)
    wrapper.plan(
        *_pages(torch, batch, context), heads.query, heads.kv, heads.head_dim, BLOCK, q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16
    )
    query, caches = _random(torch, batch, heads.query, heads.head_dim), _paged_pool(torch, heads, pools, batch, context)
    return seconds_of(torch, lambda i: wrapper.run(query, caches[i]), pools)


# ---- prefill


def prefilling(bench: Bench) -> Iterator[Case]:
    for heads in bench.heads[-2:]:
        for size in PREFILL if not bench.tiny else ((1, 32, 32),):
            yield Case(prefill.name(heads, *size), partial(_prefilling, bench, heads, *size))


def _prefilling(bench: Bench, heads: Heads, sequences: int, new: int, context: int) -> Figures:
    torch = needs_gpu(bench)
    ours = prefill.seconds_of(bench, heads, sequences, new, context)
    peers = {"FlashInfer FA2": partial(_flashinfer_prefill, torch, heads, sequences, new, context)}
    if new == context:
        peers["SDPA"] = partial(_sdpa_prefill, torch, heads, sequences, new)
    work = prefill.operations(heads, sequences, new, context)
    return compared(ours, peers) | {"ours TFLOP/s": 1e-12 * work / ours}


def _sdpa_prefill(torch: Any, heads: Heads, sequences: int, new: int) -> float:
    query = _random(torch, sequences, heads.query, new, heads.head_dim)
    key, value = (_random(torch, sequences, heads.kv, new, heads.head_dim) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    return seconds_of(torch, lambda _: attend(query, key, value, is_causal=True, enable_gqa=True), 1)


def _flashinfer_prefill(torch: Any, heads: Heads, sequences: int, new: int, context: int) -> float:
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")
    wrapper = module("flashinfer").BatchPrefillWithPagedKVCacheWrapper(workspace, "HND", backend="fa2")
    rows = torch.arange(0, (sequences + 1) * new, new, dtype=torch.int32, device="cuda")
    wrapper.plan(
        rows, *_pages(torch, sequences, context), heads.query, heads.kv, heads.head_dim, BLOCK, causal=True,
        q_data_type=torch.bfloat16, kv_data_type=torch.bfloat16,
    )  # fmt: skip
    query, ((key, value),) = _random(torch, sequences * new, heads.query, heads.head_dim), _paged_pool(torch, heads, 1, sequences, context)
    return seconds_of(torch, lambda _: wrapper.run(query, (key, value)), 1)


# ---- a whole engine


def transformers_generate(bench: Bench) -> Iterator[Case]:
    """SmolLM2 in bfloat16 through transformers' generate(), with the prompts of our own part."""
    for batch in (1, 32):
        yield Case(f"transformers, batch {batch}, prompts of 128", partial(_generate, bench, batch, 128, 64))


def _generate(bench: Bench, batch: int, prompt: int, new: int) -> Figures:
    torch, transformers = needs_gpu(bench), module("transformers")
    with tempfile.TemporaryDirectory() as folder:
        exported = str(Path(folder) / "model")
        subprocess.run([sys.executable, str(SCRIPTS / "export_hf.py"), model_path(bench.model), exported], check=True, timeout=120)
        model = transformers.AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16).cuda().eval()
    ids = torch.tensor(prompts_of(batch, prompt), device="cuda")

    def run(count: int) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=count, max_new_tokens=count)
        torch.cuda.synchronize()
        return time.perf_counter() - started

    with torch.inference_mode():
        run(4)
        first, all_of_them = run(1), run(new)
    return {"decode tokens/s": batch * (new - 1) / (all_of_them - first), "prompt tokens/s": batch * prompt / first, "all tokens/s": batch * new / all_of_them}
