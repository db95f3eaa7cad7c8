"""One module per group; gen.py loads them all. See the README for how to add a case."""
