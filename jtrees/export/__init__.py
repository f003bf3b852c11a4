"""Writes trees and forests for other machines: C, Python with NumPy alone, ONNX, StableHLO, SQL and JavaScript.

All formats except ONNX send a row to the same leaf as predictions of NumPy arrays do. ONNX can differ for scores near
0. Weights and features (relative to the origin) are float32 numbers. Their products are exact in double precision, in
which scores are summed (:mod:`jtrees.exact`).
"""

from jtrees._public import list_public_names as _list_public_names
from jtrees.export.c_header import to_c as to_c
from jtrees.export.javascript_module import to_javascript as to_javascript
from jtrees.export.numpy_file import to_numpy as to_numpy
from jtrees.export.onnx_model import to_onnx as to_onnx
from jtrees.export.sql_query import to_sql as to_sql
from jtrees.export.stablehlo import to_stablehlo as to_stablehlo

_list_public_names(__name__)
