// What the arms for few rows have in common: arguments, local ids, padding.
#pragma once
#include "common/types.cuh"
#include "fused_router/exact_select.cuh"
#include "ptx/words.cuh"

namespace fused_router {

// The plan's tensors; see the operator's contract for their meaning.
struct PlanOutputs {
    i32* sorted_token_ids;
    i32* expert_ids;
    i32* num_tokens_post_padded;
    i32* expert_counts;
    i32* expert_offsets;
    i32* expert_scatter_offsets;
};

// Not a local expert.
constexpr u32 kNotLocal = 0xffffu;

struct FewArguments {
    const void* logits;
    const f32* bias;
    f32* weights;
    i32* ids;
    PlanOutputs plan;
    const i32* expert_map;  // null: every expert is local
    u32 num_tokens;
    i32 num_local_experts;
    i32 block_m;
    i32 renormalize;
    f32 factor;
};

// Of a winner; kNotLocal where it is not local or the lane has none.
__device__ __forceinline__ u32 local_expert(const FewArguments& a, const Settled& mine) {
    u32 local = mine.wins ? mine.id : kNotLocal;
    if (a.expert_map != nullptr && mine.wins) {
        local = static_cast<u32>(__ldg(a.expert_map + mine.id));
        if (local >= static_cast<u32>(a.num_local_experts)) local = kNotLocal;
    }
    return local;
}

// One row's weight and id from the winner's lane.
template <i32 K>
__device__ __forceinline__ void write_winner(const FewArguments& a, u32 row, const Settled& mine, f32 weight) {
    if (!mine.wins) return;
    const u32 at = row * K + mine.slot;
    a.ids[at] = static_cast<i32>(mine.id);
    a.weights[at] = weight;
}

// The sentinel from slot `from`, which is not the first of its block, to `end`, the end of its block. BLOCK_M 0: known at
// run time.
template <i32 K, i32 BLOCK_M>
__device__ __forceinline__ void pad(const FewArguments& a, u32 from, u32 end) {
    const i32 sentinel = a.num_tokens * K;
    i32* const slots = a.plan.sorted_token_ids;
    const u32 aligned = round_up(from, 4u);
#pragma unroll
    for (u32 i = 0; i < 3; ++i)
        if (from + i < aligned) slots[from + i] = sentinel;
    const int4 four = make_int4(sentinel, sentinel, sentinel, sentinel);
    if constexpr (BLOCK_M > 0) {
#pragma unroll
        for (u32 i = 0; i < BLOCK_M / 4 - 1; ++i)
            if (aligned + i * 4 < end) *reinterpret_cast<int4*>(slots + aligned + i * 4) = four;
    } else {
#pragma unroll 1
        for (u32 i = aligned; i < end; i += 4) *reinterpret_cast<int4*>(slots + i) = four;
    }
}

}  // namespace fused_router
