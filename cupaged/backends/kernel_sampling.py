"""Sampling on a device: the kernels in their order, and the penalty counts in the device's memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cupaged.backends import kernel_specs as specs
from cupaged.backends.base import Array, SamplingBatch
from cupaged.backends.checks import check_chosen
from cupaged.backends.device import Device, Mailbox
from cupaged.backends.sampling import check_batch, check_token_ids
from cupaged.errors import InvariantError

I32 = npt.NDArray[np.int32]

_CHOOSE: dict[str, npt.DTypeLike] = {
    "temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32,
    "seeds": np.uint64, "positions": np.int32, "indices": np.int32,
}  # fmt: skip
"""The parameters of SAMPLE_TOKENS, one number a row each."""


class KernelSampler:
    """`sample`, `likeliest`, `token_logprobs` and `beam_candidates` of backends.base.Backend over a device."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._counts = DeviceCounts(device)
        self._parameters = DeviceParameters(device)
        self._zeros: list[dict[str, Array]] = []  # the parameters of `likeliest`; outgrown ones, too: graphs were captured with them

    def set_history(self, row_id: int, prompt_ids: I32, output_ids: I32) -> None:
        self._counts.set_history(row_id, prompt_ids, output_ids)

    def sample(self, logits: Array, batch: SamplingBatch, out: Array | None = None) -> Array:
        device, (num_rows, vocab_size) = self._device, logits.shape
        check_batch(batch, num_rows, vocab_size)
        self._counts.prepare(batch.row_ids[batch.penalised], vocab_size)
        penalties = bool(batch.penalised.any())
        choose, adjust, count = self._parameters.send(batch, adjusted=penalties or len(batch.bias_ids) > 0)
        if adjust:
            device.launch(specs.ADJUST_LOGITS.bind(logits=logits, output_counts=self._counts.outputs, in_prompt=self._counts.in_prompt, **adjust))
        tokens = device.empty((num_rows,), np.int32) if out is None else out
        device.launch(specs.SAMPLE_TOKENS.bind(logits=logits, tokens=tokens, **choose))
        self._check(tokens)
        if penalties:
            device.launch(specs.COUNT_TOKENS.bind(tokens=tokens, output_counts=self._counts.outputs, **count))
        return tokens

    def likeliest(self, logits: Array, out: Array) -> None:
        rows = len(logits)
        if not self._zeros or len(self._zeros[-1]["seeds"]) < rows:
            self._zeros.append({name: self._zeros_of(2 * rows, dtype) for name, dtype in _CHOOSE.items()})
        parameters = {name: array[:rows] for name, array in self._zeros[-1].items()}
        self._device.launch(specs.SAMPLE_TOKENS.bind(logits=logits, tokens=out, **parameters))

    def _zeros_of(self, rows: int, dtype: npt.DTypeLike) -> Array:
        array = self._device.empty((rows,), dtype)
        self._device.fill(array, np.zeros(rows, dtype))
        return array

    def token_logprobs(self, logits: Array, token_ids: Array, k: int) -> tuple[Array, Array, Array, Array]:
        device, (num_rows, vocab_size) = self._device, logits.shape
        seen = device.peek(token_ids)
        if seen is not None:
            check_token_ids(seen, vocab_size)
        logprobs, ranks = device.empty((num_rows,), np.float32), device.empty((num_rows,), np.int32)
        top_ids, top_logprobs = device.empty((num_rows, k), np.int32), device.empty((num_rows, k), np.float32)
        device.launch(
            specs.TOKEN_LOGPROBS.bind(
                logits=logits, token_ids=token_ids, logprobs=logprobs, ranks=ranks, top_ids=top_ids, top_logprobs=top_logprobs
            )
        )
        self._check(ranks)
        return logprobs, ranks, top_ids, top_logprobs

    def beam_candidates(self, logits: Array, k: int) -> tuple[Array, Array]:
        device, num_rows = self._device, len(logits)
        ids, logprobs = device.empty((num_rows, k), np.int32), device.empty((num_rows, k), np.float32)
        device.launch(specs.BEAM_CANDIDATES.bind(logits=logits, top_ids=ids, top_logprobs=logprobs))
        seen = device.peek(ids)
        if seen is not None:
            check_chosen(seen[:, :1].ravel())
        return ids, logprobs

    def _check(self, answers: Array) -> None:
        """Where the host sees them for nothing; else the caller does when it has downloaded them."""
        seen = self._device.peek(answers)
        if seen is not None:
            check_chosen(seen)


