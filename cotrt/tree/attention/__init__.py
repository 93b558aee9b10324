"""The attention plan: who reads which blocks together. No torch."""
