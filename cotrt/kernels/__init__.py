"""Functions over tensors, in one folder a backend with equal file names and signatures."""
