"""The options of `LLM` and of a generation, checked, and what the machine gives them."""
