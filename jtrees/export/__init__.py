"""Writes trees and forests for other machines: a C header, a Python file that needs only NumPy, ONNX or StableHLO.

All formats send a row to the same leaf as predictions of NumPy arrays do. Weights and features (relative to the origin)
are float32 numbers. Their products are exact in double precision, in which scores are summed (:mod:`jtrees.exact`).
"""

from jtrees._public import list_public_names as _list_public_names
from jtrees.export.c_header import to_c as to_c
from jtrees.export.numpy_file import to_numpy as to_numpy
from jtrees.export.onnx_model import to_onnx as to_onnx
from jtrees.export.stablehlo import to_stablehlo as to_stablehlo

_list_public_names()
