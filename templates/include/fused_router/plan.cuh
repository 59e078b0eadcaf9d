// The route plan of a few rows, built in shared memory from one bit per (local expert, row).
//
// Every CTA of the cluster builds all of it (bits, then block offsets) and writes its share: the pairs of its own rows,
// and for every CLUSTER-th span of 32 experts the counts, offsets, block ids and padding. A warp serves one span.
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

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

// E experts, K routes a row, at most ROWS rows, BLOCK_M slots a block (0: known at run time).
template <i32 E, i32 K, i32 ROWS, i32 BLOCK_M, i32 CLUSTER>
struct Plan {
    static constexpr i32 WORDS = ceil_div(ROWS, 32);  // of 32 rows
    static constexpr i32 SPANS = E / kWarp;           // of 32 experts
    // Most blocks of an expert, where that is small and known.
    static constexpr i32 LEVELS = BLOCK_M > 0 ? ceil_div(ROWS, BLOCK_M > 0 ? BLOCK_M : 1) : 99;
    static_assert(E % kWarp == 0 && SPANS <= 32, "experts must be at most 32 spans of 32");

    struct Scratch {
        u32 rows[WORDS][E];  // bit t % 32 of rows[t / 32][e]: row t chose local expert e
        i32 offsets[E];      // first slot of an expert
        i32 span_blocks[32];
    };

    // What a lane knows of its expert, from one step to the next.
    struct State {
        i32 count;   // pairs
        i32 blocks;
        i32 before;  // blocks of lower experts: of the span, then of all
    };

    static __device__ __forceinline__ void clear(Scratch& s, u32 thread, u32 threads) {
        uint4* words = reinterpret_cast<uint4*>(&s.rows[0][0]);
#pragma unroll 1
        for (u32 i = thread; i < WORDS * E / 4; i += threads) words[i] = make_uint4(0, 0, 0, 0);
    }

    static __device__ __forceinline__ void mark(Scratch& s, u32 row, u32 expert) {
        if (expert < E) atomicOr(&s.rows[row / 32][expert], 1u << (row % 32));
    }

    // Counts and blocks of span `span` (a warp's own), after all marks and a barrier. A barrier follows.
    static __device__ __forceinline__ void count(Scratch& s, u32 span, i32 bm, State& state) {
        const u32 lane = ptx::lane_id();
        state.count = 0;
#pragma unroll
        for (i32 w = 0; w < WORDS; ++w) state.count += __popc(s.rows[w][span * kWarp + lane]);
        if constexpr (LEVELS <= 2) {
            count_by_ballot(s, span, state);
        } else {
            state.blocks = BLOCK_M > 0 ? (state.count + BLOCK_M - 1) / larger(BLOCK_M, 1) : divide_up(state.count, bm);
            const i32 sum = ptx::warp_prefix_sum(state.blocks);
            state.before = sum - state.blocks;
            if (lane == kWarp - 1) s.span_blocks[span] = sum;
        }
    }

    // First slots of the span's experts. A barrier follows. Returns the number of all blocks.
    static __device__ __forceinline__ i32 place(Scratch& s, u32 span, i32 bm, State& state) {
        const u32 lane = ptx::lane_id();
        const u32 blocks = lane < SPANS ? s.span_blocks[lane] : 0;
        state.before += static_cast<i32>(ptx::warp_sum(lane < span ? blocks : 0));
        s.offsets[span * kWarp + lane] = state.before * bm;
        return static_cast<i32>(ptx::warp_sum(blocks));
    }

    // Everything about the span's experts but their pairs.
    static __device__ __forceinline__ void write_experts(const PlanOutputs& out, u32 span, i32 bm, i32 sentinel,
                                                         const State& state, i32 locals) {
        const i32 expert = span * kWarp + ptx::lane_id();
        if (expert < locals) {
            out.expert_counts[expert] = state.count;
            out.expert_scatter_offsets[expert] = state.count;
            out.expert_offsets[expert] = state.before * bm;
        }
        i32* slots = out.sorted_token_ids + state.before * bm;
        i32* ids = out.expert_ids + state.before;
#pragma unroll 1
        for (i32 i = 0; i < state.blocks; ++i)
            ids[i] = expert;
        const i32 aligned = round_up(state.count, 4);
#pragma unroll
        for (i32 i = 0; i < 3; ++i)
            if (state.count + i < aligned) slots[state.count + i] = sentinel;
#pragma unroll 1
        for (i32 i = aligned; i < state.blocks * bm; i += 4)
            *reinterpret_cast<int4*>(slots + i) = make_int4(sentinel, sentinel, sentinel, sentinel);
    }

    // The slot of one pair, after place() and a barrier. `expert` < E.
    static __device__ __forceinline__ i32 slot_of(const Scratch& s, u32 row, u32 expert) {
        i32 slot = s.offsets[expert];
        const u32 word = row / 32;
#pragma unroll
        for (i32 w = 0; w < WORDS; ++w) {
            const u32 mask = w < word ? ~0u : w == word ? (1u << (row % 32)) - 1 : 0u;
            slot += __popc(s.rows[w][expert] & mask);
        }
        return slot;
    }

private:
    // ceil(count / bm) for a count of at most 2^12: the quotient's error is far below 1 / bm.
    static __device__ __forceinline__ i32 divide_up(i32 count, i32 bm) {
        return static_cast<i32>(__fdividef(static_cast<f32>(count + bm - 1) + 0.5f, static_cast<f32>(bm)));
    }

    // With at most two blocks an expert, ballots give the prefix sums.
    static __device__ __forceinline__ void count_by_ballot(Scratch& s, u32 span, State& state) {
        const u32 some = __ballot_sync(kFullWarp, state.count > 0);
        const u32 many = LEVELS > 1 ? __ballot_sync(kFullWarp, state.count > BLOCK_M) : 0;
        state.blocks = (state.count > 0) + (LEVELS > 1 && state.count > BLOCK_M);
        state.before = __popc(some & ptx::lanes_below()) + __popc(many & ptx::lanes_below());
        if (ptx::lane_id() == kWarp - 1) s.span_blocks[span] = __popc(some) + __popc(many);
    }
};

}  // namespace fused_router
