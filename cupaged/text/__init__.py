"""Text in, token ids out, and back: tokenizers, the incremental detokenizer, chat templates."""
