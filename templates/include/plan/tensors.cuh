// The plan's tensors and the rules that every arm shares. A pair is an index into the flat topk_ids; a slot an index into
// sorted_token_ids; a block is block_m consecutive slots of one expert. Experts here are local ids, below `experts`.
#pragma once
#include "common/types.cuh"

namespace plan {

struct Tensors {
    i32* sorted_ids;
    i32* block_experts;
    i32* padded_total;
    i32* counts;
    i32* offsets;
    i32* scatter_offsets;
};

// A map must give each local id to one expert at most. The plan of one that does not is meaningless, but it stays inside
// the tensors: every arm counts a row's pairs of a local id at least as often as it places them in different slots.
struct Shape {
    const i32* expert_map;  // global -> local id, or null: every expert is local
    u32 experts;            // local ones
    u32 block_m;
    u32 pairs;  // in all; also the sentinel that fills up a block
};

// Blocks that `count` pairs need. kBlockM = 0: block_m is known at run time only.
template <int kBlockM>
__device__ __forceinline__ u32 blocks_of(u32 count, u32 block_m) {
    const u32 m = kBlockM > 0 ? kBlockM : block_m;
    return (count + m - 1) / m;
}

template <int kBlockM>
__device__ __forceinline__ u32 slots_of(u32 blocks, u32 block_m) {
    return blocks * (kBlockM > 0 ? kBlockM : block_m);
}

// Local id of a global expert; anything that is not below shape.experts has no place in the plan.
__device__ __forceinline__ u32 local_expert(u32 expert, const Shape& shape) {
    return shape.expert_map == nullptr ? expert : static_cast<u32>(__ldg(shape.expert_map + expert));
}

}  // namespace plan
