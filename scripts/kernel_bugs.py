"""Bugs for planted_bugs.py in the CUDA kernels and the code that launches them: (name, file, text, text instead)."""

V2, MERGE, DECODE, TILE = (f"kernels_cu/{name}" for name in ("paged_attention_v2.cu", "merge_partitions.cu", "paged_decode.cu", "attention_tile.cuh"))
PREFILL, PLAIN, DEVICE, ROPE = (f"kernels_cu/{name}" for name in ("paged_prefill.cu", "plain_prefill.cu", "device.cuh", "rope_and_cache.cu"))
SKINNY, PRODUCT, GATE_UP = (f"kernels_cu/{name}" for name in ("skinny_matmul.cu", "skinny_product.cuh", "skinny_gate_up.cu"))
LOGPROBS, SAMPLE = (f"kernels_cu/{name}" for name in ("token_logprobs.cu", "sample_tokens.cu"))
PLAN, ATTENTION, BATCH, KERNELS = (f"cupaged/backends/{name}.py" for name in ("split_plan", "kernel_attention", "kernel_batch", "kernels"))
SWAPS = "cupaged/backends/kernel_swaps.py"

KERNEL_BUGS = (
    # ---- tensor cores
    ("a shrink is forgotten", TILE, "state.out[n][2 * half + 1] *= shrink;", ""),
    ("the sum is not shrunk", TILE, "state.l[half] * shrink + reduce", "state.l[half] + reduce"),
    ("a row's maximum over two lanes, not four", TILE, "reduce_lanes<Max, 4>(largest)", "reduce_lanes<Max, 2>(largest)"),
    ("softmax in the wrong base", TILE, "      s = exp2f(s - reference);", "      s = __expf(s - reference);"),
    ("swizzle of writes and reads differ", DECODE, "copy_async16(chunk_at(ring + TILE_SIZE, row, chunk)", "copy_async16(chunk_at(ring + TILE_SIZE, row, (chunk + row / 8) % CHUNKS)"),
    ("the newest token is not seen", DECODE, "position >= oldest && position <= newest ?", "position >= oldest && position < newest ?"),
    ("every warp takes the same tiles", DECODE, "for (int tile = item.first + warp; tile < item.end; tile += WARPS)", "for (int tile = item.first; tile < item.end; tile += WARPS)"),
    ("a ring's stage is reused early", DECODE, "int stage = 0, next = STAGES - 1;", "int stage = 0, next = 0;"),
    ("two heads of a group change places", DECODE, "return row < group ? of_row + row * HEAD_DIM : nullptr;", "return row < group ? of_row + (group - 1 - row) * HEAD_DIM : nullptr;"),
    ("prefill's tile is one row short", PREFILL, "find_query_tile(query_start, num_decode, num_seqs, rows, ROWS / group)", "find_query_tile(query_start, num_decode, num_seqs, rows, ROWS / group - 1)"),
    ("prefill sees a token too many", PREFILL, "positions[tile.first_row + r / group] : -1;", "positions[tile.first_row + r / group] + 1 : -1;"),
    ("prefill's window is a token short", PREFILL, "newest[half] - window + 1 : 0;", "newest[half] - window + 2 : 0;"),
    # ---- any type
    ("plain prefill's window is a token short", PLAIN, "newest >= window ? newest - window + 1 : 0;", "newest >= window ? newest - window + 2 : 0;"),
    ("a partition begins a token late", V2, "const int first = oldest + part * part_size,", "const int first = oldest + part * part_size + (part > 0),"),
    ("parts are weighed by the wrong maximum", MERGE, "if (sum > 0.0f) l += sum * exp2f(partial_max[first + i * step] - m);", "if (sum > 0.0f) l += sum * exp2f(partial_max[first] - m);"),
    ("merge in the wrong base", MERGE, "acc += partial_out[part * head_dim + d] * exp2f(partial_max[part] - m);", "acc += partial_out[part * head_dim + d] * __expf(partial_max[part] - m);"),
    ("an address in 32 bits", DEVICE, "return ((block * num_kv_heads + head)", "return ((static_cast<int>(block) * num_kv_heads + head)"),
    ("a padded lane is written to slot 0", ROPE, "head >= num_heads && slot >= 0", "head >= num_heads && slot >= -1"),
    ("the bias is added to what is there twice", SKINNY, "if (add) total += to_float(result);", "if (add) total += to_float(result) + (num_biases > 0 ? bias[first + j] : 0.0f);"),
    ("the squares are of the scaled row", PRODUCT, "          squares[m] += row[i] * row[i];\n          row[i] *= scale[i];", "          row[i] *= scale[i];\n          squares[m] += row[i] * row[i];"),
    ("all rows share the first one's factor", PRODUCT, "reduce_lanes<Sum>(squares[m])", "reduce_lanes<Sum>(squares[0])"),
    ("the norm's factor without eps", PRODUCT, "/ in_width + eps)", "/ in_width)"),
    ("a fused gate takes the bias of up", GATE_UP, "gate += bias[column];", "gate += bias[width + column];"),
    ("up is the column behind the gate's", GATE_UP, "there ? of_gate + half : nullptr", "there ? of_gate + in_width : nullptr"),
    ("a share of the row is not searched again", LOGPROBS, "if (threadIdx.x == share) mine = below;", "if (threadIdx.x == share) mine = 0;"),
    ("the search of a share misses its end", LOGPROBS, "other += THREADS * THREADS) {", "other += 2 * THREADS * THREADS) {"),
    ("the kept tokens are one too few", SAMPLE, "find_floor(of_row, vocab_size, Counted{}, top_k[row], 0, highest)", "find_floor(of_row, vocab_size, Counted{}, top_k[row] - 1, 0, highest)"),
    # ---- tokens of the step before
    ("every row takes a chosen token", "kernels_cu/fill_tokens.cu", "row < rows && sources[row] >= 0", "row < rows"),
    ("a chosen token goes to the row of its source", "kernels_cu/fill_tokens.cu", "token_ids[row] = max", "token_ids[sources[row]] = max"),
    ("a choice that failed is looked up", "kernels_cu/fill_tokens.cu", "max(chosen[sources[row]], 0)", "chosen[sources[row]]"),
    ("sources of an earlier step are left over", BATCH, "            if sources is not None:\n                content", "            if sources is None:\n                del content[\"sources\"]\n            else:\n                content"),
    # ---- the host
    ("the overhead is not counted", PLAN, "cost = begin + OVERHEAD * np.arange(len(begin))", "cost = begin + 0 * np.arange(len(begin))"),
    ("padded lanes are written", BATCH, "slots=longer(attention.slots, -1),", "slots=longer(attention.slots, 0),"),
    ("padded lanes have a context", BATCH, "context_lens=longer(attention.context_lens, 0),", "context_lens=longer(attention.context_lens, 1),"),
    ("one graph for all numbers of lanes", "cupaged/backends/kernel_graphs.py", "elif lanes in self._graphs:\n            self._graphs[lanes].replay()", "elif self._graphs:\n            next(iter(self._graphs.values())).replay()"),
    ("a graph's table is that of the step before", BATCH, "not np.array_equal(tables, self._sent)", "tables.shape != self._sent.shape"),
    ("an interrupted table counts as that before it", BATCH, "            self._sent = None  # should this be interrupted\n", ""),
    ("a graph's table is sent and forgotten", BATCH, "            self._sent = tables.copy()\n", "            self._sent = tables\n"),
    ("the plan forgets the window", BATCH, "self._num_shares, self.limits.window)", "self._num_shares)"),
    ("partitions of the window, not of the context", ATTENTION, "min(rows.max_context, window or rows.max_context)", "min(rows.max_context, (window or rows.max_context) - 1)"),
    ("16-bit keys with float32 activations on tensor cores", ATTENTION, " and qkv.dtype == key_cache.dtype", ""),
    ("swapped blocks go to the pool", KERNELS, "self._swaps.swap(source, target, pairs)", "self._swaps.swap(source, source, pairs)"),
    # ---- swaps beside the steps
    ("a step overwrites what is on its way out", SWAPS, "touched if swap.inward else written", "touched if swap.inward else written[:0]"),
    ("a step reads what has not come in", SWAPS, "touched if swap.inward else written", "written"),
    ("a block goes out before it is computed", SWAPS, "after is None or self._touched is None or np.isin(blocks, self._touched()).any()", "after is None or self._touched is None"),
    ("copies do not wait for swaps", SWAPS, "        self._wait(pairs.ravel(), pairs[:, 1])\n", ""),
    ("a swap does not wait for copies", SWAPS, "        self._touched = None\n", ""),
    ("the way in is taken for the way out", SWAPS, "blocks = pairs[:, 1] if inward else pairs[:, 0]", "blocks = pairs[:, 0]"),
    ("a swap that is waited for takes those behind it along", SWAPS, "del self._under_way[: i + 1]", "self._under_way.clear()"),
    ("an interrupted swap is not waited for", SWAPS, "            self._device.wait_for(self._device.swap(source, target, pairs[:0], after))\n", ""),
    ("a swap forgets those before it", SWAPS, "[*(swap for swap in self._under_way if not swap.done.done), _Swap(done, blocks, inward)]", "[_Swap(done, blocks, inward)]"),
)  # fmt: skip
