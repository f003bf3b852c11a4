"""Contains the main job, benchmarks, and one script per paper. Needs ``pip install "jtrees[experiments]"``."""
