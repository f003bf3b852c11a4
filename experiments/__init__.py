"""The main job, benchmarks and one script per paper's tables. Needs ``pip install "jtrees[experiments]"``."""
