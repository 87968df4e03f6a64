"""The kernels of kernels_cu as KernelSpecs: everything that can be launched, with what it takes.

Symbols: rows T or R; num_seqs S; num_heads H; num_kv_heads K; see the shapes of backends/base.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cupaged.backends.launch import KernelSpec, Variant, read, scalar, write

HEAD_DIMS = (16, 32, 64, 128)
"""The head_dims that the tiled kernels are built for."""

PAGED = (1, 0)
"""1: through the block table; 0: the twin over contiguous memory, which shows what the table costs."""

NORMED = (0, 1)
"""1: the product is of rms_norm(x)."""

QKV = "rows, (num_heads + 2 * num_kv_heads) * head_dim"
POOL = "num_blocks, num_kv_heads, block_size, head_dim"

GATHER_ROWS = KernelSpec(
    "gather_rows", "out[r] = table[rows[r]]: embedding, and the rows whose logits are wanted",
    read("table", "WEIGHT_T", "num_rows, width"),
    read("rows", "int32", "count"),
    write("out", "ACT_T", "count, width"),
    scalar("width"),
    grid="count, ceil_div(width, 1024)", block=256,
)  # fmt: skip

FILL_TOKENS = KernelSpec(
    "fill_tokens", "tokens that the step before has chosen, and that the host has not read yet, are put into this one",
    read("sources", "int32", "rows"),
    read("chosen", "int32", "num_chosen"),
    write("token_ids", "int32", "rows"),
    scalar("rows"),
    grid="ceil_div(rows, 128)", block=128,
)  # fmt: skip

RMS_NORM = KernelSpec(
    "rms_norm", "out = x / sqrt(mean(x^2) + eps) * weight",
    read("x", "ACT_T", "rows, width"),
    read("weight", "float32", "width"),
    write("out", "ACT_T", "rows, width"),
    scalar("width"),
    scalar("eps", "float32"),
    grid="rows", block=256,
)  # fmt: skip

HEAD_RMS_NORM = KernelSpec(
    "head_rms_norm", "rms_norm of every query and key head, in place",
    write("qkv", "ACT_T", QKV),
    read("q_weight", "float32", "head_dim"),
    read("k_weight", "float32", "head_dim"),
    scalar("num_heads"),
    scalar("num_kv_heads"),
    scalar("head_dim"),
    scalar("eps", "float32"),
    grid="rows, num_heads + num_kv_heads", block=32,
)  # fmt: skip

ROPE_AND_CACHE = KernelSpec(
    "rope_and_cache", "rotate queries and keys in place, write keys and values to their slots",
    write("qkv", "ACT_T", QKV),
    read("cos", "float32", "max_positions, head_dim // 2"),
    read("sin", "float32", "max_positions, head_dim // 2"),
    read("positions", "int32", "rows"),
    read("slots", "int64", "rows"),
    write("key_cache", "KV_T", POOL),
    write("value_cache", "KV_T", POOL),
    scalar("num_heads"),
    scalar("num_kv_heads"),
    scalar("block_size"),
    scalar("head_dim"),
    grid="rows", block=128,
)  # fmt: skip

SILU_MUL = KernelSpec(
    "silu_mul", "out = silu(gate) * up",
    read("gate_up", "ACT_T", "rows, 2 * width"),
    write("out", "ACT_T", "rows, width"),
    scalar("width"),
    grid="rows, ceil_div(width, 1024)", block=256,
)  # fmt: skip

ADD_BIAS = KernelSpec(
    "add_bias", "out += bias in every row",
    write("out", "ACT_T", "rows, width"),
    read("bias", "float32", "width"),
    scalar("width"),
    grid="rows, ceil_div(width, 1024)", block=256,
)  # fmt: skip

SKINNY_MATMUL = KernelSpec(
    "skinny_matmul", "out = x @ weight.T + bias, or out += it, for at most 4 rows; of x or of its rms_norm",
    read("x", "ACT_T", "rows, in_width"),
    read("norm", "float32", "normed * in_width"),
    read("weight", "WEIGHT_T", "out_width, in_width"),
    read("bias", "float32", "num_biases"),
    write("out", "OUT_T", "rows, out_width"),
    scalar("rows"),
    scalar("in_width"),
    scalar("out_width"),
    scalar("num_biases"),
    scalar("eps", "float32"),
    scalar("add"),
    grid="ceil_div(out_width, 8)", block=128, macros={"normed": NORMED},
)  # fmt: skip

SKINNY_GATE_UP = KernelSpec(
    "skinny_gate_up", "out = silu(gate) * up, both of them products of rms_norm(x), for at most 4 rows",
    read("x", "ACT_T", "rows, in_width"),
    read("norm", "float32", "in_width"),
    read("weight", "WEIGHT_T", "2 * width, in_width"),
    read("bias", "float32", "num_biases"),
    write("out", "OUT_T", "rows, width"),
    scalar("rows"),
    scalar("in_width"),
    scalar("width"),
    scalar("num_biases"),
    scalar("eps", "float32"),
    grid="ceil_div(width, 4)", block=128,
)  # fmt: skip

COPY_BLOCKS = KernelSpec(
    "copy_blocks", "whole blocks of keys and values, over all layers, within the pool or from one to another",
    read("source_key", "KV_T", "layers, source_blocks, block_elements"),
    read("source_value", "KV_T", "layers, source_blocks, block_elements"),
    write("target_key", "KV_T", "layers, target_blocks, block_elements"),
    write("target_value", "KV_T", "layers, target_blocks, block_elements"),
    read("pairs", "int32", "count, 2"),
    scalar("source_blocks"),
    scalar("target_blocks"),
    scalar("block_elements", "int64"),
    grid="count, layers", block=128,
)  # fmt: skip

PAGED_ATTENTION_V1 = KernelSpec(
    "paged_attention_v1", "attention of any rows over the paged cache, one block a row and head: the readable one",
    read("qkv", "ACT_T", QKV),
    read("key_cache", "KV_T", POOL),
    read("value_cache", "KV_T", POOL),
    read("block_tables", "int32", "num_seqs, max_blocks"),
    read("query_start", "int32", "num_seqs + 1"),
    read("context_lens", "int32", "num_seqs"),
    read("positions", "int32", "rows"),
    write("out", "ACT_T", "rows, num_heads * head_dim"),
    scalar("num_seqs"),
    scalar("max_blocks"),
    scalar("num_heads"),
    scalar("num_kv_heads"),
    scalar("block_size"),
    scalar("head_dim"),
    scalar("scale", "float32"),
    scalar("window"),
    grid="rows, num_heads", block=128, shared="4 * (2 * head_dim + 128)",
)  # fmt: skip

ATTENTION_PARTITION = KernelSpec(
    "attention_partition", "paged attention v2, pass 1: decode attention of every partition of the context",
    read("qkv", "ACT_T", QKV),
    read("key_cache", "KV_T", POOL),
    read("value_cache", "KV_T", POOL),
    read("block_tables", "int32", "rows, max_blocks"),
    read("context_lens", "int32", "rows"),
    read("positions", "int32", "rows"),
    write("partial_out", "float32", "rows, num_heads, num_parts, head_dim"),
    write("partial_max", "float32", "rows, num_heads, num_parts"),
    write("partial_sum", "float32", "rows, num_heads, num_parts"),
    scalar("max_blocks"),
    scalar("num_heads"),
    scalar("num_kv_heads"),
    scalar("block_size"),
    scalar("num_parts"),
    scalar("part_size"),
    scalar("scale", "float32"),
    scalar("window"),
    grid="rows, num_kv_heads, num_parts", block=128, macros={"head_dim": HEAD_DIMS, "paged": PAGED}, registers=128, source="paged_attention_v2.cu",
)  # fmt: skip

MERGE_PARTITIONS = KernelSpec(
    "merge_partitions", "paged attention v2, pass 2: the partitions of every row and head put together",
    read("partial_out", "float32", "rows, num_heads, num_parts, head_dim"),
    read("partial_max", "float32", "rows, num_heads, num_parts"),
    read("partial_sum", "float32", "rows, num_heads, num_parts"),
    write("out", "ACT_T", "rows, num_heads * head_dim"),
    scalar("num_heads"),
    scalar("num_parts"),
    scalar("head_dim"),
    grid="rows, num_heads", block=64,
)  # fmt: skip

PAGED_DECODE = KernelSpec(
    "paged_decode", "decode attention on tensor cores over a plan of equal shares",
    read("qkv", "KV_T", QKV),
    read("key_cache", "KV_T", POOL),
    read("value_cache", "KV_T", POOL),
    read("block_tables", "int32", "rows, max_blocks"),
    read("positions", "int32", "rows"),
    read("items", "int32", "max_items, 4"),
    read("item_start", "int32", "share_bounds"),
    write("partial_out", "float32", "max_items, num_heads // num_kv_heads, head_dim"),
    write("partial_max", "float32", "max_items, num_heads // num_kv_heads"),
    write("partial_sum", "float32", "max_items, num_heads // num_kv_heads"),
    scalar("max_blocks"),
    scalar("num_heads"),
    scalar("num_kv_heads"),
    scalar("block_size"),
    scalar("scale", "float32"),
    scalar("window"),
    grid="share_bounds - 1", block=128, shared=f"max({4 * 2 * 16 * 2} * stages * head_dim, {4 * 4 * 16} * (head_dim + 2))",
    macros={"head_dim": (64, 128), "paged": PAGED, "stages": (2, 3)}, types={"KV_T": ("float16", "bfloat16")}, registers=224,
)  # fmt: skip

MERGE_ITEMS = KernelSpec(
    "merge_items", "the second pass after paged_decode: the parts of every row and head put together",
    read("partial_out", "float32", "max_items, num_heads // num_kv_heads, head_dim"),
    read("partial_max", "float32", "max_items, num_heads // num_kv_heads"),
    read("partial_sum", "float32", "max_items, num_heads // num_kv_heads"),
    read("part_start", "int32", "rows * num_kv_heads + 1"),
    write("out", "ACT_T", "rows, num_heads * head_dim"),
    scalar("num_heads"),
    scalar("num_kv_heads"),
    scalar("head_dim"),
    grid="rows, num_heads", block=64, source="merge_partitions.cu",
)  # fmt: skip

PLAIN_PREFILL = KernelSpec(
    "plain_prefill", "attention of sequences with any number of new tokens, tiles of 32 query rows, any type",
    read("qkv", "ACT_T", QKV),
    read("key_cache", "KV_T", POOL),
    read("value_cache", "KV_T", POOL),
    read("block_tables", "int32", "num_seqs, max_blocks"),
    read("query_start", "int32", "num_seqs + 1"),
    read("context_lens", "int32", "num_seqs"),
    read("positions", "int32", "rows"),
    write("out", "ACT_T", "rows, num_heads * head_dim"),
    scalar("rows"),
    scalar("num_decode"),
    scalar("num_seqs"),
    scalar("max_blocks"),
    scalar("num_heads"),
    scalar("num_kv_heads"),
    scalar("block_size"),
    scalar("scale", "float32"),
    scalar("window"),
    grid="(rows - num_decode) // (32 // (num_heads // num_kv_heads)) + num_seqs - num_decode + 1, num_kv_heads",
    block=128, macros={"head_dim": HEAD_DIMS}, registers=128,
)  # fmt: skip

PAGED_PREFILL = KernelSpec(
    "paged_prefill", "attention of sequences with any number of new tokens, tiles of 64 query rows on tensor cores",
    read("qkv", "KV_T", QKV),
    read("key_cache", "KV_T", POOL),
    read("value_cache", "KV_T", POOL),
    read("block_tables", "int32", "num_seqs, max_blocks"),
    read("query_start", "int32", "num_seqs + 1"),
    read("context_lens", "int32", "num_seqs"),
    read("positions", "int32", "rows"),
    write("out", "KV_T", "rows, num_heads * head_dim"),
    scalar("rows"),
    scalar("num_decode"),
    scalar("num_seqs"),
    scalar("max_blocks"),
    scalar("num_heads"),
    scalar("num_kv_heads"),
    scalar("block_size"),
    scalar("scale", "float32"),
    scalar("window"),
    grid="(rows - num_decode) // (64 // (num_heads // num_kv_heads)) + num_seqs - num_decode + 1, num_kv_heads",
    block=128, shared="2 * 2 * 64 * 2 * head_dim", macros={"head_dim": (64, 128)}, types={"KV_T": ("float16", "bfloat16")}, registers=224,
)  # fmt: skip

ADJUST_LOGITS = KernelSpec(
    "adjust_logits", "biases and penalties, in place",
    write("logits", "float32", "rows, vocab_size"),
    read("bias_start", "int32", "rows + 1"),
    read("bias_ids", "int32", "num_biases"),
    read("bias_values", "float32", "num_biases"),
    read("penalised", "uint8", "rows"),
    read("repetition", "float32", "rows"),
    read("presence", "float32", "rows"),
    read("frequency", "float32", "rows"),
    read("row_ids", "int32", "rows"),
    read("output_counts", "int32", "counted_rows, vocab_size"),
    read("in_prompt", "uint8", "counted_rows, vocab_size"),
    scalar("vocab_size"),
    grid="rows", block=256,
)  # fmt: skip

SAMPLE_TOKENS = KernelSpec(
    "sample_tokens", "one token a row: greedy, or temperature, min_p, top_k, top_p and a draw",
    read("logits", "float32", "rows, vocab_size"),
    read("temperature", "float32", "rows"),
    read("top_k", "int32", "rows"),
    read("top_p", "float32", "rows"),
    read("min_p", "float32", "rows"),
    read("seeds", "uint64", "rows"),
    read("positions", "int32", "rows"),
    read("indices", "int32", "rows"),
    write("tokens", "int32", "rows"),
    scalar("vocab_size"),
    grid="rows", block=256, registers=96,
)  # fmt: skip

COUNT_TOKENS = KernelSpec(
    "count_tokens", "the chosen tokens of penalised rows are counted",
    read("tokens", "int32", "rows"),
    read("row_ids", "int32", "rows"),
    read("penalised", "uint8", "rows"),
    write("output_counts", "int32", "counted_rows, vocab_size"),
    scalar("rows"),
    scalar("vocab_size"),
    grid="ceil_div(rows, 128)", block=128,
)  # fmt: skip

TOKEN_LOGPROBS = KernelSpec(
    "token_logprobs", "log_softmax of a given token and of the k likeliest",
    read("logits", "float32", "rows, vocab_size"),
    read("token_ids", "int32", "rows"),
    write("logprobs", "float32", "rows"),
    write("ranks", "int32", "rows"),
    write("top_ids", "int32", "rows, k"),
    write("top_logprobs", "float32", "rows, k"),
    scalar("vocab_size"),
    scalar("k"),
    grid="rows", block=256,
)  # fmt: skip

BEAM_CANDIDATES = KernelSpec(
    "beam_candidates", "log_softmax of the k likeliest tokens: what a beam may go on with",
    read("logits", "float32", "rows, vocab_size"),
    write("top_ids", "int32", "rows, k"),
    write("top_logprobs", "float32", "rows, k"),
    scalar("vocab_size"),
    scalar("k"),
    grid="rows", block=256, source="token_logprobs.cu",
)  # fmt: skip

SPECS = {spec.name: spec for spec in list(vars().values()) if isinstance(spec, KernelSpec)}
"""Every kernel by name."""


def variants(spec: KernelSpec) -> Iterator[Variant]:
    """Every variant that a model may ask for: all types and numbers, keys and values stored as activations are or in 8 bits.

    The contiguous twins are there in 16 bits only. Products take activations as wide as the weights, or float32, and give
    what they take, or float32.
    """
    for chosen in product(*spec.types.values()):
        types = dict(zip(spec.types, chosen, strict=True))
        stored = types.get("KV_T")
        if stored not in (None, types.get("ACT_T", stored), "float8_e4m3fn"):
            continue
        if "OUT_T" in types and not (types["OUT_T"] in (types["ACT_T"], "float32") and types["ACT_T"] in (types["WEIGHT_T"], "float32")):
            continue
        for values in product(*spec.macros.values()):
            numbers = dict(zip(spec.macros, values, strict=True))
            if numbers.get("paged", 1) or stored in ("float16", "bfloat16"):
                yield spec.variant(types, numbers)
