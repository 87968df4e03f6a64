"""cupaged: LLM inference over a paged KV cache, without torch."""

from cupaged._version import __version__ as __version__
