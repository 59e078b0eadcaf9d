// The join of a plan that a whole co-resident grid makes from few rows: a row's winners go to global memory in 16-byte
// packets that carry the launch's number, and every CTA polls all packets and counts all winners itself. A packet is its own
// news, so there is no barrier and no counter to wait for.
//
// A launch's number is one more than the last one's. Each CTA keeps it for itself in a word of the workspace, which starts as
// 0; so all launches on one workspace must have the same grid, and one must end before the next begins.
#pragma once
#include "common/types.cuh"
#include "plan/place.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"

namespace plan {

// A packet holds 8 local ids of 10 bits, and above each 6 bits of the launch's number.
template <i32 E, i32 K, i32 CTAS>
struct RowPackets {
    // From here on ids are of pairs without a place. There are two for each lane, lest all such pairs be counted at one.
    static constexpr u32 kNowhere = 1024 - 2 * kWarp;
    static constexpr u32 PIECES = K / 8;   // packets of a row
    static constexpr u32 PACKETS_AT = CTAS * 8;
    static_assert(E <= kNowhere && K % 8 == 0 && PACKETS_AT % 16 == 0, "ids must fit a packet");

    // Shared memory. Pairs of an expert: of all rows in the lower half, of the rows before the chunk in the upper.
    struct Counts {
        uint4 words[1024 / 4];  // they have places too, so that nothing branches

        __device__ __forceinline__ void clear() {
            for (u32 i = threadIdx.x; i < 1024 / 4; i += blockDim.x) words[i] = make_uint4(0, 0, 0, 0);
        }
        __device__ __forceinline__ u32* at(u32 expert) {
            return reinterpret_cast<u32*>(words) + expert;
        }
    };

    u8* workspace;
    u64 number;  // of this launch
    uint4 tag;

    // First of all. Reads this CTA's word.
    __device__ __forceinline__ explicit RowPackets(u8* at) : workspace(at) {
        number = reinterpret_cast<const volatile u64*>(workspace)[blockIdx.x] + 1;
    }

    // Brings the places of the chunk's packets into L2, where those who poll would otherwise fetch them from memory.
    __device__ __forceinline__ void prefetch(u32 first, u32 last, u32 lane) const {
        for (u32 i = first * PIECES + lane; i < last * PIECES; i += kWarp) ptx::prefetch_sector_l2(packet(i));
    }

    // The launch has its number: to be called once, after all threads have read the word.
    __device__ __forceinline__ void keep() {
        reinterpret_cast<u64*>(workspace)[blockIdx.x] = number;
    }

    __device__ __forceinline__ void make_tag() {
        tag = make_uint4(part(0), part(12), part(24), part(36));
    }

    // Different for the packets that a warp counts at the same time.
    static __device__ __forceinline__ u32 nowhere(u32 row, u32 slot) {
        return kNowhere + (row * PIECES + slot / 8) % (2 * kWarp);
    }

    // One warp sends row `row`, whose K ids lie at shared address `ids`, 16 bits each.
    __device__ __forceinline__ void send(u32 row, u32 ids, u32 lane) const {
        if (lane >= PIECES) return;
        const uint4 v = ptx::load_shared_v4(ids + lane * 16);
        ptx::store_whole(packet(row * PIECES + lane), make_uint4(v.x | tag.x, v.y | tag.y, v.z | tag.z, v.w | tag.w));
    }

    // Waits for all packets of `rows` rows and counts them; a barrier must follow. By all THREADS of the CTA.
    template <u32 THREADS>
    __device__ __forceinline__ void receive(u32 rows, u32 first, Counts& counts) const {
        const u32 packets = rows * PIECES;
        u32 i = threadIdx.x;
        uint4 v;
        if (i < packets) v = ptx::load_whole(packet(i));
#pragma unroll 1
        while (i < packets) {
            const u32 next = i + THREADS;
            uint4 ahead;
            if (next < packets) ahead = ptx::load_whole(packet(next));
            while (!is_new(v)) v = ptx::load_whole(packet(i));
            const u32 step = i < first * PIECES ? 0x10001u : 1u;
            count(counts, v.x, step);
            count(counts, v.y, step);
            count(counts, v.z, step);
            count(counts, v.w, step);
            v = ahead;
            i = next;
        }
    }

    // After the barrier: thread t's experts 2t and 2t + 1.
    static __device__ __forceinline__ void read(Counts& counts, TwoCounts& total, TwoCounts& before) {
        total = before = {0, 0};
        if (threadIdx.x < E / 2) {
            const u32 a = *counts.at(2 * threadIdx.x), b = *counts.at(2 * threadIdx.x + 1);
            total = {a & 0xffffu, b & 0xffffu};
            before = {a >> 16, b >> 16};
        }
    }

private:
    static constexpr u32 kIds = 0x03ff03ffu;

    __device__ __forceinline__ u8* packet(u32 i) const {
        return workspace + PACKETS_AT + i * 16;
    }

    __device__ __forceinline__ u32 part(u32 from) const {
        const u32 bits = static_cast<u32>(number >> from);
        return (bits & 63) << 10 | (bits >> 6 & 63) << 26;
    }

    __device__ __forceinline__ bool is_new(const uint4& v) const {
        const u32 other = ((v.x ^ tag.x) & ~kIds) | ((v.y ^ tag.y) & ~kIds) | ((v.z ^ tag.z) & ~kIds) | ((v.w ^ tag.w) & ~kIds);
        return other == 0;
    }

    static __device__ __forceinline__ void count(Counts& counts, u32 two, u32 step) {
        atomicAdd(counts.at(two & 0x3ff), step);
        atomicAdd(counts.at(two >> 16 & 0x3ff), step);
    }
};

}  // namespace plan
