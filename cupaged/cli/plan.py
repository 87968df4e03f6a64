"""`cupaged plan`: what a GPU would do with a model, before one is bought."""

from __future__ import annotations

import json

import click

from cupaged.capacity import Capacity, Wish, capacity, find_model
from cupaged.cli.options import memory_size
from cupaged.cli.terminal import ProgressView
from cupaged.presets import DEVICES, MODELS, preset

REASONS = {
    "memory": "most of a step goes into reading the weights, and more memory would let more requests share that",
    "bandwidth": "most of a step goes into reading keys and values: fewer bytes a token (grouped heads, fp8) or more bandwidth",
    "compute": "most of a step is arithmetic: a faster device, or narrower types",
}


@click.command()
@click.option("--model", "-m", default="llama-3-8b", show_default=True, help=f"A preset ({', '.join(MODELS)}), folder, config.json's folder, .gguf file or hub id.")
@click.option("--gpu", default="a100-80gb", show_default=True, help=f"A machine: {', '.join(DEVICES)}.")
@click.option("--memory", type=memory_size, metavar="SIZE", help="Memory of one GPU, in its place: 80GB, 24GiB.")
@click.option("--context", type=int, help="Longest prompt and output together (default: the model's).")
@click.option("--prompt", type=int, help="Prompt tokens of a request, on average (default: ShareGPT's 161).")
@click.option("--output", type=int, help="Output tokens of a request, on average (default: ShareGPT's 338).")
@click.option("--dtype", default="auto", help="Storage of the weights: auto (the machine's), float32, float16, bfloat16, fp8, int8.")
@click.option("--kv-cache-dtype", default="auto", help="Storage of keys and values: the same names.")
@click.option("--block-size", type=int, default=16, show_default=True, help="Tokens per KV block.")
@click.option("--tensor-parallel", type=int, default=1, show_default=True, help="GPUs that share the model.")
@click.option("--utilisation", type=float, default=0.9, show_default=True, help="Share of the memory that weights and KV may take.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def command(
    model: str, gpu: str, memory: int | None, context: int | None, prompt: int | None, output: int | None, dtype: str,
    kv_cache_dtype: str, block_size: int, tensor_parallel: int, utilisation: float, as_json: bool,
) -> None:  # fmt: skip
    """What a machine does with a model: bytes, blocks, requests at once, and what holds it up.

    \b
    Examples:
      cupaged plan --model llama-3-70b --memory 80GB --context 8192
      cupaged plan --model opt-13b --gpu a100-40gb --prompt 161 --output 338 --json
    """
    device = preset("device", gpu, DEVICES)
    with ProgressView() as progress:
        shape, stored = find_model(model, progress)
    wish = Wish(memory, context, dtype, kv_cache_dtype, block_size, tensor_parallel, utilisation, prompt, output, stored)
    found = capacity(shape, device, wish)
    if as_json:
        click.echo(json.dumps(found.values()))
        return
    for name, value in lines(found):
        click.echo(f"{name:<17}{value}")


def lines(found: Capacity) -> list[tuple[str, str]]:
    """Names and values, ready to be read."""
    shared = f" on each of {found.tensor_parallel} devices" if found.tensor_parallel > 1 else ""
    stored = "as on disk" if found.dtype == "stored" else f"in {found.dtype}"
    head = [
        ("model", f"{found.model}, {found.parameters / 1e9:.2f} billion weights, {found.weights_bytes / 1e9:.2f} GB {stored}{shared}"),
        ("machine", f"{found.device}, {found.memory / 1e9:.1f} GB"),
        ("KV of a token", f"{found.kv_formula} bytes in {found.kv_cache_dtype}"),
        ("a block", f"{found.block_size} tokens over all layers and heads: {found.block_bytes / 1e6:.2f} MB"),
        ("a whole context", f"{found.context:,} tokens: {found.context_bytes / 1e9:.2f} GB"),
    ]
    if not found.fits:
        return [*head, ("fits", f"no: beside the weights {found.pool_bytes / 1e9:.2f} GB remain for KV"), *_ways(found)]
    requests = found.requests
    return [
        *head,
        ("KV pool", f"{found.pool_bytes / 1e9:.2f} GB: {found.num_blocks:,} blocks, {found.num_blocks * found.block_size:,} tokens"),
        ("requests at once", f"of {found.mean_prompt} + {found.mean_output} tokens: {requests['max']:,} under max, {requests['pow2']:,} under pow2,"
         f" {requests['paged']:,} paged ({requests['paged, longest']:,} if all are at their longest)"),
        ("a step of them", ", ".join(f"{part} {1e3 * seconds:.1f} ms" for part, seconds in found.seconds.items())
         + f": at best {found.tokens_per_second:,.0f} tokens/s"),
        ("bottleneck", f"{found.bottleneck}: {REASONS[found.bottleneck]}"),
        *_ways(found),
    ]  # fmt: skip


def _ways(found: Capacity) -> list[tuple[str, str]]:
    """What would fit: the fewest devices for each width of the weights."""
    rows = []
    for dtype in dict.fromkeys(way.dtype for way in found.ways):
        fitting = [way for way in found.ways if way.dtype == dtype and way.requests]
        if fitting:
            way = fitting[0]
            devices = f"{way.gpus} such device{'s' * (way.gpus > 1)}"
            rows.append(("what fits", f"{dtype} weights on {devices}, {way.weights_bytes / 1e9:.1f} GB each: {way.requests:,} request{'s' * (way.requests > 1)} of the whole context"))
    return rows or [("what fits", "not even all of its KV heads on a device each: take a machine with more memory")]
