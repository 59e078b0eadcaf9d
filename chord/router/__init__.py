"""The fused MoE router and the route plan as torch operators. Importing it registers chord::fused_router and
chord::route_plan.
"""

from chord.router.api import PreparedFusedRouter, RouterOutput, fused_router, prepare_fused_router, route_plan
from chord.router.plan import RoutePlan, allocate_route_plan, max_route_blocks

__all__ = [
    "PreparedFusedRouter",
    "RoutePlan",
    "RouterOutput",
    "allocate_route_plan",
    "fused_router",
    "max_route_blocks",
    "prepare_fused_router",
    "route_plan",
]
