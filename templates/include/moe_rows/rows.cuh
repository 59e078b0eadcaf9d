// Movements of bfloat16 rows around the GEMMs of a MoE layer. A warp takes 256 columns of a row, 8 of them a lane.
#pragma once
#include "common/swiglu.cuh"
#include "common/types.cuh"
#include "ptx/memory.cuh"
#include "ptx/mma.cuh"

namespace moe_rows {

constexpr u32 kThreads = 256;
constexpr u32 kLaneColumns = 8;
constexpr u32 kWarpColumns = kLaneColumns * kWarp;
constexpr u32 kBatch = 8;  // loads in flight of a lane

// Which rows there are. Every pointer may be null. Whatever they hold, no row but [0, num_sorted) is named.
struct Bounds {
    i64 num_sorted;      // rows of the sorted side that there is memory for
    const i32* row_ids;  // [rows]: where a row goes, or comes from; negative: nowhere
    const void* limit;   // one integer: rows of the sorted side at and beyond it do not exist
    i32 limit_bytes;     // 4 or 8
    const i32* counts;   // [slabs]: rows of each slab that exist
    u32 slab_rows;

    __device__ __forceinline__ i64 sorted_rows() const {
        if (limit == nullptr) return num_sorted;
        const i64 given = limit_bytes == 8 ? *static_cast<const i64*>(limit) : *static_cast<const i32*>(limit);
        return smaller(given, num_sorted);
    }

    // The other side's row of `row`, or -1.
    __device__ __forceinline__ i64 other(i64 row) const {
        if (counts != nullptr && i64(u32(row) % slab_rows) >= counts[u32(row) / slab_rows]) return -1;
        const i64 found = row_ids == nullptr ? row : row_ids[row];
        return found < sorted_rows() ? found : -1;
    }
};

// One warp's piece of the work: 256 columns of a row.
struct Unit {
    i64 row;     // below 2^31
    u32 column;  // this lane's first one
};

template <typename Body>
__device__ __forceinline__ void for_each_unit(i64 units, u32 width, Body body) {
    const u32 pieces = ceil_div(width, kWarpColumns);
    const i64 stride = i64(gridDim.x) * (kThreads / kWarp);
    for (i64 unit = i64(blockIdx.x) * (kThreads / kWarp) + threadIdx.x / kWarp; unit < units; unit += stride) {
        const i64 row = units >> 32 == 0 ? i64(u32(unit) / pieces) : unit / pieces;  // a 64-bit division takes long
        body(Unit{row, u32(unit - row * pieces) * kWarpColumns + threadIdx.x % kWarp * kLaneColumns});
    }
}

__device__ __forceinline__ f32 low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ f32 high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 swiglu_pair(u32 gate, u32 up) {
    return ptx::pack_bf16(swiglu(low(gate), low(up)), swiglu(high(gate), high(up)));
}

// out[other(row)] = silu(x[row][:width]) * x[row][width:].
__device__ __forceinline__ void activate(const Bounds& bounds, const bf16* x, bf16* out, u32 width, i64 units) {
    for_each_unit(units, width, [&](Unit unit) {
        const i64 to = bounds.other(unit.row);
        if (to < 0 || unit.column >= width) return;
        const bf16* from = x + unit.row * (2 * i64(width)) + unit.column;
        const uint4 gate = ptx::load_once_v4(from), up = ptx::load_once_v4(from + width);
        const uint4 value = make_uint4(swiglu_pair(gate.x, up.x), swiglu_pair(gate.y, up.y), swiglu_pair(gate.z, up.z),
                                       swiglu_pair(gate.w, up.w));
        *reinterpret_cast<uint4*>(out + to * width + unit.column) = value;
    });
}

// out[other(pair)] = x[pair / top_k].
__device__ __forceinline__ void scatter(const Bounds& bounds, const bf16* x, bf16* out, u32 width, u32 top_k,
                                        i64 units) {
    for_each_unit(units, width, [&](Unit unit) {
        const i64 to = bounds.other(unit.row);
        if (to < 0 || unit.column >= width) return;
        const uint4 value = ptx::load_once_v4(x + i64(u32(unit.row) / top_k) * width + unit.column);
        *reinterpret_cast<uint4*>(out + to * width + unit.column) = value;
    });
}

// Which pairs of a token count, beside the bounds. expert_map may be null.
struct Routes {
    const i32* topk_ids;    // [tokens][top_k], global
    const i32* expert_map;  // [num_experts]: negative for experts that are elsewhere
    u32 num_experts;
    const f32* weights;  // [tokens][top_k]

    __device__ __forceinline__ bool here(i64 pair) const {
        const u32 expert = u32(topk_ids[pair]);
        return expert < num_experts && (expert_map == nullptr || expert_map[expert] >= 0);
    }
};

// out[token] = sum over its routes of weight * x[other(pair)], in float32 and in the order of the routes; 0 without any.
__device__ __forceinline__ void combine(const Bounds& bounds, const Routes& routes, const bf16* x, bf16* out, u32 width,
                                        u32 top_k, i64 units) {
    const u32 lane = threadIdx.x % kWarp;
    for_each_unit(units, width, [&](Unit unit) {
        f32 sums[kLaneColumns] = {};
        for (u32 first = 0; first < top_k; first += kBatch) {
            const i64 pair = unit.row * top_k + first + lane;
            const bool mine = lane < kBatch && first + lane < top_k && routes.here(pair);
            const i64 row = mine ? bounds.other(pair) : -1;
            const f32 weight = row < 0 ? 0.f : routes.weights[pair];
            uint4 values[kBatch];
            f32 factors[kBatch];
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                const i64 from = __shfl_sync(kFullWarp, row, i);
                factors[i] = __shfl_sync(kFullWarp, weight, i);
                values[i] = make_uint4(0, 0, 0, 0);
                if (from >= 0 && unit.column < width) values[i] = ptx::load_once_v4(x + from * width + unit.column);
            }
#pragma unroll
            for (u32 i = 0; i < kBatch; ++i) {
                const u32 pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
                for (u32 j = 0; j < 4; ++j) {
                    sums[2 * j] += factors[i] * low(pairs[j]);
                    sums[2 * j + 1] += factors[i] * high(pairs[j]);
                }
            }
        }
        if (unit.column >= width) return;
        *reinterpret_cast<uint4*>(out + unit.row * width + unit.column) =
            make_uint4(ptx::pack_bf16(sums[0], sums[1]), ptx::pack_bf16(sums[2], sums[3]),
                       ptx::pack_bf16(sums[4], sums[5]), ptx::pack_bf16(sums[6], sums[7]));
    });
}

}  // namespace moe_rows
