"""What a run would need, before it is started: memory of a GPU from the model and the settings."""
