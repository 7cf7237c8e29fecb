"""The module's own evaluation steps and activations, with batches dealt out over the workers."""
