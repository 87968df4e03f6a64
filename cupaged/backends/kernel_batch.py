"""DeviceBatch: the rows of a step where the kernels read them, at fixed addresses, and the plan of its decode rows' attention.

A step of decode rows only is what a graph is captured for and replayed with. A graph has one number of rows, so there is
one for each of a few numbers, and a step is filled up with padded lanes to the next of them:

    rows       A    B    C    -          4 lanes for 3 rows
    slots      7    40   22   -1         a padded lane writes nothing,
    contexts   18   6    3    0          and attends to nothing

A graph's block table has a row for the longest context there may be, megabytes where that is long. It stays on the device, and
only the columns that the step's contexts use are sent, when they are others than those of the step before:

    tables     12 3  .  .  .  .          behind a row's context is whatever was there: nobody reads it
               40 7  9  .  .  .
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cupaged.backends.base import Array, AttentionBatch, BatchLimits
from cupaged.backends.checks import check_batch, check_sources
from cupaged.backends.device import Device
from cupaged.backends.split_plan import SplitPlan, largest_plan, plan_decode
from cupaged.errors import InvariantError

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceRows:
    """One step on the device. `sources`: see Backend.set_batch; None where the batch has no chosen tokens. `plan` is that of
    its decode rows, None where no kernel wants one."""

    token_ids: Array
    sources: Array | None
    attention: AttentionBatch
    plan: SplitPlan | None


def lanes_for(rows: int, most: int) -> int:
    """How many rows a graph for so many has: 1, 2, 4, then multiples of 8, and `most`."""
    return min(most, next((n for n in (1, 2, 4) if n >= rows), -(-rows // 8) * 8))


class DeviceBatch:
    """A batch of backends.base.Backend.

    num_shares   blocks of the grid that decode rows are planned for; None: no plan
    graphs       whether steps of decode rows only are filled up to the lanes of a graph
    chosen       int32 [any] on the device: tokens that a step may take, see Backend.set_batch
    """

    def __init__(self, device: Device, limits: BatchLimits, num_shares: int | None, graphs: bool, chosen: Array | None = None) -> None:
        self.limits, self._num_shares, self.chosen = limits, num_shares, chosen
        self.scratch: dict[str, Array] = {}
        """Memory that kernels of the step share, by name."""
        self._most_lanes = min(limits.rows, limits.sequences) if graphs else 0
        self._rows: DeviceRows | None = None
        self.lanes: int | None = None
        """Rows of the graph for the step that was set last; None: there is none for it."""
        self._mailbox = device.mailbox(_sizes(limits, num_shares, chosen is not None))
        self._device = device
        self._tables = device.empty((self._most_lanes, limits.table_width), np.int32)
        self._sent: I32 | None = None  # the part of it that was sent last

    @property
    def rows(self) -> DeviceRows:
        """The step that was set last. Raises InvariantError before the first one."""
        if self._rows is None:
            raise InvariantError("a batch is used before it was set")
        return self._rows

    def set(self, token_ids: I32, attention: AttentionBatch, sources: I32 | None = None) -> None:
        """See Backend.set_batch."""
        if sources is not None:
            check_sources(token_ids, sources, 0 if self.chosen is None else len(self.chosen))
        check_batch(self.limits, token_ids if sources is None else np.where(sources < 0, token_ids, 0), attention)
        of_graph = len(token_ids) == attention.num_decode == len(attention.context_lens) <= self._most_lanes
        self.lanes = lanes_for(len(token_ids), self._most_lanes) if of_graph else None
        tables = attention.block_tables[: len(attention.context_lens)]
        if self.lanes is not None:
            token_ids, attention = _fill_up(token_ids, attention, self.lanes, self.limits)
        plan = None
        if self._num_shares is not None and attention.num_decode:
            plan = plan_decode(attention.context_lens[: attention.num_decode], self.limits.num_kv_heads, self._num_shares, self.limits.window)
        self._post(token_ids, sources, attention, tables, plan)

    def _post(self, token_ids: I32, sources: I32 | None, attention: AttentionBatch, tables: I32, plan: SplitPlan | None) -> None:
        names = ("positions", "slots", "query_start", "context_lens")
        content = {"token_ids": token_ids} | {name: getattr(attention, name) for name in names}
        if self.chosen is not None:
            content["sources"] = np.full_like(token_ids, -1)  # a graph looks in any case, in padded lanes too
            if sources is not None:
                content["sources"][: len(sources)] = sources
        if plan is not None:
            content |= {"items": plan.items, "item_start": plan.item_start, "part_start": plan.part_start}
        if self.lanes is None:
            content["block_tables"] = tables
        elif self._sent is None or not np.array_equal(tables, self._sent):
            self._sent = None  # should this be interrupted
            self._device.fill(self._tables[: len(tables), : tables.shape[1]], tables)
            self._sent = tables.copy()
        self._mailbox.post({name: values.reshape(-1) for name, values in content.items()})
        there = {name: self._mailbox.arrays[name][: values.size].reshape(values.shape) for name, values in content.items()}
        self._rows = DeviceRows(
            there["token_ids"],
            there.get("sources"),
            AttentionBatch(
                **{name: there[name] for name in names},
                block_tables=there["block_tables"] if self.lanes is None else self._tables[: self.lanes],
                num_decode=attention.num_decode,
                max_context=attention.max_context,
            ),
            None if plan is None else SplitPlan(there["items"], there["item_start"], there["part_start"]),
        )


def _sizes(limits: BatchLimits, num_shares: int | None, chosen: bool) -> dict[str, tuple[int, npt.DTypeLike]]:
    sizes: dict[str, tuple[int, npt.DTypeLike]] = {
        "token_ids": (limits.rows, np.int32),
        "positions": (limits.rows, np.int32),
        "slots": (limits.rows, np.int64),
        "query_start": (limits.sequences + 1, np.int32),
        "context_lens": (limits.sequences, np.int32),
    }
    if chosen:
        sizes["sources"] = (limits.rows, np.int32)
    if num_shares is not None:
        items = largest_plan(limits.sequences, limits.num_kv_heads, num_shares)
        sizes |= {"items": (4 * items, np.int32), "item_start": (num_shares + 1, np.int32)}
        sizes["part_start"] = (limits.sequences * limits.num_kv_heads + 1, np.int32)
    return sizes | {"block_tables": (limits.sequences * limits.table_width, np.int32)}  # of all sizes: the last, as little of it as is used


def _fill_up(token_ids: I32, attention: AttentionBatch, lanes: int, limits: BatchLimits) -> tuple[I32, AttentionBatch]:
    """The step with padded lanes behind it, and nothing but its tables that depends on how long its contexts are."""
    rows = len(token_ids)

    def longer(values: npt.NDArray[np.signedinteger], padding: int) -> npt.NDArray[np.signedinteger]:
        return np.concatenate([values, np.full(lanes - rows, padding, values.dtype)])

    return longer(token_ids, 0), AttentionBatch(
        positions=longer(attention.positions, 0),
        slots=longer(attention.slots, -1),
        block_tables=attention.block_tables,
        query_start=np.arange(lanes + 1, dtype=np.int32),
        context_lens=longer(attention.context_lens, 0),
        num_decode=lanes,
        max_context=limits.table_width * limits.block_size,
    )
