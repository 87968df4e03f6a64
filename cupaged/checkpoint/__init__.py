"""Models on disk: safetensors folders and GGUF files, opened lazily. `open_checkpoint` chooses by the path."""
