"""The grading of mathematics by Math-Verify: what is decided at once, what is screened, what a worker decides."""
