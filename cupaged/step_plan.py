"""The values that cross between rooms in one step: StepPlan in, ModelOutput out, StepRecord for observers.

A plan is a value: it can be printed, recorded, replayed and tested without a model. It names everything the step
reads and writes, so that the runner needs neither the scheduler nor the cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import overload

import numpy as np
import numpy.typing as npt

from cupaged.params import SamplingParams

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


UNREAD = -1
"""Stands in a plan for a token that the plan before it chooses and that nobody has read yet."""


def common_prefix(a: IntArray, b: IntArray) -> int:
    """How many tokens two texts begin with alike."""
    size = min(len(a), len(b))
    differs = a[:size] != b[:size]
    first = int(differs.argmax()) if size else 0
    return first if size and differs[first] else size


@dataclass(slots=True, eq=False)  # not frozen: that takes five times as long to make, and a step makes one for every sequence
class SampleSpec:
    """How a token after a scheduled run of tokens is to be chosen. A value: nobody changes one.

    row_id        the stable row of per-sequence state in the backend, below max_num_seqs
    seed, index   key and stream of the request's random numbers; the token's position completes the counter
    banned        token ids that must not come out of this step (bad_words, min_tokens)
    history       (prompt ids, output ids) when the backend's penalty counts for the row must be rebuilt first,
                  else None: then they already hold every token the row has produced
    """

    params: SamplingParams
    row_id: int
    seed: int
    index: int
    banned: tuple[int, ...] = ()
    history: tuple[IntArray, IntArray] | None = None


@dataclass(slots=True, eq=False)  # not frozen, as above
class ScheduledSequence:
    """One sequence's part of a step: compute `token_ids` at positions start, start + 1, ... A value: nobody changes one.

    blocks              int32 [num_blocks], the block table; covers start + len(token_ids) tokens
    token_source        where `token_ids` is [UNREAD]: which sample of the plan before this one chooses the token; else -1
    samples             how to choose the next token; empty where more of the context is still to be computed. More
                        than one where a prompt has just been computed that several answers share
    num_candidates      how many of the likeliest next tokens to report (beam search), or 0
    prompt_logprobs     how many candidates to report for each prompt token in this run, or None for no report
    prompt_targets      int32 [num_targets], with prompt_logprobs: the prompt tokens that follow the first
                        num_targets tokens of this run (the last prompt token has no prompt token after it)
    """

    seq_id: int
    start: int
    token_ids: IntArray
    blocks: IntArray
    samples: tuple[SampleSpec, ...] = ()
    num_candidates: int = 0
    prompt_logprobs: int | None = None
    prompt_targets: IntArray | None = None
    token_source: int = -1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def stop(self) -> int:
        """Length of the context once this run is computed."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Decodes(Sequence[ScheduledSequence]):
    """Sequences that each compute one token and choose the next, as columns: what a ScheduledSequence would say of the i-th
    stands in place i. Most steps are nothing else, and so need no object for every token.

    seq_ids         one a sequence
    starts          int32 [n]
    token_ids       int32 [n]
    block_tables    int32 [n, width], -1 behind a table's end
    token_sources   int32 [n], or None: no token is UNREAD
    samples         one a sequence; the very tuple of the plan before where nothing has changed
    """

    seq_ids: list[int]
    starts: IntArray
    token_ids: IntArray
    block_tables: IntArray
    token_sources: IntArray | None
    samples: tuple[SampleSpec, ...]

    def __len__(self) -> int:
        return len(self.seq_ids)

    @overload
    def __getitem__(self, place: int) -> ScheduledSequence: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[ScheduledSequence, ...]: ...
    def __getitem__(self, place: int | slice) -> ScheduledSequence | tuple[ScheduledSequence, ...]:
        if isinstance(place, slice):
            return tuple(self[i] for i in range(*place.indices(len(self))))
        i = range(len(self))[place]
        table = self.block_tables[i]
        return ScheduledSequence(
            seq_id=self.seq_ids[i],
            start=self.starts.item(i),
            token_ids=self.token_ids[i : i + 1],
            blocks=table[: 1 + np.flatnonzero(table >= 0)[-1]],
            samples=self.samples[i : i + 1],
            token_source=-1 if self.token_sources is None else self.token_sources.item(i),
        )


