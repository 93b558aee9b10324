"""Policy of the engine, free of torch: blocks, the KV tree, sequences, the scheduler, the planner."""
