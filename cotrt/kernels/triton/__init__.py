"""Triton kernels for one NVIDIA GPU; the same functions run in Triton's interpreter on a CPU."""
