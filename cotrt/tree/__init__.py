"""Policy of the engine, free of torch: blocks, KV tree, sequences, scheduler, planner."""
