"""Scripts to copy: a run and a sweep on a pod, and training on tables that do not fit in memory."""
