"""Choosing options: sweeps over many runs, and tuning by rows that were not trained on."""

from jtrees.selection.sweep import SweepResult as SweepResult, sweep as sweep
from jtrees.selection.tune import Trial as Trial, tune as tune
