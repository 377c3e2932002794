"""What `fla-safe doctor` looks at and says: facts of this environment, the checks on them, and the report."""
