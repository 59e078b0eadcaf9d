// How the CTAs that share a batch of few rows get all rows' words (see row_words.cuh): through the shared memory of one
// cluster, or, for a grid without one, through L2. A warp that plans gets word w of every row in lane w.
#pragma once
#include "common/types.cuh"
#include "fused_router/rapid_select.cuh"
#include "fused_router/row_words.cuh"
#include "plan/row_packets.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"

namespace fused_router {

// One cluster: a store to each CTA that counts on its mbarrier.
template <i32 SPANS, i32 ROWS, i32 CLUSTER>
struct ClusterExchange {
    static constexpr u32 SELECTORS = SPANS / 4;
    static_assert(CLUSTER > 1 && CLUSTER <= kWarp, "a lane sends to one CTA");

    struct Shared {
        u64 arrived;  // mbarrier: all rows' words are here
        u64 unused;
        uint4 words[ROWS][SELECTORS];
    };

    u32 words;    // shared address of all rows' words
    u32 arrived;  // of the mbarrier
    u32 rows;

    static __device__ __forceinline__ u32 cta() {
        return ptx::cluster_rank();
    }

    // By all threads: the mbarrier, and the news to the cluster that it is there.
    __device__ __forceinline__ ClusterExchange(Shared& shared, u8*, u32 num_rows, u32, u32)
        : words(ptx::shared_address(shared.words)), arrived(ptx::shared_address(&shared.arrived)), rows(num_rows) {
        if (threadIdx.x == 0) {
            ptx::mbarrier_init(arrived, 1);
            ptx::mbarrier_init_fence();
        }
        __syncwarp();
        ptx::cluster_arrive_relaxed();  // the mbarrier's fence is all that it must order
        if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(arrived, rows * SELECTORS * 16);
    }

    // By all threads. Nothing is sent before all CTAs have opened. The wait is over long before the logits are here.
    static __device__ __forceinline__ void meet() {
        ptx::cluster_wait_acquire();
    }

    // By warps that know the row's winners, `local` each lane's local id or kNotLocal: a selector sends its 4 words.
    __device__ __forceinline__ void send(u32 row, u32 warp, u32 lane, const Settled&, u32 local, bool live) const {
        if (live && warp >= SELECTORS) return;
        const u32 at = local - warp * 128;
        const u32 bit = 1u << (at % 32);
        u32 four[4];
#pragma unroll
        for (u32 w = 0; w < 4; ++w) four[w] = ptx::warp_or(at / 32 == w ? bit : 0u);
        const u32 to = words + (row * SELECTORS + warp) * 16;
        if (live && lane < CLUSTER)
            ptx::store_async(ptx::map_shared(to, lane), ptx::map_shared(arrived, lane), make_uint4(four[0], four[1], four[2], four[3]));
    }

    // Waits for all rows and gets the lane's word of each, 0 where there is none; all are in `words` then. In a rehearsal (not
    // `live`) nothing is there.
    __device__ __forceinline__ void receive(u32 (&row)[ROWS], bool live, u32 lane) const {
        if (live) ptx::mbarrier_wait_cluster(arrived, 0);
        const u32 own = words + (lane < SPANS ? lane : 0) * 4;
        const u32 mask = live && lane < SPANS ? 0xffffffffu : 0;
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) row[r] = ptx::load_shared(own + r * SPANS * 4);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) row[r] &= r < rows ? mask : 0;  // what lies beyond is anything
    }
};

// A co-resident grid of ROWS CTAs, one row each: winners cross in packets (plan/row_packets.cuh), and a warp that plans makes
// the words from them for itself.
template <i32 SPANS, i32 ROWS, i32 K>
struct DeviceExchange {
    using Packets = plan::RowPackets<SPANS * 32, K, ROWS>;
    static constexpr u32 PLACES = 4;  // for the words of up to 3 warps that plan, and of the one that rehearses it

    struct Shared {
        uint4 words[PLACES][ROWS * SPANS / 4];
        uint4 ids[K / 8];
    };

    u32 words;  // shared address of all rows' words
    u32 ids;
    u32 rows;
    Packets packets;

    static __device__ __forceinline__ u32 cta() {
        return blockIdx.x;
    }

    // By all threads. `place`: below PLACES, of a warp that may call receive(); one for all others.
    __device__ __forceinline__ DeviceExchange(Shared& shared, u8* workspace, u32 num_rows, u32 place, u32 lane)
        : words(ptx::shared_address(shared.words[place % PLACES])), ids(ptx::shared_address(shared.ids)), rows(num_rows),
          packets(workspace) {
        if (threadIdx.x < kWarp && blockIdx.x < rows) packets.prefetch(blockIdx.x, blockIdx.x + 1, lane);
        if (place < PLACES) {
#pragma unroll
            for (u32 i = 0; i < SPANS / 4 * ROWS; i += kWarp) ptx::store_shared_v4(words + (i + lane) * 16, make_uint4(0, 0, 0, 0));
        }
        __syncthreads();  // all have read the number
        if (threadIdx.x == 0) packets.keep();
        packets.make_tag();
    }

    // Nobody has to be waited for: this only tells the compiler that the warp is converged.
    static __device__ __forceinline__ void meet() {
        __syncwarp();
    }

    // By warps that know the row's winners, `local` each lane's local id or kNotLocal; one of them sends.
    __device__ __forceinline__ void send(u32 row, u32 warp, u32 lane, const Settled& mine, u32 local, bool live) const {
        if (live && warp != 0) return;
        ptx::store_shared_u16_if(mine.wins, ids + mine.slot * 2, smaller(local, Packets::kNowhere));
        __syncwarp();
        if (live) packets.send(row, ids, lane);
    }

    __device__ __forceinline__ void receive(u32 (&row)[ROWS], bool live, u32 lane) const {
#pragma unroll
        for (u32 i = 0; i < ROWS * Packets::PIECES; i += kWarp) {
            const uint4 v = packets.fetch(i + lane, live && i + lane < rows * Packets::PIECES);
            const u32 own = words + (i + lane) / Packets::PIECES * (SPANS * 4);
            set(own, v.x, live);
            set(own, v.y, live);
            set(own, v.z, live);
            set(own, v.w, live);
        }
        __syncwarp();
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) row[r] = ptx::load_shared(words + (r * SPANS + (lane < SPANS ? lane : 0)) * 4);
#pragma unroll
        for (u32 r = 0; r < ROWS; ++r) row[r] = lane < SPANS ? row[r] : 0;
    }

private:
    // Sets the bits of a packet's two ids.
    static __device__ __forceinline__ void set(u32 row, u32 two, bool live) {
        const u32 a = two & 0x3ff, b = two >> 16 & 0x3ff;
        ptx::or_shared_if(live && a < SPANS * 32, row + a / 32 * 4, 1u << a % 32);
        ptx::or_shared_if(live && b < SPANS * 32, row + b / 32 * 4, 1u << b % 32);
    }
};

template <i32 SPANS, i32 ROWS, i32 K, i32 CTAS, bool CLUSTER>
struct ExchangeOf {
    using type = ClusterExchange<SPANS, ROWS, CTAS>;
};
template <i32 SPANS, i32 ROWS, i32 K, i32 CTAS>
struct ExchangeOf<SPANS, ROWS, K, CTAS, false> {
    static_assert(ROWS == CTAS, "one row a CTA");
    using type = DeviceExchange<SPANS, ROWS, K>;
};

}  // namespace fused_router
