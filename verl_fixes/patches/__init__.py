"""One module a patch: the fix, and nothing else."""