class DeviceParameters:
    """A SamplingBatch on a device, all of it in one upload. The memory grows with the largest batch."""

    CHOOSE = tuple(_CHOOSE)
    COUNT = ("row_ids", "penalised")
    ADJUST = (*COUNT, "repetition", "presence", "frequency", "bias_start", "bias_ids", "bias_values")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._room: dict[str, int] = {}
        self._mailboxes: list[Mailbox] = []  # those that were outgrown, too: their last content may still be on its way

    def send(self, batch: SamplingBatch, adjusted: bool) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
        """The parameters of SAMPLE_TOKENS, and of ADJUST_LOGITS and COUNT_TOKENS where logits are `adjusted`; they are there until the next call."""
        content = {name: getattr(batch, name) for name in (*self.CHOOSE, *(self.ADJUST if adjusted else ()))}
        if adjusted:
            content["penalised"] = batch.penalised.astype(np.uint8)
        if any(len(values) > self._room.get(name, -1) for name, values in content.items()):
            self._grow(batch)
        mailbox = self._mailboxes[-1]
        mailbox.post(content)
        there = {name: mailbox.arrays[name][: len(values)] for name, values in content.items()}
        choose, adjust, count = ({name: there[name] for name in names if name in there} for names in (self.CHOOSE, self.ADJUST, self.COUNT))
        return choose, adjust, count

    def _grow(self, batch: SamplingBatch) -> None:
        """Memory for such a batch, and for more than that, so that there will not be many of them."""
        rows, biases = (2 * max(count, 32) for count in (batch.num_rows, len(batch.bias_ids)))
        rows, biases = max(rows, self._room.get("row_ids", 0)), max(biases, self._room.get("bias_ids", 0))
        sizes: dict[str, tuple[int, npt.DTypeLike]] = {}
        for name in (*self.CHOOSE, *self.ADJUST):  # what is seldom sent lies behind
            dtype = np.dtype(np.uint8) if name == "penalised" else getattr(batch, name).dtype
            sizes[name] = (biases if name in ("bias_ids", "bias_values") else rows + (name == "bias_start"), dtype)
        self._mailboxes.append(self._device.mailbox(sizes))
        self._room = {name: size for name, (size, _) in sizes.items()}


class DeviceCounts:
    """Which tokens each penalised row has seen; sampling.TokenCounts with its two tables on a device.

    outputs    int32 [rows, V]: how often each token was produced
    in_prompt  uint8 [rows, V]: whether it is in the prompt
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._counted: set[int] = set()
        self._waiting: dict[int, tuple[I32, I32]] = {}  # until `prepare`, which knows V and who needs counts
        self.outputs: Array = device.empty((0, 0), np.int32)
        self.in_prompt: Array = device.empty((0, 0), np.uint8)

    def set_history(self, row_id: int, prompt_ids: I32, output_ids: I32) -> None:
        """Replace all that is known of a row; prompt_ids and output_ids int32 [any], without padding."""
        if row_id < 0:
            raise InvariantError(f"row id {row_id} is negative")
        self._waiting[row_id] = (np.array(prompt_ids, np.int32), np.array(output_ids, np.int32))

    def prepare(self, row_ids: I32, vocab_size: int) -> None:
        """Bring the tables up to date for these rows. Raises InvariantError for one without history."""
        if vocab_size != self.outputs.shape[1]:  # another model samples, or the first one
            self._counted.clear()
            self._resize(0, vocab_size)
        for row_id in row_ids.tolist():
            history = self._waiting.pop(row_id, None)
            if history is not None:
                self._rebuild(row_id, *history, vocab_size)
            elif row_id not in self._counted:
                raise InvariantError(f"row {row_id} has penalties, but nobody set its history")

    def _rebuild(self, row_id: int, prompt_ids: I32, output_ids: I32, vocab_size: int) -> None:
        check_token_ids(prompt_ids, vocab_size)
        check_token_ids(output_ids, vocab_size)
        rows = len(self.outputs)
        if row_id >= rows:
            self._resize(max(row_id + 1, 2 * rows), vocab_size)
        in_prompt = np.zeros(vocab_size, np.uint8)
        in_prompt[prompt_ids] = 1
        self._device.fill(self.outputs[row_id], np.bincount(output_ids, minlength=vocab_size).astype(np.int32))
        self._device.fill(self.in_prompt[row_id], in_prompt)
        self._counted.add(row_id)

    def _resize(self, rows: int, vocab_size: int) -> None:
        """Tables of so many rows; those that fit keep what they hold, the others hold nothing until they are rebuilt."""
        outputs, in_prompt = self._device.empty((rows, vocab_size), np.int32), self._device.empty((rows, vocab_size), np.uint8)
        if rows:
            for new, old in ((outputs, self.outputs), (in_prompt, self.in_prompt)):
                self._device.fill(new[: len(old)], self._device.download(old))
        self.outputs, self.in_prompt = outputs, in_prompt
