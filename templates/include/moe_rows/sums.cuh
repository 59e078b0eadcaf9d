// The weighted sums of each token's rows right behind the kernel that writes them: launched before that one ends. A block starts
// where one of that kernel's is done, and has its first routes at hand when the last is.
#pragma once
#include "common/types.cuh"
#include "moe_rows/rows.cuh"
#include "ptx/mma.cuh"
#include "ptx/sync.cuh"

namespace moe_rows {

constexpr u32 kSumThreads = 128;
constexpr u32 kThreadColumns = 8;  // 16 bytes
constexpr u32 kSumColumns = kThreadColumns * kSumThreads;  // of a CTA

struct Sums {
    Routes routes;
    const bf16* rows;  // [tokens][top_k][width]
    bf16* out;         // [tokens][width]
    u32 tokens, top_k, width;
};

// kBatch routes of a token: which of them count, and each lane's weight.
struct RouteBatch {
    u32 counted;
    f32 weight;
    __device__ __forceinline__ RouteBatch(const Sums& given, u32 token, u32 first) {
        const u32 route = first + threadIdx.x % kWarp, pair = token * given.top_k + route;
        const bool here = route < first + kBatch && route < given.top_k && given.routes.here(pair);
        weight = here ? given.routes.weights[pair] : 0.f;
        counted = __ballot_sync(kFullWarp, here);
    }
};

// sums += weight * row, route after route. from: this thread's columns of the batch's first row.
__device__ __forceinline__ void add_batch(f32 (&sums)[kThreadColumns], const RouteBatch& batch, const bf16* from, u32 width,
                                          bool inside) {
    uint4 values[kBatch];
#pragma unroll
    for (u32 i = 0; i < kBatch; ++i) {
        values[i] = make_uint4(0, 0, 0, 0);
        if ((batch.counted >> i & 1) != 0 && inside) values[i] = *reinterpret_cast<const uint4*>(from);
        from += width;
    }
#pragma unroll
    for (u32 i = 0; i < kBatch; ++i) {
        const f32 factor = __shfl_sync(kFullWarp, batch.weight, i);
        const u32 pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
            sums[2 * j] += factor * low(pairs[j]);
            sums[2 * j + 1] += factor * high(pairs[j]);
        }
    }
}

__device__ __forceinline__ uint4 rounded(const f32 (&sums)[kThreadColumns]) {
    return make_uint4(ptx::pack_bf16(sums[0], sums[1]), ptx::pack_bf16(sums[2], sums[3]), ptx::pack_bf16(sums[4], sums[5]),
                      ptx::pack_bf16(sums[6], sums[7]));
}

// out[token] = sum over its routes of weight * row, in float32 and in the order of the routes: the bits of combine. A CTA keeps
// its columns from token to token. Its table lets few CTAs run on a multiprocessor: more rows in flight than memory needs
// make it slower.
__device__ __forceinline__ void sum_behind(const Sums& given) {
    const u32 pieces = ceil_div(given.width, kSumColumns), across = smaller(pieces, gridDim.x), stride = gridDim.x / across;
    const u32 first_token = blockIdx.x / across;
    if (first_token >= stride) return;  // of the CTAs that do not make up a row of pieces
    // Routes and weights are older than the kernel in front, whose rows are not.
    RouteBatch batch(given, first_token < given.tokens ? first_token : 0, 0);
    ptx::grid_dependency_wait();
    for (u32 piece = blockIdx.x - first_token * across; piece < pieces; piece += across) {
        const u32 column = piece * kSumColumns + threadIdx.x * kThreadColumns;
        const bool inside = column < given.width;
        u32 token = first_token, first = 0;
        f32 sums[kThreadColumns] = {};
        while (token < given.tokens) {
            const bf16* from = given.rows + u64{token * given.top_k + first} * given.width + column;
            add_batch(sums, batch, from, given.width, inside);
            first += kBatch;
            if (first >= given.top_k) {
                if (inside) *reinterpret_cast<uint4*>(given.out + u64{token} * given.width + column) = rounded(sums);
#pragma unroll
                for (u32 i = 0; i < kThreadColumns; ++i) sums[i] = 0.f;
                first = 0;
                token += stride;
            }
            batch = RouteBatch(given, token < given.tokens ? token : first_token, first);
        }
    }
}

}  // namespace moe_rows
