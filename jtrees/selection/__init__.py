"""Choice of options: sweeps over many runs, and tuning by the held-out loss."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.selection.result import SweepResult as SweepResult
from jtrees.selection.space import LogUniform as LogUniform, Uniform as Uniform
from jtrees.selection.sweep import sweep as sweep
from jtrees.selection.tune import tune as tune

_list_public_names(__name__)
