"""The tokenizer inside a GGUF file, rebuilt from its metadata.

GGUF stores the vocabulary but only the name of the rules around it: `tokenizer.ggml.model` says byte-level BPE
("gpt2") or SentencePiece ("llama"), `tokenizer.ggml.pre` how a byte-level text is cut before merging. The rules
behind those names are those of the tokenizers the models were trained with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from cupaged.checkpoint.base import Checkpoint
from cupaged.errors import TokenizerError
from cupaged.text.parts import TokenizerParts
from cupaged.text.pieces import PieceDecoder

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPACE = "▁"


@dataclass(frozen=True)
class _PreTokenizer:
    """Rules of one `tokenizer.ggml.pre`: each pattern in turn splits the pieces that the one before it left.

    ignore_merges   a piece that is in the vocabulary as a whole is one token, whatever the merges say
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_LLAMA3 = _PreTokenizer((_CL100K.replace("DIGITS", "{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = _PreTokenizer((_CL100K.replace("DIGITS", ""),), nfc=True)
_PRE_TOKENIZERS = {
    "default": _PreTokenizer((r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _PreTokenizer((_GPT2,)),
    "smollm": _PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


def read_gguf_tokenizer(checkpoint: Checkpoint) -> TokenizerParts:
    """Build the tokenizer that a GGUF file describes. Raises TokenizerError, naming what is missing or unknown."""
    try:
        meta = _Metadata(checkpoint.metadata)
        kind = meta.text("tokenizer.ggml.model")
        if kind == "gpt2":
            return _byte_level_bpe(meta)
        if kind == "llama":
            return _sentence_piece(meta)
    except TokenizerError:
        raise
    except Exception as error:  # values of a wrong type; the tokenizers library raises plain Exception
        raise TokenizerError(f"{checkpoint.path.name}: the tokenizer does not fit together: {error}") from error
    raise TokenizerError(f"{checkpoint.path.name}: tokenizer model {kind!r} is not supported; supported: gpt2, llama")


class _Metadata:
    """GGUF key-value pairs, checked as they are read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.tokens: list[str] = self.array("tokenizer.ggml.tokens")
        types = values.get("tokenizer.ggml.token_type")
        self.types: Sequence[int] = types if types is not None else [_NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise TokenizerError(f"GGUF: {len(self.types)} token types for {len(self.tokens)} tokens")

    def array(self, key: str) -> list[Any]:
        value = self._values.get(key)
        if value is None or isinstance(value, (str, bytes)) or not len(value):
            raise TokenizerError(f"GGUF: the tokenizer's {key} is missing or empty")
        return list(value)

    def text(self, key: str) -> str:
        value = self._values.get(key)
        if not isinstance(value, str):
            raise TokenizerError(f"GGUF: {key} is missing: the file carries no tokenizer")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def special_id(self, name: str, default: int | None = None) -> int | None:
        """Id of "bos", "eos", "unknown" or "padding"; None where the file names none or one outside the vocabulary."""
        value = self._values.get(f"tokenizer.ggml.{name}_token_id", default)
        return int(value) if value is not None and 0 <= int(value) < len(self.tokens) else None


def _byte_level_bpe(meta: _Metadata) -> TokenizerParts:
    name = meta.get("tokenizer.ggml.pre", "default")
    rules = _PRE_TOKENIZERS.get(name)
    if rules is None:
        raise TokenizerError(
            f"GGUF: pre-tokenizer {name!r} is not supported; supported: {', '.join(sorted(_PRE_TOKENIZERS))}"
        )
    merges = [_split_merge(merge) for merge in meta.array("tokenizer.ggml.merges")]
    backend = Tokenizer(models.BPE(_vocabulary(meta), merges, ignore_merges=rules.ignore_merges))
    if rules.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rules.patterns]
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return _finish(meta, backend, PieceDecoder(byte_level=True), add_bos=rules.add_bos)


def _sentence_piece(meta: _Metadata) -> TokenizerParts:
    """SentencePiece's BPE merges whatever pair makes the piece with the best score: rank the merges by it."""
    unknown = meta.special_id("unknown", 0)
    backend = Tokenizer(
        models.BPE(
            _vocabulary(meta),
            list(_merges_by_score(meta)),
            unk_token=None if unknown is None else meta.tokens[unknown],
            fuse_unk=True,
            byte_fallback=_BYTE in meta.types,
        )
    )
    prefix = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    steps = [normalizers.Prepend(_SPACE)] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    decoder = PieceDecoder(byte_fallback=True, replacements=((_SPACE, " "),), space_prefix=prefix)
    return _finish(meta, backend, decoder, add_bos=True, bos_id=1, eos_id=2, unknown_id=0)


def _vocabulary(meta: _Metadata) -> dict[str, int]:
    return {token: index for index, token in enumerate(meta.tokens)}


def _split_merge(merge: str) -> tuple[str, str]:
    cut = merge.find(" ", 1)
    if cut < 0:
        raise TokenizerError(f"GGUF: the merge {merge!r} is not a pair")
    return merge[:cut], merge[cut + 1 :]


def _merges_by_score(meta: _Metadata) -> Iterator[tuple[str, str]]:
    """Every way to make a piece from two others, best piece first; of one piece, the longest left part first."""
    scores = meta.array("tokenizer.ggml.scores")
    if len(scores) != len(meta.tokens):
        raise TokenizerError(f"GGUF: {len(scores)} scores for {len(meta.tokens)} tokens")
    known = set(meta.tokens)
    normal = (index for index, kind in enumerate(meta.types) if kind in (_NORMAL, _USER_DEFINED))
    for index in sorted(normal, key=lambda i: -scores[i]):
        token = meta.tokens[index]
        for cut in range(len(token) - 1, 0, -1):
            if token[:cut] in known and token[cut:] in known:
                yield token[:cut], token[cut:]


def _finish(
    meta: _Metadata,
    backend: Tokenizer,
    decoder: PieceDecoder,
    *,
    add_bos: bool,
    bos_id: int | None = None,
    eos_id: int | None = None,
    unknown_id: int | None = None,
) -> TokenizerParts:
    """Add the tokens that are matched in the text itself, and what goes around a text."""
    for special, kinds in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
        contents = [token for token, kind in zip(meta.tokens, meta.types, strict=True) if kind in kinds and token]
        backend.add_tokens([AddedToken(content, special=special, normalized=False) for content in contents])
    template = meta.get("tokenizer.chat_template")
    ids = {
        "bos_token": meta.special_id("bos", bos_id),
        "eos_token": meta.special_id("eos", eos_id),
        "unk_token": meta.special_id("unknown", unknown_id),
        "pad_token": meta.special_id("padding"),
    }
    return TokenizerParts(
        backend,
        piece=lambda index: meta.tokens[index] if index < len(meta.tokens) else None,
        decoder=decoder,
        prefix=_around(meta, "bos", ids["bos_token"], add_bos),
        suffix=_around(meta, "eos", ids["eos_token"], False),
        special_tokens={name: meta.tokens[index] for name, index in ids.items() if index is not None},
        chat_template=template if isinstance(template, str) else None,
    )


def _around(meta: _Metadata, name: str, token_id: int | None, default: bool) -> tuple[int, ...]:
    if not meta.get(f"tokenizer.ggml.add_{name}_token", default):
        return ()
    if token_id is None:
        raise TokenizerError(f"GGUF: texts need a {name.upper()} token, but tokenizer.ggml.{name}_token_id names none")
    return (token_id,)
