"""The kernels of a GPU, in Triton: ``DeviceOps`` with the bits of ``kernels.reference``."""

from weightdelta.kernels.triton_digest import dense_xor, digest
from weightdelta.kernels.triton_encode import begin_encode, encode
from weightdelta.kernels.triton_scan import scratch
from weightdelta.kernels.triton_scatter import scatter
from weightdelta.kernels.triton_stage import decode_into, stage

__all__ = [
    "begin_encode",
    "decode_into",
    "dense_xor",
    "digest",
    "encode",
    "scatter",
    "scratch",
    "stage",
]
