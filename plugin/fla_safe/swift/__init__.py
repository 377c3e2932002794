"""Floor 4: ms-swift. The flag, the swap before the model is built, the check after, and the job's report."""
