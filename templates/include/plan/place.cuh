// From counts to the plan: where each expert's slots begin, what is written about it, and its blocks and padding.
// Every CTA of the grid knows all counts and computes all offsets; each writes the experts of its own part.
#pragma once
#include "plan/scan.cuh"
#include "plan/tensors.cuh"

namespace plan {

// Counts of the experts 2t and 2t + 1, held by thread t.
struct TwoCounts {
    u32 first;
    u32 second;
};

__device__ __forceinline__ TwoCounts unpack(u32 packed) {
    return {packed & 0xffffu, packed >> 16};
}

// Shared memory. base: the slot of this CTA's first pair of an expert.
template <int kMaxExperts>
struct Places {
    u32 base[kMaxExperts];
    u32 first_block[kMaxExperts];
    u32 total[kMaxExperts];
    u32 scratch[32];
};

// The experts that CTA `part` of `parts` writes about: [first, last), first even.
struct Part {
    u32 first;
    u32 last;
};

__device__ __forceinline__ Part part_of(u32 part, u32 parts, u32 experts) {
    const u32 each = round_up(ceil_div(experts, parts), 2u);
    return {smaller(part * each, experts), smaller((part + 1) * each, experts)};
}

__device__ __forceinline__ void store_two(i32* to, u32 at, u32 a, u32 b, bool both) {
    if (both) {
        *reinterpret_cast<int2*>(to + at) = make_int2(static_cast<i32>(a), static_cast<i32>(b));
    } else {
        to[at] = static_cast<i32>(a);
    }
}

// `total` and `before` (pairs of CTAs before this one) are thread t's counts of experts 2t and 2t + 1; 0 from
// shape.experts on. Fills `places`, writes counts, offsets and the padded total; ends with a barrier.
template <int kBlockM, int kMaxExperts>
__device__ __forceinline__ void place_experts(Places<kMaxExperts>& places, const TwoCounts& total, const TwoCounts& before,
                                              const Part& part, const Shape& shape, const Tensors& out) {
    const u32 expert = 2 * threadIdx.x;
    const u32 blocks_a = blocks_of<kBlockM>(total.first, shape.block_m);
    const u32 blocks_b = blocks_of<kBlockM>(total.second, shape.block_m);
    const u32 block_a = exclusive_sum(blocks_a + blocks_b, places.scratch), block_b = block_a + blocks_a;
    if (expert < kMaxExperts) {
        const u32 slot_a = slots_of<kBlockM>(block_a, shape.block_m), slot_b = slots_of<kBlockM>(block_b, shape.block_m);
        places.base[expert] = slot_a + before.first;
        places.base[expert + 1] = slot_b + before.second;
        places.first_block[expert] = block_a;
        places.first_block[expert + 1] = block_b;
        places.total[expert] = total.first;
        places.total[expert + 1] = total.second;
        if (expert >= part.first && expert < part.last) {
            const bool both = expert + 1 < shape.experts;
            store_two(out.counts, expert, total.first, total.second, both);
            store_two(out.scatter_offsets, expert, total.first, total.second, both);
            store_two(out.offsets, expert, slot_a, slot_b, both);
            if (expert + 2 >= shape.experts) {
                const u32 end = slots_of<kBlockM>(block_b + blocks_b, shape.block_m);
                out.offsets[shape.experts] = static_cast<i32>(end);
                out.padded_total[0] = static_cast<i32>(end);
            }
        }
    }
    __syncthreads();
}

// Writes expert_ids and the padding of the part's experts; kLanes threads serve one expert. The last threads come first: the
// first ones are those that have pairs to scatter when there are few.
template <int kBlockM, int kLanes, int kMaxExperts>
__device__ __forceinline__ void fill_blocks(const Places<kMaxExperts>& places, const Part& part, const Shape& shape,
                                            const Tensors& out) {
    const u32 thread = blockDim.x - 1 - threadIdx.x, sub = thread % kLanes;
    for (u32 expert = part.first + thread / kLanes; expert < part.last; expert += blockDim.x / kLanes) {
        const u32 first = places.first_block[expert], total = places.total[expert];
        const u32 blocks = blocks_of<kBlockM>(total, shape.block_m);
        for (u32 b = sub; b < blocks; b += kLanes) out.block_experts[first + b] = static_cast<i32>(expert);
        const u32 slot = slots_of<kBlockM>(first, shape.block_m), end = slots_of<kBlockM>(blocks, shape.block_m);
        for (u32 i = total + sub; i < end; i += kLanes) out.sorted_ids[slot + i] = static_cast<i32>(shape.pairs);
    }
}

}  // namespace plan
