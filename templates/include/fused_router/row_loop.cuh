// A warp's share of the rows: first, first + stride, ... below last.
//
// kAhead: the next row is loaded while one is selected, and the bias stays in registers (up to 128 registers a thread, 16
// warps a multiprocessor). Otherwise neither (64 registers, 32 warps): other warps hide the loads, the bias comes from L1.
#pragma once
#include "fused_router/warp_select.cuh"

namespace fused_router {

template <int E, int K, typename T, bool kQuick = false, bool kAhead = true>
struct RowLoop {
    using Select = WarpSelect<E, K, T, kQuick>;

    const T* logits;
    const f32* bias_at;
    u32 row, last, stride;
    typename Select::Row values;
    typename Select::Bias bias;

    // Issues the first loads; run() may follow much later.
    __device__ __forceinline__ RowLoop(const T* logits, const f32* bias_at, u32 first, u32 last, u32 stride, u32 lane)
        : logits(logits), bias_at(bias_at), row(first), last(last), stride(stride) {
        if (row < last) {
            Select::load(values, at(row) + lane * 4);
            if (kAhead) Select::load(bias, bias_at + lane * 4);
        }
    }

    // Calls sink(row, winner) for each row; only the lanes below K hold a winner.
    template <typename Sink>
    __device__ __forceinline__ void run(i32 renormalize, f32 factor, u32 scratch, u32 lane, Sink&& sink) {
        while (row < last) {
            const u32 next = row + stride;
            typename Select::Row ahead;
            if (kAhead && next < last) Select::load(ahead, at(next) + lane * 4);
            if (!kAhead) Select::load(bias, bias_at + lane * 4);
            sink(row, Select::select(values, bias, at(row), bias_at, renormalize, factor, scratch, lane));
            if (kAhead) {
                values = ahead;
            } else if (next < last) {
                Select::load(values, at(next) + lane * 4);
            }
            row = next;
        }
    }

  private:
    __device__ __forceinline__ const T* at(u32 r) const { return logits + static_cast<u64>(r) * E; }
};

}  // namespace fused_router
