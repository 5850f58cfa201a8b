"""smgd beside smg 1.13 on one machine, in front of the same engine program: `make bench`.

Not collected by pytest. docs/performance.md says what the figures mean and what they are.
"""
