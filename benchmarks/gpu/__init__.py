"""What a step costs on a GPU, and a runner for these measurements and the checks of `tests/device`."""
