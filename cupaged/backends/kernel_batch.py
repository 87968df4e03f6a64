"""DeviceBatch: the rows of a step where the kernels read them, and the plan of its decode rows' attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import Array, AttentionBatch, BatchLimits
from cupaged.backends.checks import check_batch
from cupaged.backends.device import Device
from cupaged.backends.split_plan import SplitPlan, plan_decode
from cupaged.errors import InvariantError


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """One step on the device. `plan` is that of its decode rows, None where no kernel wants one."""

    token_ids: Array
    attention: AttentionBatch
    plan: SplitPlan | None


class DeviceBatch:
    """A batch of backends.base.Backend. `num_shares`: blocks of the grid that decode rows are planned for; None: no plan."""

    def __init__(self, device: Device, limits: BatchLimits, num_shares: int | None) -> None:
        self._device, self._limits, self._num_shares = device, limits, num_shares
        self._rows: DeviceRows | None = None

    @property
    def rows(self) -> DeviceRows:
        """The step that was set last. Raises InvariantError before the first one."""
        if self._rows is None:
            raise InvariantError("a batch is used before it was set")
        return self._rows

    def set(self, token_ids: npt.NDArray[np.int32], attention: AttentionBatch) -> None:
        """See Backend.set_batch."""
        check_batch(self._limits, token_ids, attention)
        upload = self._device.upload
        self._rows = DeviceRows(
            upload(token_ids),
            AttentionBatch(
                positions=upload(attention.positions),
                slots=upload(attention.slots),
                block_tables=upload(attention.block_tables),
                query_start=upload(attention.query_start),
                context_lens=upload(attention.context_lens),
                num_decode=attention.num_decode,
                max_context=attention.max_context,
            ),
            self._plan(attention),
        )

    def _plan(self, attention: AttentionBatch) -> SplitPlan | None:
        if self._num_shares is None or not attention.num_decode:
            return None
        limits, upload = self._limits, self._device.upload
        plan = plan_decode(attention.context_lens[: attention.num_decode], limits.num_kv_heads, self._num_shares, limits.window)
        return SplitPlan(upload(plan.items), upload(plan.item_start), upload(plan.part_start))