def as_matrix(block_tables: Sequence[IntArray]) -> IntArray:
    """Block tables as rows of int32 [n, width of the longest], -1 behind the others' ends."""
    matrix = np.full((len(block_tables), max(map(len, block_tables), default=0)), -1, np.int32)
    for row, table in zip(matrix, block_tables, strict=True):
        row[: len(table)] = table
    return matrix


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """Everything one step computes, in the order of the rows: sequences with one token first, then the others.

    sequences       a tuple, or Decodes
    swap_out, swap_in, copies   int32 [n, 2] pairs (from, to) of whole blocks over all layers: to host memory, from
                    there, and within the pool; carried out in this order, before any write of the step
    preempted       arrival numbers of the requests that gave their blocks up for this plan
    num_tokens      rows of the step
    num_decode      sequences that compute a single token
    samples         all tokens to choose, in the order of ModelOutput.token_ids
    """

    step: int
    block_size: int
    sequences: Sequence[ScheduledSequence]
    preempted: tuple[int, ...] = ()
    swap_out: IntArray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    swap_in: IntArray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    copies: IntArray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    num_tokens: int = field(init=False)
    num_decode: int = field(init=False)
    samples: tuple[SampleSpec, ...] = field(init=False)

    def __post_init__(self) -> None:
        sequences, set_ = self.sequences, object.__setattr__
        if isinstance(sequences, Decodes):
            lengths, samples = [1] * len(sequences), sequences.samples
        else:
            lengths, samples = [len(s.token_ids) for s in sequences], tuple(spec for s in sequences for spec in s.samples)
        set_(self, "num_tokens", sum(lengths))
        set_(self, "num_decode", lengths.count(1))
        set_(self, "samples", samples)

    @property
    def block_tables(self) -> Iterable[IntArray]:
        """The blocks that the sequences hold, int32, one sequence after the other; there may be -1 among them."""
        if isinstance(self.sequences, Decodes):
            return (self.sequences.block_tables.ravel(),)
        return (s.blocks for s in self.sequences)

    @property
    def first_written(self) -> dict[int, int]:
        """Block -> the first position that the sequences write there."""
        size = self.block_size
        starts = [(s, start) for s in self.sequences for start in (s.start, *range((s.start // size + 1) * size, s.stop, size))]
        return {int(s.blocks[start // size]): start for s, start in starts}

    @property
    def written_blocks(self) -> IntArray:
        """The blocks of the pool that the step changes, int32, in no order."""
        size = self.block_size
        computed = [s.blocks[s.start // size : -(-s.stop // size)] for s in self.sequences]
        return np.concatenate([*computed, self.swap_in[:, 1], self.copies[:, 1]])


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """The model's log-probabilities of n chosen tokens and of the k most likely ones beside each.

    token_ids, ranks    int32 [n]; rank 1 is the most likely token
    logprobs            float32 [n]
    top_ids             int32 [n, k], most likely first
    top_logprobs        float32 [n, k]
    """

    token_ids: IntArray
    logprobs: FloatArray
    ranks: IntArray
    top_ids: IntArray
    top_logprobs: FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class ModelOutput:
    """What a step computed.

    token_ids        int32 [num_samples], in the order of plan.samples
    logprobs         for all of them, with the largest k that any asked for; None if none asked
    prompt_logprobs  seq_id -> the logprobs of its `prompt_targets`
    candidates       seq_id -> (int32, float32) [num_candidates]: likeliest next tokens and logprobs, best first
    """

    token_ids: IntArray
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    candidates: dict[int, tuple[IntArray, FloatArray]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step as its observers see it: statistics, live views and traces read these and count nothing themselves.

    Blocks are counted while the step runs; once it has, `slots_used` of the `blocks_used * block_size` slots hold KV.
    `blocks_shared` is how many more blocks the running sequences would take if none were shared; `blocks_cached` are
    held by nobody and kept for their content; `blocks_copied`, `blocks_evicted` and `bytes_swapped` (out and in)
    count from the engine's start. The seconds are those of the engine's step: where steps overlap, it planned the next plan.
    """

    step: int
    num_decode: int
    num_tokens: int
    num_sampled: int
    num_running: int
    num_waiting: int
    num_preempted: int
    num_finished: int
    blocks_total: int
    blocks_used: int
    slots_used: int
    blocks_cached: int
    blocks_shared: int
    blocks_copied: int
    blocks_evicted: int
    bytes_swapped: int
    schedule_seconds: float
    run_seconds: float
    apply_seconds: float
