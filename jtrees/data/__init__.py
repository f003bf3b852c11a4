"""Tables of numbers in the user's units, and the scaling between tables and the batches of searches."""

from jtrees.data.scaling import Data as Data, Scaling as Scaling
from jtrees.data.table import Table as Table
