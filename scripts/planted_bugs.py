#!/usr/bin/env python
"""Plant bugs in the engine, one at a time, and show which test kills each.

    python scripts/planted_bugs.py                 # all of them
    python scripts/planted_bugs.py pins epoch      # those whose name contains one of the words
    python scripts/planted_bugs.py --list

Each bug is a patch of product code: of the bookkeeping, or of the CUDA kernels. It is applied to a copy of the
repository, where the tests of that part must then fail. Exit status 1 if a bug survives, if a patch no longer applies, or if the tests fail without any bug.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kernel_bugs import KERNEL_BUGS

ROOT = Path(__file__).resolve().parent.parent
TESTS = tuple(
    f"tests/test_{name}.py"
    for name in (
        *("block_pool", "prefix_tree", "manager", "scheduler", "policy", "engine", "sampler", "memory"),
        *("lookahead", "overlap", "radix_optimal", "sharing", "groups", "beam_references", "streak", "scheduler_stateful", "equality"),
    )
)
KERNEL_TESTS = tuple(f"tests/test_{name}.py" for name in ("split_plan", "kernels", "kernel_graphs", "late_tokens", "cupy_swaps", "cupy_uploads", "sampling_agreement", "kernel_engine"))


@dataclass(frozen=True)
class Bug:
    """In `file`, each text on the left becomes the text on its right; some of `tests` must notice."""

    name: str
    file: str
    patches: tuple[tuple[str, str], ...]
    tests: tuple[str, ...] = TESTS

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        for old, new in self.patches:
            if text.count(old) != 1:
                raise SystemExit(f"{self.name}: the patch no longer applies, {self.file} holds {old!r} {text.count(old)} times")
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


SCHEDULER, ADMISSION, SEQUENCE, ENGINE, BEAM, STEPS, LOOKAHEAD, STREAK, DRAFT, PLAN = (
    f"cupaged/{name}.py" for name in ("scheduler", "admission", "sequence", "engine", "beam", "steps", "lookahead", "streak", "draft", "step_plan")
)
POOL, MANAGER, TREE, EVICTION, SWAP = (f"cupaged/cache/{name}.py" for name in ("block_pool", "manager", "prefix_tree", "eviction", "swap_space"))
BATCH, SAMPLER, KV_STORE, RUNNER = (f"cupaged/model/{name}.py" for name in ("batch", "sampler", "kv_store", "runner"))
CPU_SAMPLING, CPU_EXTREMES = (f"cupaged/backends/cpu_kernels/{name}.py" for name in ("sampling", "extremes"))
NOTED_TESTS = ("tests/test_cpu_noted.py",)

BUGS = (
    # ---- the pool
    Bug("freed while a plan reads it (no pins)", SCHEDULER, (
        ("self._in_flight[plan] = self.cache.pin(plan.block_tables), self._streak", "self._in_flight[plan] = self.cache.pin([]), self._streak"),
    )),
    Bug("released, and still counted", POOL, (("        self.counts[blocks] = counts\n        idle", "        idle"),)),
    Bug("released twice", MANAGER, (
        ("        self._let_go(self._pool.release(table.held[::-1]))\n\n    def _forget", "        self._let_go(self._pool.release(table.held[::-1]))\n        self._let_go(self._pool.release(table.held[::-1]))\n\n    def _forget"),
    )),
    Bug("released twice, without a check", POOL, (
        ('            raise InvariantError(f"block {blocks[counts.argmin()]} was released more often than it was held")\n', "            counts = np.maximum(counts, 0)\n"),
        ("        self.counts[blocks] = counts\n        idle", "        self.counts[blocks] = np.maximum(counts - (counts > 1), 0)\n        idle"),
    )),
    Bug("pins forgotten", POOL, (("        self.pins[blocks] -= 1\n        return self.release(blocks)", "        self.pins[blocks] -= 1\n        return blocks[:0]"),)),
    Bug("first in, first out", POOL, (
        ("self._stack[first : self._num_free][::-1].copy()", "self._stack[:count].copy()"),
        ("        self._num_free = first\n", "        self._stack[:first] = self._stack[count : self._num_free].copy()\n        self._num_free = first\n"),
    )),
    Bug("a block too few", MANAGER, (("return -(-num_tokens // self.block_size)", "return max(1, num_tokens // self.block_size)"),)),
    Bug("a block too many", MANAGER, (("return -(-num_tokens // self.block_size)", "return num_tokens // self.block_size + 1"),)),
    Bug("blocks kept at the end", SCHEDULER, (("        self.cache.release(sequence.seq_id, sequence.tokens, request.salt)\n        sequence.restart()\n        sequence.finish_reason", "        sequence.restart()\n        sequence.finish_reason"),)),
    # ---- copy-on-write
    Bug("a copy is skipped", KV_STORE, (("        if len(plan.copies):\n", "        if len(plan.copies) > 1:\n"),)),
    Bug("copies after the writes", RUNNER, (
        ("        self._kv.move_blocks(plan)\n        batch", "        batch"),
        ("        prompt_logprobs = self._prompt_logprobs(plan,", "        self._kv.move_blocks(plan)\n        prompt_logprobs = self._prompt_logprobs(plan,"),
    )),
    Bug("written in place though shared", MANAGER, (("return holders == 1 and position", "return position"),)),
    Bug("written in place below the published length", MANAGER, (("return holders == 1 and position % self.block_size >= self._tree.fill.item(block)", "return holders == 1"),)),
    Bug("written in place one slot below it", MANAGER, ((">= self._tree.fill.item(block)", ">= self._tree.fill.item(block) - 1"),)),
    Bug("a plan's pins count as holders", MANAGER, (("holders = self._pool.counts.item(block) - self._pool.pins.item(block)", "holders = self._pool.counts.item(block)"),)),
    Bug("the copy is not put into the table", MANAGER, (("        table.replace(index, copy)\n", ""),)),
    Bug("a copy's blocks are not pinned", MANAGER, (
        ("        self.counters.blocks_copied += 1\n", "        self.counters.blocks_copied += 1\n        self.unpin(np.array(self._copies[-1], np.int32))\n"),
        ("        for block in copies.ravel():\n            self.unpin(np.array([block], np.int32))\n", ""),
    )),
    Bug("copies of a cancelled plan are forgotten", SCHEDULER, (("self.cache.return_copies(plan.copies)", "self.cache.copies_done(plan.copies)"),)),
    Bug("a copy outlives the sequence it was for", MANAGER, (("        sound = self._forget_copies(table)\n", "        sound = table.num_computed\n"),)),
    Bug("a block that was never filled is published", MANAGER, (("            sound = min(sound, int(np.flatnonzero(table.blocks == copy)[0]) * self.block_size)\n", ""),)),
    Bug("a fork is not counted", MANAGER, (("        self._pool.hold(child.held)\n", ""),)),
    Bug("a fork shares a block too few", MANAGER, (("parent.blocks[: self.blocks_for(num_tokens)]", "parent.blocks[: num_tokens // self.block_size]"),)),
    # ---- the prefix cache
    Bug("published before it is computed", MANAGER, (
        ("        if num_computed // self.block_size > table.num_published:\n            self._publish(table, tokens[: num_computed // self.block_size * self.block_size], salt)", "        self._publish(table, tokens[: min(num_computed + 1, table.num_blocks * self.block_size)], salt)"),
    )),
    Bug("a tail is published with its last token", MANAGER, (("self._publish(table, tokens[:sound], salt)", "self._publish(table, tokens[: min(sound + 1, table.num_blocks * self.block_size)], salt)"),)),
    Bug("a tail is published as a full block", TREE, (("        self.fill[blocks[-1]] = len(tokens) - (len(blocks) - 1) * self.block_size\n        for", "        for"),)),
    Bug("tails are dropped", MANAGER, (("self._publish(table, tokens[:sound], salt)", "self._publish(table, tokens[: sound // self.block_size * self.block_size], salt)"),)),
    Bug("nothing is published before the end", MANAGER, (("        if num_computed // self.block_size > table.num_published:\n", "        if False:\n"),)),
    Bug("a match goes one token too far", TREE, (("else np.empty(0, np.int32), done, path)", "else np.empty(0, np.int32), min(done + (done % self.block_size > 0), len(tokens)), path)"),)),
    Bug("a match ends a block early", TREE, (("            if common < len(child.tokens) or common % self.block_size:\n", "            if common < len(child.tokens) or common % self.block_size or True:\n"),)),
    Bug("only one neighbour is compared", TREE, (("node.order[max(0, place - 1) : place + 1]", "node.order[place : place + 1]"),)),
    Bug("a full hit leaves nothing to compute", SEQUENCE, (("return self._tokens[: self.num_tokens - 1]", "return self._tokens[: self.num_tokens]"),)),
    Bug("salts are ignored", TREE, (("self._roots.get(salt)", 'self._roots.get("")'), ("node, done = self._root(salt), 0", 'node, done = self._root(""), 0'))),
    Bug("equal blocks are merged in the wrong order", TREE, (("held[done : done + shared] = child.blocks", "held[done : done + shared] = child.blocks[::-1]"),)),
    Bug("merged with what is not equal", TREE, (("shared = common_prefix(child.tokens, rest) // self.block_size\n", "shared = min(len(child.blocks), full - done)\n"),)),
    Bug("a merge does not hold what it takes", MANAGER, (("            self._pool.hold(held[merged])\n", ""),)),
    Bug("a merge leaks what it gives up", MANAGER, (("            self._let_go(self._pool.release(own[merged]))\n", "            self._pool.release(own[merged])\n"),)),
    Bug("a shorter tail leaks", MANAGER, (("        self._pool.free(dropped[self._pool.counts[dropped] == 0])\n", ""),)),
    Bug("a shorter tail is freed while in use", MANAGER, (("self._pool.free(dropped[self._pool.counts[dropped] == 0])", "self._pool.free(dropped)"),)),
    Bug("a sequence goes on behind a node that is longer", TREE, (("        if end is None or end.blocks[-1] != last:\n", "        if end is None:\n"),)),
    Bug("what is published on is not of use", TREE, (("            node.used = self.clock\n            node = node.parent\n", "            node = node.parent\n"),)),
    Bug("a plan's table is not the latest", "cupaged/cache/block_table.py", (("        self.num_blocks = needed\n        self._copy = None\n", "        self.num_blocks = needed\n"),)),
    Bug("a plan's table misses what was put in its place", "cupaged/cache/block_table.py", (("        self.blocks[places] = blocks\n        self._copy = None\n", "        self.blocks[places] = blocks\n"),)),
    Bug("a shared block is pinned once a table", MANAGER, (("distinct: IntArray = blocks[self._first_place[blocks] == places]", "distinct = blocks"),)),
    Bug("a split forgets its children", TREE, (("        upper.children = {upper.order[0]: node}\n", "        upper.children = {}\n"),)),
    Bug("a block in use is evicted", EVICTION, (("return self._tree.owner(last) is node and not self._pool.counts[last]", "return self._tree.owner(last) is node"),)),
    Bug("a parent is evicted before its child", EVICTION, (("        if node.children or not len(node.blocks):\n", "        if not len(node.blocks):\n"),)),
    Bug("an evicted block stays in the tree", EVICTION, (("            block = self._tree.pop_last(node)\n", "            block = int(node.blocks[-1])\n"),)),
    Bug("what becomes the end of a branch is never evicted", EVICTION, (("            if parent is not None:\n                self.offer(parent)\n", ""),)),
    Bug("an old key decides who is evicted", EVICTION, (("                self.offer(node)\n                continue\n            parent", "                pass\n            parent"),)),
    Bug("a hit is no use", TREE, (("            node.used = self.clock\n            node.hits += 1\n", "            node.hits += 1\n"),)),
    Bug("hits are not counted", TREE, (("            node.hits += 1\n", ""),)),
    Bug("the latest is evicted first", EVICTION, (('    """What was of use longest ago (the default)."""\n    return (node.used,)', '    """What was of use longest ago (the default)."""\n    return (-node.used,)'),)),
    Bug("a reset takes blocks in use", MANAGER, (("(self._tree.fill > 0) & (self._pool.counts == 0)", "self._tree.fill > 0"),)),
    Bug("a request for prompt logprobs takes hits", ADMISSION, (("usable = sequence.reusable if request.prompt_reported else sequence.reusable[:0]", "usable = sequence.reusable"),)),
    Bug("work done again counts as a hit", ADMISSION, (("        if request.num_cached is None:\n", "        if True:\n"),)),
    Bug("equal prompts are computed side by side", ADMISSION, (("                request.steps_waited += 1\n                return True\n", "                return False\n"),)),
    # ---- groups
    Bug("resumed without forking", ADMISSION, (("            if not whole:  #", "            if True:  #"),)),
    Bug("forked before the donor is there", ADMISSION, (("            if donor.num_computed >= shared:\n", "            if donor.num_computed + donor.num_scheduled >= shared:\n"), ("self._cache.fork(donor.seq_id, sequence.seq_id, shared)", "self._cache.fork(donor.seq_id, sequence.seq_id, min(shared, donor.num_computed))"))),
    Bug("the donor grows before all have forked", SCHEDULER, (("        if any(not s.started for s in live):\n            return True\n", ""),)),
    Bug("beams step one by one", SCHEDULER, (("        return request.beam is not None and len(live) > 1 and any(s.num_tokens - s.num_computed > 1 for s in live)", "        return False"),)),
    Bug("the wrong parent of a beam", SCHEDULER, (("for parent in (beams[c.beam] for c in chosen):", "for parent in (beams[max(0, c.beam - 1)] for c in chosen):"),)),
    Bug("a parent grows before its children fork", SCHEDULER, (
        ("        children = []\n        for parent in (beams[c.beam] for c in chosen):\n", "        children = []\n        for c in chosen:\n            parent = beams[c.beam]\n"),
        ("            used.add(parent.seq_id)\n        for beam", "            used.add(parent.seq_id)\n            children[-1].append(c.token_id)\n        for beam"),
        ("            child.append(continuation.token_id)\n", ""),
    )),
    Bug("dropped beams keep their blocks", SCHEDULER, (('                self.finish(beam, "dropped")\n', '                beam.finish_reason = "dropped"\n'),)),
    Bug("a beam forgets its score", SCHEDULER, (("            child.cumulative_logprob = continuation.score\n", ""),)),
    Bug("a beam's score counts a token too many", BEAM, (("self._score(c.score, len(tokens))", "self._score(c.score, len(tokens) + 1)"),)),
    Bug("an answer from beyond the beam width", BEAM, (("list(zip(best, ends, strict=True))[: self.params.beam_width]", "list(zip(best, ends, strict=True))"),)),
    Bug("never stops early as if by the present length", BEAM, (('longest = self.params.early_stopping == "never" and', "longest = False and"),)),
    Bug("never stops early whatever the penalty's sign", BEAM, (('self.params.early_stopping == "never" and self.params.length_penalty > 0', 'self.params.early_stopping == "never"'),)),
    Bug("children with one generator key", SCHEDULER, (("request.seed, i, banned", "request.seed, 0, banned"),)),
    Bug("the key is the sequence's, not the index in the request", SCHEDULER, (("request.seed, i, banned", "request.seed, i + sequence.seq_id - sequence.index, banned"),)),
    Bug("children with one row of penalty counts", SCHEDULER, (("request.rows[i], request.seed", "request.rows[0], request.seed"),)),
    Bug("only the first child knows the history", SCHEDULER, (("banned, history) for i in indices", "banned, history if i == indices[0] else None) for i in indices"),)),
    Bug("the first child to end takes the blocks along", SCHEDULER, (
        ("                grown = [sequence, *[self._fork(sequence) for _ in item.samples[1:]]]\n                for sampled_row, each in enumerate(grown, first):\n", "                grown = []\n                for sampled_row in range(first, row):\n                    each = self._fork(sequence) if grown else sequence\n                    grown.append(each)\n"),
    )),
    Bug("admission forgets the other samples", ADMISSION, (("growth = _growing(running) + self._own_blocks(lead, others)", "growth = _growing(running)"),)),
    Bug("the best by the sum, not the mean", ENGINE, ((" / max(1, len(a.token_ids))", ""),)),
    Bug("best_of is streamed", ENGINE, (("        if wanted.num_samples > wanted.n:\n", "        if False:\n"),)),
    # ---- the scheduler
    Bug("rows shift past a dropped sequence", SCHEDULER, (
        ("            first, row = row, row + len(item.samples)\n            sequence = self._live.get(item.seq_id)\n            if sequence is None:\n                continue  # ended while the plan was in flight\n", "            sequence = self._live.get(item.seq_id)\n            if sequence is None:\n                continue  # ended while the plan was in flight\n            first, row = row, row + len(item.samples)\n"),
    )),
    Bug("computed when scheduled", SCHEDULER, (
        ("        sequence.num_scheduled += count\n", "        sequence.num_computed += count\n"),
        ("            sequence.num_scheduled -= count\n            sequence.num_computed += count\n", ""),
    )),
    Bug("resumed as if its KV were still there", SEQUENCE, (("        self.num_computed = self.num_scheduled = 0\n        self.started", "        self.num_scheduled = 0\n        self.started"),)),
    Bug("the first token is computed twice", SCHEDULER, (
        ("        start = sequence.num_computed + sequence.num_scheduled\n        stop", "        start = max(0, sequence.num_computed + sequence.num_scheduled - 1)\n        stop"),
    )),
    Bug("the earliest gives way", SCHEDULER, (("victim = max(self.running, key=_arrival)", "victim = min(self.running, key=_arrival)"),)),
    Bug("prefill before decode", SCHEDULER, (("            return True, request.arrival\n    return False, request.arrival\n", "            return False, request.arrival\n    return True, request.arrival\n"),)),
    Bug("the queue's order is lost at a preemption", SCHEDULER, (("reports them all\n        insort(self.waiting, request, key=_arrival)", "reports them all\n        self.waiting.append(request)"),)),
    Bug("admission leaves no room to grow", ADMISSION, (("if room and self._cache.num_free >= growth:", "if room:"),)),
    Bug("a victim stays in the plan", SCHEDULER, (("                draft.drop({s.seq_id for s in victim.live})\n", ""),)),
    Bug("a passed request waits for ever", ADMISSION, (("return aged or self._policy.choose", "return self._policy.choose"),)),
    Bug("the token budget is not spent", SCHEDULER, (("                draft.budget -= count\n", ""),)),
    Bug("one sequence too many", SCHEDULER, (("if len(self._free_rows) < request.width or", "if len(self._free_rows) < request.width - 1 or"),)),
    Bug("rows of the batch unsorted", SCHEDULER, (("        draft.items.sort(key=lambda item: item.num_tokens > 1)\n", ""),)),
    Bug("a cancelled plan stays scheduled", SCHEDULER, (("                sequence.num_scheduled -= item.num_tokens\n                sequence.token_source", "                sequence.token_source"),)),
    Bug("copies are made again from what was overwritten", SCHEDULER, (("        self._distrust_copies(plan)\n", ""),)),
    Bug("a cancelled plan keeps its penalty counts", SCHEDULER, (("self._withdraw(plan.sequences, counted=True)", "self._withdraw(plan.sequences)"),)),
    Bug("penalty counts not rebuilt on resume", SEQUENCE, (("        self.started = self.history_sent = False\n", "        self.started = False\n"),)),
    Bug("prompt logprobs reported twice", SCHEDULER, (("            request.prompt_candidates.clear()", "            pass"),)),
    Bug("prompt logprobs off by one", SCHEDULER, (("request.prompt_token_ids[start + 1 : stop + 1]", "request.prompt_token_ids[start:stop]"),)),
    Bug("a request that never fits is queued", SCHEDULER, (("if needed > self.cache.num_blocks:", "if needed > 2 * self.cache.num_blocks:"),)),
    Bug("a request that just fits is refused", SCHEDULER, (("max(1, request.max_len - 1)", "request.max_len"),)),
    Bug("a group that fits only shared is refused", SCHEDULER, (("(request.width - 1) * max(0, longest - shared)", "(request.width - 1) * longest"),)),
    # ---- swap and windows
    Bug("a step waits for all that goes out", KV_STORE, (("(plan.swap_out[soon], plan.swap_out[~soon])", "(plan.swap_out,)"),), ("tests/test_cupy_swaps.py",)),
    Bug("copied before what is swapped in is there", KV_STORE, (
        ("        pool = self.key, self.value\n", "        pool = self.key, self.value\n        if len(plan.copies):\n            self._backend.copy_blocks(*pool, plan.copies)\n"),
        ("            self._backend.swap_blocks(self._host, pool, plan.swap_in)\n        if len(plan.copies):\n            self._backend.copy_blocks(*pool, plan.copies)\n", "            self._backend.swap_blocks(self._host, pool, plan.swap_in)\n"),
    )),
    Bug("host blocks are reused while a plan reads them", SWAP, (
        ("        self._pool.pin(self.blocks_of(seq_ids))\n", ""),
        ("        self._pool.free(self._pool.unpin(host_blocks))\n", "        self._pool.free(self._pool.unpin(host_blocks[self._pool.pins[host_blocks] > 0]))\n"),
    )),
    Bug("what is shared is swapped once a sequence", SWAP, (("own = host[np.searchsorted(device, blocks)]", "own = host[np.minimum(np.searchsorted(device, blocks) + 1, len(host) - 1)]"),)),
    Bug("swapped back as if nothing were computed", ADMISSION, (("sequence.num_computed = computed.get(sequence.seq_id, 0)", "sequence.num_computed = 0"),)),
    Bug("a window leaves a block too many behind", MANAGER, (("table.num_released, position // self.block_size", "table.num_released, -(-position // self.block_size)"),)),
    Bug("a window is a token too short", ADMISSION, (("position - self._window + 1", "position - self._window + 2"),)),
    Bug("the longest prefix of another salt", "cupaged/policy.py", (("cache.cached_prefix(request.live[0].reusable, request.salt)", "cache.cached_prefix(request.live[0].reusable)"),)),
    # ---- overlapped steps
    Bug("the source is the sample before", LOOKAHEAD, (("promises.append((sequence, source))", "promises.append((sequence, max(0, source - 1)))"),)),
    Bug("sources count sequences, not samples", LOOKAHEAD, (("first, first + len(item.samples)", "first, first + 1"),)),
    Bug("sources shift past a dropped sequence", LOOKAHEAD, (
        ("        source, first = first, first + len(item.samples)\n", ""),
        ("            continue  # ended while the plan was in flight\n", "            continue  # ended while the plan was in flight\n        source, first = first, first + len(item.samples)\n"),
    )),
    Bug("a step beyond the longest answer", LOOKAHEAD, (("sequence.num_tokens + 1 < sequence.request.max_len", "sequence.num_tokens < sequence.request.max_len"),)),
    Bug("beams are planned ahead", LOOKAHEAD, (("return item.num_candidates > 0 or forks", "return forks"),)),
    Bug("a prompt goes on before its answers fork", LOOKAHEAD, (("forks = len(item.samples) > 1", "forks = False"),)),
    Bug("bad words are looked for without the last token", SEQUENCE, (("return any(len(word) > 1 for word in self.request.bad_words)", "return False"),)),
    Bug("a history is sent without the promised token", LOOKAHEAD, (("sequence.request.params.has_penalties and not sequence.history_sent", "False"),)),
    Bug("swapped in before it is swapped out", MANAGER, ((" if self._swap.has_got(host) else None", ""),)),
    Bug("what was swapped out never comes back", SWAP, (("        self._awaited[host_blocks] = False\n", ""),)),
    Bug("a promise is kept twice", SEQUENCE, (("        self.num_tokens += 1\n        self.token_source = -1\n", "        self.num_tokens += 1\n"),)),
    Bug("a withdrawn run leaves its promise", SCHEDULER, (("                sequence.token_source = -1\n", ""),)),
    Bug("a promised token is not counted for min_tokens", SEQUENCE, (("return self.num_promised - self.request.num_prompt", "return self.num_tokens - self.request.num_prompt"),)),
    Bug("no room is made for a promised token", SCHEDULER, (("start, sequence.num_promised)) is None", "start, sequence.num_tokens)) is None"),)),
    Bug("a full pool goes on without the one that is stuck", SCHEDULER, (("                    draft.crowded = True\n", ""),)),
    Bug("a draft that came to nothing stays scheduled", SCHEDULER, (("            self._withdraw(draft.items)\n            return None\n", "            return None\n"),)),
    Bug("a draft that came to nothing costs its histories", SCHEDULER, (("            self._withdraw(draft.items)\n", "            self._withdraw(draft.items, counted=True)\n"),)),
    Bug("an unread token is published", SCHEDULER, (
        ("self.cache.commit(sequence.seq_id, sequence.tokens, sequence.num_computed, sequence.request.salt)", "self.cache.commit(sequence.seq_id, np.append(sequence.tokens, PROMISED), sequence.num_computed + sequence.num_scheduled, sequence.request.salt)"),
    )),
    Bug("the plan in flight is lost when the next one fails", STEPS, (("            while self._flying:\n                self._scheduler.cancel(self._flying.pop()[0])\n            raise\n", "            raise\n"),)),
    Bug("plans are cancelled from the first", STEPS, (("self._scheduler.cancel(self._flying.pop()[0])", "self._scheduler.cancel(self._flying.pop(0)[0])"),)),
    Bug("the latest plan is collected first", STEPS, (("            plan, pending = self._flying[0]\n", "            plan, pending = self._flying[-1]\n"),)),
    Bug("what nobody waits for stays in flight", ENGINE, (("            self._steps.forget()\n", "            pass\n"),)),
    Bug("the next plan waits for this one's tokens", STEPS, (("(self._scheduler.schedule, self._scheduler.schedule_ahead)[len", "(self._scheduler.schedule,)[len"),)),
    Bug("a token with a value and a source is computed", BATCH, (("if ((token_ids == UNREAD) != (sources >= 0)).any():", "if False:"),)),
    # ---- streaks
    Bug("a streak outlives a sequence", SCHEDULER, (("        self._streak = None\n        self.cache.release", "        self.cache.release"),)),
    Bug("a streak outlives a cancelled plan", SCHEDULER, (('their sequences."""\n        self._streak = None\n', 'their sequences."""\n'),)),
    Bug("a streak goes on without who has joined", SCHEDULER, (("        if draft.decodes is None:\n            self._streak", "        if self._streak is None:\n            self._streak"),)),
    Bug("who joins a streak drives the others out", DRAFT, (("        self.items += self.decodes or ()\n", ""),)),
    Bug("a streak plans while its tokens are on their way", SCHEDULER, (("None if self._in_flight else self._go_on(ahead=False)", "self._go_on(ahead=False)"),)),
    Bug("a streak's budget is everybody's", DRAFT, (("budget if decodes is None else budget - len(decodes)", "budget"),)),
    Bug("a streak books the plan of the one before", SCHEDULER, (("if streak is not None and streak is self._streak:", "if self._streak is not None:"),)),
    Bug("a streak begins with a part of the running", STREAK, (("len(plan.samples) == running > 0", "len(plan.samples) > 0"),)),
    Bug("a streak sends a history twice", STREAK, ((" or item.samples[0].history is not None", ""),)),
    Bug("a streak of watched words", STREAK, (("sequence.watches_words or ", ""),)),
    Bug("a streak keeps a ban for too long", STREAK, (("min(to_choose, barred - 1)", "min(to_choose, barred)"),)),
    Bug("a streak goes on behind the last token", STREAK, (("request.max_len - 1 - start", "request.max_len - start"),)),
    Bug("a streak overlooks the longest answer", STREAK, (("if self._booked >= self._before_longest:", "if self._booked > self._before_longest:"),)),
    Bug("a streak overlooks stop tokens", STREAK, (("if s.request.eos_ids or s.request.stop_ids]", "if s.request.eos_ids]"),)),
    Bug("a streak overlooks EOS", STREAK, (("if s.request.eos_ids or s.request.stop_ids]", "if s.request.stop_ids]"),)),
    Bug("a streak reserves a block too late", STREAK, (("self._at_block[self._planned % self._cache.block_size]", "self._at_block[(self._planned - 1) % self._cache.block_size]"),)),
    Bug("a streak publishes a block too early", STREAK, (("self._at_block[self._booked % size]", "self._at_block[(self._booked + 1) % size]"),)),
    Bug("a streak reads blocks that were merged away", STREAK, (("num_computed, sequence.request.salt)\n            self._changed.add(place)\n", "num_computed, sequence.request.salt)\n"),)),
    Bug("a streak reads blocks that it left behind", STREAK, (("behind)\n                self._changed.add(place)\n", "behind)\n"),)),
    Bug("a streak begins behind", STREAK, (("started = self._booked == 0", "started = False"),), ("tests/test_streak.py",)),
    Bug("a streak leaves nothing behind", STREAK, (("            if behind > 0:\n", "            if False:\n"),)),
    Bug("a streak begins with the tables it was planned with", STREAK, (("self._changed = set(range(len(sequences)))", "self._changed: set[int] = set()"),)),
    Bug("a streak changes tables that are in flight", STREAK, (("tables = old.copy() if width <= old.shape[1] else", "tables = old if width <= old.shape[1] else"),)),
    Bug("a streak takes the wrong tokens", STREAK, (("else (self._chosen, None)", "else (self._chosen[::-1], None)"),)),
    Bug("a streak takes tokens from the wrong source", STREAK, (("self._places = np.arange(len(sequences), dtype=np.int32)", "self._places = np.arange(len(sequences), dtype=np.int32)[::-1]"),)),
    Bug("a streak promises nobody its token", STREAK, (("                sequence.token_source = place\n", "                pass\n"),)),
    Bug("a streak forgets what is on its way", STREAK, (("            sequence.num_scheduled += 1\n", "            pass\n"),)),
    Bug("a streak commits nothing", STREAK, (("        self._cache.commit_one(self._ids)\n", ""),)),
    Bug("logprobs end with the streak's first plan", SCHEDULER, (("                for row, sequence in enumerate(streak.sequences):\n", "                for row, sequence in enumerate(()):\n"),)),
    Bug("items of a streak have the others' tables", PLAN, (("table = self.block_tables[i]", "table = self.block_tables[0]"),)),
    Bug("items of a streak have no source", PLAN, (("-1 if self.token_sources is None else self.token_sources.item(i)", "-1"),)),
    Bug("the packer reports logprobs of the step before", SAMPLER, (("self.logprobs = max([-1, *(k for k in wanted if k is not None)])", "self.logprobs = max([self.logprobs, *(k for k in wanted if k is not None)])"),)),
    # ---- the likeliest token behind a product
    Bug("the last of the largest parts is taken", CPU_SAMPLING, (("            largest, where = as_float(high), part * width", "            largest, where = as_float(high), part * width + 1"),), NOTED_TESTS),
    Bug("a row reads what another has noted", CPU_SAMPLING, (("noted_extremes(noted, part * rows + r)", "noted_extremes(noted, part * rows)"),), NOTED_TESTS),
    Bug("what is noted of a row is a number short", CPU_EXTREMES, (("min(width, word(operation, N) - part * width)", "min(width, word(operation, N) - part * width) - 1"),), NOTED_TESTS),
    Bug("what is noted may be anything", CPU_EXTREMES, (("    return low < np.int32(-0x7F800001) or high >= np.int32(0x7F800000)", "    return high < low"),), NOTED_TESTS),
    Bug("a choice from other logits is connected", "cupaged/backends/cpu_noted.py", (("if logits == (product[cpu_gemm.Y], product[cpu_gemm.N], product[cpu_gemm.EPILOGUE]):", "if logits[1] == product[cpu_gemm.N]:"),), NOTED_TESTS),
    Bug("penalties are passed over", SAMPLER, (("batch.temperature.any() or batch.penalised.any() or", "batch.temperature.any() or"),)),
    Bug("biases are passed over", SAMPLER, ((" or len(batch.bias_ids))", ")"),)),
    Bug("temperatures are passed over", SAMPLER, (("not (batch.temperature.any() or ", "not ("),)),
    # ---- batch, sampling, engine
    Bug("position off by one", BATCH, (("np.repeat(starts - query_start[:-1], lengths)", "np.repeat(starts - query_start[:-1] + (starts > 0), lengths)"),)),
    Bug("slot of the wrong block", BATCH, (("= blocks * block_size + offset", "= blocks * block_size + (offset + 1) % block_size"),)),
    Bug("context ends a token early", BATCH, (("    context_lens = starts + lengths\n", "    context_lens = starts + np.maximum(lengths - 1, 1)\n"),)),
    Bug("the first row is sampled, not the last", BATCH, (("np.repeat(query_start[1:] - 1, samples)", "np.repeat(query_start[:-1], samples)"),)),
    Bug("the generator's key is reused", BATCH, (("sample_positions=np.repeat(context_lens, samples)", "sample_positions=np.repeat(lengths, samples)"),)),
    Bug("the generator's key is reused in a streak", BATCH, (("        sample_positions=context_lens,\n", "        sample_positions=np.zeros_like(context_lens),\n"),)),
    Bug("all requests share a seed", SAMPLER, (("[spec.seed for spec in specs]", "[0 for spec in specs]"),)),
    Bug("rows of the step before are sampled", SAMPLER, (("if specs is self._specs:", "if len(specs) == len(self._specs):"),)),
    Bug("a row stays at its position", SAMPLER, (("return replace(self._batch, positions=positions)", "return self._batch"),)),
    Bug("nobody looks for stop strings in an answer whose end is wanted", ENGINE, (("if live.has_stop_strings:", "if live.has_stop_strings and not live.only_finished:"),)),
    Bug("an answer is taken for ended too early", "cupaged/answer.py", (("self._complete = matched is not None or sequence.finish_reason is not None", "self._complete = True"),)),
    Bug("the end of an answer is shown twice", "cupaged/answer.py", (("self._complete = matched is not None or sequence.finish_reason is not None", "pass"),)),
    Bug("bans are forgotten", SAMPLER, (("return bias + [(token, -np.inf) for token in spec.banned]", "return bias"),)),
    Bug("min_tokens off by one", SEQUENCE, (("if self.num_output < self.request.params.min_tokens:", "if self.num_output + 1 < self.request.params.min_tokens:"),)),
    Bug("an answer one token too long", SEQUENCE, (("if self.num_tokens >= self.request.max_len:", "if self.num_tokens > self.request.max_len:"),)),
    Bug("a bad word of the prompt counts", SEQUENCE, (("        output = self.output_ids\n        for", "        output = self.tokens\n        for"),)),
    Bug("a stop string does not end the request", ENGINE, (("            if sequence.finish_reason is None:\n", "            if sequence.finish_reason is not None:\n"),)),
    Bug("a failed step stays in flight", STEPS, (("            self._scheduler.cancel(plan)\n", ""),)),
    Bug("Ctrl-C in the middle of the bookkeeping", "cupaged/exclusive.py", (("            self._pressed = True\n", "            self._before[0](number, frame)\n"),)),
    Bug("a dropped stream ends in the middle of a step", "cupaged/stream.py", (("            self._forget()\n", "            self._abort()\n"),)),
    Bug("abort forgets the scheduler", ENGINE, (("            self._scheduler.abort(live.request)\n", '            for sequence in live.request.live:\n                sequence.finish_reason = "abort"\n'),)),
)  # fmt: skip
ALL_BUGS = (*BUGS, *(Bug(name, file, ((old, new),), KERNEL_TESTS) for name, file, old, new in KERNEL_BUGS))


def copy_repository(target: Path) -> None:
    ignored = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "dist", "build")
    shutil.copytree(ROOT, target, ignore=ignored)


def first_failure(root: Path, tests: tuple[str, ...]) -> str | None:
    """The first test that fails there, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=900, check=False)
    if run.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", run.stdout, re.MULTILINE)
    return failed.group(1) if failed else f"pytest exit status {run.returncode}: {run.stdout[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only bugs whose name contains one of these")
    parser.add_argument("--list", action="store_true", help="only list the bugs, after checking that the patches apply")
    arguments = parser.parse_args()
    bugs = [bug for bug in ALL_BUGS if not arguments.words or any(word in bug.name for word in arguments.words)]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        pristine = Path(folder) / "pristine"
        copy_repository(pristine)
        if not arguments.list and (failure := first_failure(pristine, tuple(dict.fromkeys(test for bug in bugs for test in bug.tests)))):
            print(f"the tests fail without a planted bug: {failure}")
            return 1
        for number, bug in enumerate(bugs):
            root = Path(folder) / str(number)
            shutil.copytree(pristine, root, ignore=shutil.ignore_patterns("__pycache__"))
            bug.apply(root)
            killer = "" if arguments.list else first_failure(root, bug.tests)
            if killer is None:
                survivors.append(bug)
            print(f"{bug.name:45} {'SURVIVES' if killer is None else killer}", flush=True)
            shutil.rmtree(root)
    print(f"{len(bugs)} bugs, {len(survivors)} survivors")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
