#!/usr/bin/env python
"""Plant bugs in the engine, one at a time, and show which test kills each.

    python scripts/planted_bugs.py                 # all of them
    python scripts/planted_bugs.py pins epoch      # those whose name contains one of the words
    python scripts/planted_bugs.py --list

Each bug is a patch of product code. It is applied to a copy of the repository, where the bookkeeping tests must then
fail. Exit status 1 if a bug survives, if a patch no longer applies, or if the tests fail without any bug.
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

ROOT = Path(__file__).resolve().parent.parent
TESTS = (
    "tests/test_block_pool.py",
    "tests/test_scheduler.py",
    "tests/test_engine.py",
    "tests/test_sampler.py",
    "tests/test_memory.py",
    "tests/test_scheduler_stateful.py",
    "tests/test_equality.py",
)


@dataclass(frozen=True)
class Bug:
    """In `file`, each text on the left becomes the text on its right."""

    name: str
    file: str
    patches: tuple[tuple[str, str], ...]

    def apply(self, root: Path) -> None:
        path = root / self.file
        text = path.read_text(encoding="utf-8")
        for old, new in self.patches:
            if text.count(old) != 1:
                raise SystemExit(f"{self.name}: the patch no longer applies, {self.file} holds {old!r} {text.count(old)} times")
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")


SCHEDULER, POOL, MANAGER = "cupaged/scheduler.py", "cupaged/cache/block_pool.py", "cupaged/cache/manager.py"
BATCH, SAMPLER, SEQUENCE, ENGINE = "cupaged/model/batch.py", "cupaged/model/sampler.py", "cupaged/sequence.py", "cupaged/engine.py"

BUGS = (
    Bug("freed while a plan reads it (no pins)", SCHEDULER, (
        ("        self.cache.pin(blocks)\n", ""),
        ("            self.cache.unpin(item.blocks)\n", "            pass\n"),
    )),
    Bug("released twice", POOL, (("        self._counts[blocks] = counts\n        freed", "        freed"),)),
    Bug("pins forgotten", POOL, (("        self._pins[blocks] -= 1\n        self.release(blocks)", "        self._pins[blocks] -= 1"),)),
    Bug("first in, first out", POOL, (
        ("self._stack[first : self._num_free][::-1].copy()", "self._stack[:count].copy()"),
        ("        self._num_free = first\n", "        self._stack[:first] = self._stack[count : self._num_free].copy()\n        self._num_free = first\n"),
    )),
    Bug("a block too few", MANAGER, (("return -(-num_tokens // self.block_size)", "return max(1, num_tokens // self.block_size)"),)),
    Bug("a block too many", MANAGER, (("return -(-num_tokens // self.block_size)", "return num_tokens // self.block_size + 1"),)),
    Bug("blocks kept at the end", SCHEDULER, (("        self.cache.release(sequence.seq_id)\n        if sequence.row_id", "        if sequence.row_id"),)),
    Bug("an old epoch's output is booked", SCHEDULER, (("if sequence is None or sequence.epoch != item.epoch:\n                continue", "if sequence is None:\n                continue"),)),
    Bug("rows shift past a dropped sequence", SCHEDULER, (
        ("            row += item.sample is not None\n", ""),
        ("                self._book_token(sequence, output, sampled_row)\n", "                self._book_token(sequence, output, sampled_row)\n                row += 1\n"),
    )),
    Bug("published early: computed when scheduled", SCHEDULER, (
        ("        sequence.num_scheduled += stop - start\n", "        sequence.num_computed += stop - start\n"),
        ("            sequence.num_scheduled -= item.num_tokens\n            sequence.num_computed += item.num_tokens\n", ""),
    )),
    Bug("resumed as if its KV were still there", SCHEDULER, (
        ("        sequence.num_computed = sequence.num_scheduled = 0\n", "        sequence.num_scheduled = 0\n"),
    )),
    Bug("the first token is computed twice", SCHEDULER, (("        start = sequence.num_computed + sequence.num_scheduled\n", "        start = max(0, sequence.num_computed + sequence.num_scheduled - 1)\n"),)),
    Bug("the earliest gives way", "cupaged/policy.py", (("return max(running, key=self.key)", "return min(running, key=self.key)"),)),
    Bug("prefill before decode", SCHEDULER, (("key=lambda s: (s.remaining != 1, *self._policy.key(s))", "key=lambda s: (s.remaining == 1, *self._policy.key(s))"),)),
    Bug("the queue's order is lost at a preemption", SCHEDULER, (
        ("reports them all\n        insort(self.waiting, sequence, key=self._policy.key)", "reports them all\n        self.waiting.append(sequence)"),
    )),
    Bug("admission leaves no room to grow", SCHEDULER, (("if needed + len(self.running) > self.cache.num_free:", "if needed > self.cache.num_free:"),)),
    Bug("the token budget is not spent", SCHEDULER, (
        ("planned.append(self._plan(self.running[-1], budget))\n            budget -= planned[-1].num_tokens", "planned.append(self._plan(self.running[-1], budget))"),
    )),
    Bug("one sequence too many", SCHEDULER, (("if len(self.running) >= self._max_num_seqs:", "if len(self.running) > self._max_num_seqs:"),)),
    Bug("rows of the batch unsorted", SCHEDULER, (("        planned.sort(key=lambda item: item.num_tokens > 1)\n", ""),)),
    Bug("a cancelled plan stays scheduled", SCHEDULER, (
        ("                sequence.num_scheduled -= item.num_tokens\n                sequence.history_sent", "                sequence.history_sent"),
    )),
    Bug("a cancelled plan keeps its penalty counts", SCHEDULER, (("                sequence.history_sent = False  #", "                pass  #"),)),
    Bug("penalty counts not rebuilt on resume", SCHEDULER, (("        sequence.history_sent = False\n        return True", "        return True"),)),
    Bug("prompt logprobs reported twice", SCHEDULER, (("            sequence.request.prompt_candidates.clear()", "            pass"),)),
    Bug("prompt logprobs off by one", SCHEDULER, (("request.prompt_token_ids[start + 1 : stop + 1]", "request.prompt_token_ids[start:stop]"),)),
    Bug("a request that never fits is queued", SCHEDULER, (("if needed > self.cache.num_blocks:", "if needed > 2 * self.cache.num_blocks:"),)),
    Bug("a request that just fits is refused", SCHEDULER, (("max(1, request.max_len - 1)", "request.max_len"),)),
    Bug("position off by one", BATCH, (("np.repeat(starts - query_start[:-1], lengths)", "np.repeat(starts - query_start[:-1] + (starts > 0), lengths)"),)),
    Bug("slot of the wrong block", BATCH, (("blocks.astype(np.int64) * plan.block_size + offset", "blocks.astype(np.int64) * plan.block_size + (offset + 1) % plan.block_size"),)),
    Bug("context ends a token early", BATCH, (("    context_lens = starts + lengths\n", "    context_lens = starts + np.maximum(lengths - 1, 1)\n"),)),
    Bug("the first row is sampled, not the last", BATCH, (("query_start[1:][sampled] - 1", "query_start[:-1][sampled]"),)),
    Bug("the generator's key is reused", SCHEDULER, (("sequence.index, sequence.num_tokens, sequence.banned_tokens()", "sequence.index, sequence.request.num_prompt, sequence.banned_tokens()"),)),
    Bug("all requests share a seed", SAMPLER, (("[spec.seed for spec in specs]", "[0 for spec in specs]"),)),
    Bug("bans are forgotten", SAMPLER, (("return bias + [(token, -np.inf) for token in spec.banned]", "return bias"),)),
    Bug("min_tokens off by one", SEQUENCE, (("if self.num_output < self.request.params.min_tokens:", "if self.num_output + 1 < self.request.params.min_tokens:"),)),
    Bug("an answer one token too long", SEQUENCE, (("if self.num_tokens >= self.request.max_len:", "if self.num_tokens > self.request.max_len:"),)),
    Bug("a bad word of the prompt counts", SEQUENCE, (("        output = self.output_ids\n        for", "        output = self.tokens\n        for"),)),
    Bug("a stop string does not end the request", ENGINE, (("            if sequence.finish_reason is None:\n", "            if sequence.finish_reason is not None:\n"),)),
    Bug("a failed step stays in flight", ENGINE, (("            self._scheduler.cancel(plan)\n", ""),)),
    Bug("Ctrl-C in the middle of the bookkeeping", "cupaged/exclusive.py", (("            self._pressed = True\n", "            self._before[0](number, frame)\n"),)),
    Bug("a dropped stream ends in the middle of a step", "cupaged/stream.py", (("            self._forget()\n", "            self._abort()\n"),)),
    Bug("abort forgets the scheduler", ENGINE, (('            self._scheduler.finish(live.request.sequence, "abort")\n', '            live.request.sequence.finish_reason = "abort"\n'),)),
)  # fmt: skip


def copy_repository(target: Path) -> None:
    ignored = shutil.ignore_patterns(".git", ".venv*", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "dist", "build")
    shutil.copytree(ROOT, target, ignore=ignored)


def first_failure(root: Path) -> str | None:
    """The first test that fails there, or None."""
    command = [sys.executable, "-m", "pytest", "-x", "--tb=no", "-rfE", "-p", "no:cacheprovider", *TESTS]
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
    bugs = [bug for bug in BUGS if not arguments.words or any(word in bug.name for word in arguments.words)]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        pristine = Path(folder) / "pristine"
        copy_repository(pristine)
        if not arguments.list and (failure := first_failure(pristine)):
            print(f"the tests fail without a planted bug: {failure}")
            return 1
        for number, bug in enumerate(bugs):
            root = Path(folder) / str(number)
            shutil.copytree(pristine, root, ignore=shutil.ignore_patterns("__pycache__"))
            bug.apply(root)
            killer = "" if arguments.list else first_failure(root)
            if killer is None:
                survivors.append(bug)
            print(f"{bug.name:45} {'SURVIVES' if killer is None else killer}", flush=True)
            shutil.rmtree(root)
    print(f"{len(bugs)} bugs, {len(survivors)} survivors")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
