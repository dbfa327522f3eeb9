"""Checks and measurements that need a GPU, for about nine minutes: `python -m benchmarks.gpu`. One module per stage."""
