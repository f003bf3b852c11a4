"""Raw tables: what their columns hold, and the encoders that make features of their rows."""

from jtrees._public import list_public_names as _list_public_names
from jtrees.tables.dataset import Dataset as Dataset, checked_dataset as checked_dataset, checked_table as checked_table
from jtrees.tables.encoder import TableEncoder as TableEncoder
from jtrees.tables.frame import ColumnSchema as ColumnSchema, Frame as Frame, read_frame as read_frame
from jtrees.tables.inference import schema as schema
from jtrees.tables.model import FrameModel as FrameModel
from jtrees.tables.schemas import ColumnsWarning as ColumnsWarning, Schema as Schema

_list_public_names(__name__)
