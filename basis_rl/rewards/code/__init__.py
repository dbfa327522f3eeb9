"""Running code that a model wrote against tests, so that it can neither do harm nor see or fake a result."""
