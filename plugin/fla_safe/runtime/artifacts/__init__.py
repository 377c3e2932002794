"""A rank's own compiled kernels: where they lie, how they are checked, and how they travel in bundles."""
