"""Door: turns what a caller gives into a Request, or says in one line why it can never be served.

Everything that depends on the model is checked here, once: ids against the vocabulary, lengths against the longest
sequence, text against there being a tokenizer. What is inside is sound.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence as Many

import numpy as np

from cupaged.beam import BeamSearch
from cupaged.config import ModelConfig
from cupaged.errors import RequestError, shown
from cupaged.params import BeamSearchParams, SamplingParams
from cupaged.sequence import Request
from cupaged.step_plan import IntArray
from cupaged.text.tokenizer import Tokenizer

Prompt = str | Many[int]


class Door:
    """Checks for one model. `max_model_len`: the longest prompt and output together, in tokens."""

    def __init__(self, model_config: ModelConfig, max_model_len: int, tokenizer: Tokenizer | None) -> None:
        self._vocabulary = model_config.vocab_size
        self._max_model_len = max_model_len
        self._tokenizer = tokenizer
        # a damaged config may name ids that the model does not have: they can never come, and must not be banned
        self._eos_ids = frozenset(i for i in model_config.eos_token_ids if 0 <= i < model_config.vocab_size)

    def admit(self, request_id: str, prompt: Prompt, params: SamplingParams | BeamSearchParams, cache_salt: str = "") -> Request:
        """A sound request. Raises RequestError for one that can never be served."""
        beams = params if isinstance(params, BeamSearchParams) else None
        if beams is not None:
            params = SamplingParams(temperature=0, max_tokens=beams.max_tokens, ignore_eos=beams.ignore_eos)
        if not isinstance(params, SamplingParams):
            raise RequestError(f"parameters must be SamplingParams or BeamSearchParams, not {type(params).__name__}")
        token_ids = self._prompt_ids(prompt)
        bad_words = self._bad_words(params)
        self._check_parameters(params, bad_words)
        limit = self._max_model_len
        max_len = limit if params.max_tokens is None else min(limit, len(token_ids) + params.max_tokens)
        eos_ids: frozenset[int] = frozenset() if params.ignore_eos else self._eos_ids
        return Request(
            request_id,
            token_ids,
            params,
            max_len=max_len,
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            prompt=prompt if isinstance(prompt, str) else None,
            eos_ids=eos_ids,
            bad_words=bad_words,
            salt=cache_salt,
            beam=None if beams is None else BeamSearch(beams, max_len - len(token_ids), eos_ids),
            arrival_time=time.perf_counter(),
        )

    def _prompt_ids(self, prompt: Prompt) -> IntArray:
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, (str, Many, np.ndarray)):
            raise RequestError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
        if isinstance(prompt, np.ndarray) and prompt.ndim != 1:
            raise RequestError(f"a prompt of token ids is a list of them, not an array of {prompt.ndim} dimensions")
        ids = self._require_tokenizer("a text prompt").encode(prompt) if isinstance(prompt, str) else prompt
        if not len(ids):
            raise RequestError("the prompt is empty: give at least one token")
        if len(ids) >= self._max_model_len:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but prompt and output together may have {self._max_model_len}"
                " (max_model_len): shorten the prompt"
            )
        vocabulary = self._vocabulary
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < vocabulary:
                raise RequestError(f"the prompt holds {shown(token)}, which is no token id: those are 0 .. {vocabulary - 1}")
        return np.asarray(ids, np.int32)

    def _check_parameters(self, params: SamplingParams, bad_words: Many[tuple[int, ...]]) -> None:
        vocabulary = self._vocabulary
        for name, tokens in (("logit_bias", params.logit_bias or ()), ("stop_token_ids", params.stop_token_ids)):
            for token in tokens:
                if token >= vocabulary:
                    raise RequestError(f"{name} names token {token}, but the vocabulary ends at {vocabulary - 1}")
        if params.stop:
            self._require_tokenizer("a stop string")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocabulary:
                raise RequestError(f"{name} asks for {getattr(params, name)} candidates of {vocabulary} tokens")
        banned = {word[-1] for word in bad_words}
        if params.min_tokens:
            banned |= self._eos_ids.union(params.stop_token_ids)
        if len(banned) == vocabulary:
            raise RequestError("bad_words and the stop tokens that min_tokens forbids leave no token to choose from")

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Token sequences of the bad words, at the start of a text and after a space; those the model can produce."""
        if not params.bad_words:
            return []
        tokenizer = self._require_tokenizer("a bad word")
        variants = (text for word in params.bad_words for text in (word, " " + word.lstrip()))
        encoded = (tuple(tokenizer.encode(text, add_special_tokens=False)) for text in variants)
        return sorted({ids for ids in encoded if ids and max(ids) < self._vocabulary})

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise RequestError(f"{what} needs a tokenizer, and this model has none: give token ids")
        return self._tokenizer
