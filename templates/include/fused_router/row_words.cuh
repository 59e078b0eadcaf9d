// The route plan of up to 32 rows from the rows' bits: word w of a row has a bit for every local expert of [32 w, 32 w + 32).
// Every warp that needs the plan builds it in its own registers, lane w holding word w of everything, so no barrier and no
// memory stand between the words' arrival and their use.
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"
#include "ptx/shared.cuh"

namespace fused_router {

// SPANS words a row, at most ROWS rows (a power of 2), BLOCK_M slots a block (0: known at run time).
template <i32 SPANS, i32 ROWS, i32 BLOCK_M>
struct RowWords {
    static constexpr i32 log2(i32 n) {
        return n <= 1 ? 0 : 1 + log2(n / 2);
    }
    static constexpr i32 PLANES = log2(ROWS) + 1;  // bits of a count
    static constexpr i32 LEVELS = ceil_div(ROWS, BLOCK_M > 0 ? BLOCK_M : 8);  // most blocks of an expert
    static_assert(ROWS >= 2 && ROWS <= 32 && (ROWS & (ROWS - 1)) == 0 && SPANS <= 32, "counts and words must fit a lane");

    u32 plane[PLANES];  // bit i of the counts of the lane's 32 experts
    u32 level[LEVELS];  // experts that have more than i blocks
    u32 before;         // blocks of lower words' experts
    u32 total;          // blocks of all experts

    // From the words at shared address `words`, SPANS of each of the first `rows` rows.
    __device__ __forceinline__ void build(u32 words, u32 rows, i32 bm, u32 lane) {
        const u32 own = words + (lane < SPANS ? lane : 0) * 4;
        u32 row[ROWS];
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) row[r] = ptx::load_shared(own + r * SPANS * 4);
        if (rows < ROWS) {
#pragma unroll
            for (u32 r = 0; r < ROWS; ++r) row[r] = r < rows ? row[r] : 0;  // what lies beyond is anything
        }
        tally(row);
#pragma unroll
        for (i32 i = 0; i < PLANES; ++i) plane[i] = lane < SPANS ? plane[i] : 0;
        u32 blocks = 0;
#pragma unroll
        for (i32 i = 0; i < LEVELS; ++i) {
            level[i] = above(i * bm);
            blocks += __popc(level[i]);
        }
        const u32 sum = static_cast<u32>(ptx::warp_prefix_sum(static_cast<i32>(blocks)));
        before = sum - blocks;
        total = __shfl_sync(kFullWarp, sum, kWarp - 1);
    }

    // What is known about one expert. All lanes must take part, with any expert below 32 * SPANS.
    struct Expert {
        u32 count;
        u32 first_block;
        u32 blocks;
    };

    __device__ __forceinline__ Expert at(u32 expert) const {
        const u32 word = expert / 32;
        const u32 bit = expert % 32;
        const u32 lower = (1u << bit) - 1;
        Expert e{0, __shfl_sync(kFullWarp, before, word), 0};
#pragma unroll
        for (i32 i = 0; i < PLANES; ++i) e.count += (__shfl_sync(kFullWarp, plane[i], word) >> bit & 1) << i;
#pragma unroll
        for (i32 i = 0; i < LEVELS; ++i) {
            const u32 bits = __shfl_sync(kFullWarp, level[i], word);
            e.first_block += __popc(bits & lower);
            e.blocks += bits >> bit & 1;
        }
        return e;
    }

    // How many of the first `rows` rows, fewer than ROWS, chose `expert`.
    static __device__ __forceinline__ u32 rank(u32 words, u32 rows, u32 expert) {
        u32 chose = 0;
#pragma unroll
        for (u32 r = 0; r < ROWS - 1; ++r)
            chose |= (ptx::load_shared(words + (r * SPANS + expert / 32) * 4) >> expert % 32 & 1) << r;
        return __popc(chose & ((1u << rows) - 1));
    }

private:
    // Adds three bits of one weight, in 32 places at once: `sum` becomes the bit of that weight; returns the next one.
    static __device__ __forceinline__ u32 add(u32& sum, u32 a, u32 b) {
        const u32 carry = (sum & a) | (sum & b) | (a & b);
        sum ^= a ^ b;
        return carry;
    }

    __device__ __forceinline__ void tally(const u32 (&row)[ROWS]) {
        u32 pending[PLANES];
#pragma unroll
        for (i32 i = 0; i < PLANES; ++i) plane[i] = pending[i] = 0;
#pragma unroll
        for (i32 r = 0; r < ROWS; r += 2) {
            u32 carry = add(plane[0], row[r], row[r + 1]);
#pragma unroll
            for (i32 i = 1; i < PLANES; ++i) {
                if ((r / 2 + 1) % (1 << i) != 0 && (r / 2 + 1) % (1 << (i - 1)) == 0) pending[i] = carry;
                if ((r / 2 + 1) % (1 << i) == 0 && i + 1 < PLANES) carry = add(plane[i], pending[i], carry);
            }
            if (r + 2 == ROWS) plane[PLANES - 1] = carry;
        }
    }

    // Experts whose count is above `limit`, bit by bit from the lowest: with a 0 in the limit either bit decides, with a 1 both.
    __device__ __forceinline__ u32 above(u32 limit) const {
        u32 more = 0;
#pragma unroll
        for (i32 i = 0; i < PLANES; ++i) {
            const u32 any = limit >> i & 1 ? 0 : 0xffffffffu;
            more = (plane[i] & more) | (plane[i] & any) | (more & any);
        }
        return limit < 1u << PLANES ? more : 0;
    }
};

}  // namespace fused_router
