"""Plain torch on any device: the definition of right for every backend."""
