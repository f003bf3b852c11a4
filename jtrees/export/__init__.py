"""Trees and forests as files for other machines: a C header, a Python file that needs NumPy alone, ONNX,
StableHLO.

All of them, and predictions of NumPy arrays, send a row to the same leaf: features, relative to the origin, and weights
are float32 numbers, whose products are exact in double precision, in which scores are summed (:mod:`jtrees.exact`).
"""

from jtrees._public import list_public_names as _list_public_names
from jtrees.export.c_header import to_c as to_c
from jtrees.export.numpy_file import to_numpy as to_numpy
from jtrees.export.onnx_model import to_onnx as to_onnx
from jtrees.export.stablehlo import to_stablehlo as to_stablehlo

_list_public_names()
