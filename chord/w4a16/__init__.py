"""W4A16 MoE GEMMs: INT4 expert weights with group-32 scales, bfloat16 activations. Importing it registers the ops."""

from chord.w4a16.api import BlockPlan, PreparedMoeW4A16, moe_w4a16, prepare_moe_w4a16
from chord.w4a16.combine import moe_w4a16_combine, prepare_moe_w4a16_combine
from chord.w4a16.experts import W4A16Experts
from chord.w4a16.grouped import (
    moe_w4a16_contiguous,
    moe_w4a16_masked,
    prepare_moe_w4a16_contiguous,
    prepare_moe_w4a16_masked,
)
from chord.w4a16.launch import Interval, route_intervals
from chord.w4a16.layout import LAYOUT_VERSION, WeightShape
from chord.w4a16.weights import PackedW4A16, pack_w4a16, unpack_w4a16

__all__ = [
    "LAYOUT_VERSION",
    "BlockPlan",
    "Interval",
    "PackedW4A16",
    "PreparedMoeW4A16",
    "W4A16Experts",
    "WeightShape",
    "moe_w4a16",
    "moe_w4a16_combine",
    "moe_w4a16_contiguous",
    "moe_w4a16_masked",
    "pack_w4a16",
    "prepare_moe_w4a16",
    "prepare_moe_w4a16_combine",
    "prepare_moe_w4a16_contiguous",
    "prepare_moe_w4a16_masked",
    "route_intervals",
    "unpack_w4a16",
]
