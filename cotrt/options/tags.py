"""The tags that reasoning models put around a thought."""

THINK, THINK_END = "<think>", "</think>"
