"""KV records below the pool: in host memory, in files, in saved branches."""
