"""The engine: KV tensors, the model runner, one step, and the thread that drives it."""
