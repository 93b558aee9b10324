"""The engine: one step, the thread that drives it, the model runner, KV records."""
