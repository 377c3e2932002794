"""Chunk kernels: implementations of the gated delta rule behind one interface."""
