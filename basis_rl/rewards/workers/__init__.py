"""Worker processes that can be killed: a pool of them, calls of a user's function, and failures."""
