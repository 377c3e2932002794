"""The whole mixer in a few Triton launches around a chunk kernel."""
