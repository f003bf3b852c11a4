"""Tables of numbers in the user's units, and the scaling between tables and the batches of searches."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.data.scaling import Data as Data, Scaling as Scaling
from jtrees.data.table import Table as Table

_list_public_names(__name__)
