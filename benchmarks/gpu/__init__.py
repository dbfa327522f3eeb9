"""Everything that only a GPU shows, in ten minutes of one: `python -m benchmarks.gpu`. A module for each stage."""
