"""Policy of the engine, free of torch: KV tree, attention plan, memory tiers, schedule."""
