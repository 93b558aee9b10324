"""Saved branches: one safetensors file each, written and read with numpy alone."""
