// What the two main loops share: the math warps' side of the ring.
#pragma once
#include "common/types.cuh"
#include "gemm/dequantize.cuh"
#include "gemm/tile.cuh"
#include "ptx/copy.cuh"
#include "ptx/sync.cuh"

namespace gemm {

// State of a math warp. `group` is its warpgroup, that is its strip of the item, `warp` its 16 outputs of that strip.
template <class T>
struct MathWarp {
    u32 shared, group, warp, lane;
    u32 item_stages;  // stages of every item; blocks beyond K multiply to zero
    RingPosition at;

    __device__ __forceinline__ u32 tokens() const { return shared + at.index * T::stage_bytes; }
    __device__ __forceinline__ u32 weights(u32 block) const {
        return tokens() + T::token_bytes + (block * kStrips + group) * kBlockBytes;
    }
    __device__ __forceinline__ void wait() const { ptx::mbarrier_wait(shared + T::full + 8 * at.index, at.parity); }
    // The same for a stage whose token rows tensor cores read without the help of a thread's loads.
    __device__ __forceinline__ void wait_for_operand() const {
        wait();
        ptx::async_proxy_fence();
    }
    __device__ __forceinline__ u32 release_address() const { return shared + T::empty + 8 * at.index; }
    __device__ __forceinline__ void release(u32 address) const {
        if (lane == 0) ptx::mbarrier_arrive(address);
    }
    __device__ __forceinline__ void advance() { at.template next<T::stages>(); }

    // An item without a strip for this warpgroup: its stages only pass by.
    __device__ __forceinline__ void skip_item() {
        for (u32 left = item_stages; left > 0; --left) {
            wait();
            release(release_address());
            advance();
        }
    }
};

}  // namespace gemm
