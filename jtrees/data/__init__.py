"""Tables of the user's rows, raw or numeric, and the scaling between tables and the batches of searches."""

from jtrees.data.columns import Columns as Columns, ColumnsWarning as ColumnsWarning
from jtrees.data.frame import Frame as Frame, read_frame as read_frame
from jtrees.data.frame_model import FrameModel as FrameModel
from jtrees.data.scaling import (
    Data as Data,
    Scaling as Scaling,
)
from jtrees.data.table import (
    Table as Table,
    checked_table as checked_table,
)
