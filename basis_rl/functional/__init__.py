"""Pure tensor functions: no state, no I/O, no collectives, no configuration."""
