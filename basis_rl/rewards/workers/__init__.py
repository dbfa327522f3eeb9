"""Worker processes that can be killed: a pool of them, calls of somebody's function, what failed."""
