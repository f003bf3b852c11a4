"""Training on tables that do not fit in memory; ``command`` describes the program."""
