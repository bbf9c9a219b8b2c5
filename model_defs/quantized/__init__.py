"""Quantized checkpoints, which become plain weights while they are loaded.

A format (`QuantizedFormat`) says which stored tensors give a tensor that a recipe names, and how. Weights are
decoded in float32 and then cast once, on the devices, one parameter at a time.
"""

from model_defs.quantized.reading import parse_format, read_format
from model_defs.quantized.source import QuantizedFormat, Source, SourcePart, plain

__all__ = ["QuantizedFormat", "Source", "SourcePart", "parse_format", "plain", "read_format"]
