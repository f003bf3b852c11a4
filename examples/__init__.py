"""Scripts to copy: a run on a pod, and training on tables that do not fit in memory."""
