"""One decision table on all ranks, through the store of the job, in bounded time."""
