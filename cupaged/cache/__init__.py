"""The paged KV cache's bookkeeping: NumPy only, no device arrays. `manager.CacheManager` is the only door."""
