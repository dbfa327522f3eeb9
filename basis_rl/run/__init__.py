"""What a run leaves and needs on disk and on the Hub: lock, checkpoints, log, usage, repository, records."""
