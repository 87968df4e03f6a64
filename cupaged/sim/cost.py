"""What a step costs: seconds, from what it reads and computes.

The roofline (Williams et al., CACM 52(4), 2009) takes the larger of two bounds and adds what no bound explains:

    seconds = max(bytes / bandwidth, operations / peak) + overhead
    bytes = weights, once + keys and values of every context read and of every token written + blocks copied

It says what a perfect kernel would need. Launches, the host's work and imperfect kernels are in the one constant
`overhead`, which is fitted where there is something to fit it to and 0 elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cupaged.capacity import weights_bytes
from cupaged.errors import ConfigError, shown
from cupaged.presets import Device, ModelShape
from cupaged.step_plan import Decodes, StepPlan


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does.

    tokens      computed            sequences   that have a part in it
    sampled     of them, with logits  copied    blocks
    context     tokens of KV that are read, summed over the sequences
    looked_at   tokens that are attended to, summed over the tokens
    """

    tokens: int
    sampled: int
    sequences: int
    context: int
    looked_at: int
    copied: int

    @classmethod
    def of(cls, plan: StepPlan) -> Work:
        if isinstance(plan.sequences, Decodes):
            count, context = len(plan.sequences), int(plan.sequences.starts.sum(dtype=np.int64)) + len(plan.sequences)
            return cls(count, count, count, context, context, len(plan.copies))
        tokens = sampled = context = looked_at = 0
        for item in plan.sequences:
            count, start = len(item.token_ids), item.start
            tokens += count
            sampled += bool(item.samples or item.num_candidates)
            context += start + count
            looked_at += count * start + count * (count + 1) // 2
        return cls(tokens, sampled, len(plan.sequences), context, looked_at, len(plan.copies))


class Cost(Protocol):
    def seconds(self, work: Work) -> float:
        """How long a step takes."""
        ...


class Roofline:
    """The bound of a model on `gpus` devices that share its heads, plus `overhead` seconds a step.

    Communication between devices counts as overhead, too. Raises ConfigError for an overhead below 0.
    """

    def __init__(
        self, model: ModelShape, device: Device, *, dtype: str, kv_cache_dtype: str, block_size: int, gpus: int = 1, overhead: float = 0.0
    ) -> None:
        if not 0 <= overhead < 3600:
            raise ConfigError(f"overhead is a number of seconds a step, 0 or more, not {shown(overhead)}")
        self._model = model
        self._weights = weights_bytes(model, dtype, gpus)
        self._kv = model.kv_bytes_per_token(kv_cache_dtype) / gpus
        self._copy = 2 * self._kv * block_size
        self._device = device
        self._gpus = gpus
        self._overhead = overhead

    def parts(self, work: Work) -> dict[str, float]:
        """Seconds that memory and arithmetic would each take alone, and the overhead."""
        read = self._weights + self._kv * (work.context + work.tokens) + self._copy * work.copied
        operations = self._model.flops(work.tokens, work.sampled, work.looked_at) / self._gpus
        return {"memory": read / self._device.bandwidth, "compute": operations / self._device.flops, "overhead": self._overhead}

    def seconds(self, work: Work) -> float:
        parts = self.parts(work)
        return max(parts["memory"], parts["compute"]) + parts["overhead"]
