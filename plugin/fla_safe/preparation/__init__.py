"""What a user prepares before a job: a bundle for named shapes or for a recipe."""
