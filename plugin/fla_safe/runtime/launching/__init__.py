"""From a class of calls to a compiled binary to a launch that goes straight into the C launcher."""
