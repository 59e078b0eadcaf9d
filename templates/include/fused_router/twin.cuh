// Up to 32 rows in one cluster of 16 CTAs: a CTA selects two rows at once, each with the 5 warps of lean_select.cuh. One warp
// sends the row's local ids to all CTAs, 16 bytes a store, another one writes the row's weights and ids. Every CTA makes of all
// ids a mask of rows for each expert, and from the masks the plan.
#pragma once
#include "common/types.cuh"
#include "fused_router/few_rows.cuh"
#include "fused_router/lean_select.cuh"
#include "ptx/math.cuh"
#include "ptx/memory.cuh"
#include "ptx/shared.cuh"
#include "ptx/special.cuh"
#include "ptx/sync.cuh"
#include "ptx/words.cuh"

namespace fused_router {

template <i32 E, i32 K, typename Logit_, i32 BLOCK_M>
struct Twin {
    using Logit = Logit_;
    using Selection = LeanSelect<E, K, Logit>;
    using State = typename Selection::State;
    static constexpr i32 CLUSTER = 16;
    static constexpr i32 ROWS = 2 * CLUSTER;
    static constexpr u32 WARPS = Selection::WARPS;
    static constexpr u32 PLANNERS = 2 * WARPS;  // the rows' warps with experts; behind them come the two others
    static constexpr i32 THREADS = 2 * Selection::ROW_THREADS;
    static constexpr u32 PLAN_THREADS = PLANNERS * kWarp;
    static constexpr u32 SENDER = 0, WRITER = 1;  // rankers
    static constexpr u32 PIECES = K / 8;          // 16-byte parts of a row's ids
    static constexpr u32 CHUNKS = E / 128;        // of experts; a warp counts one
    static constexpr u32 SHARE = E / CLUSTER;     // of the experts, about which a CTA writes
    static constexpr u32 kRowBarrier = 1, kPlanBarrier = 3;
    static constexpr u32 TOTALS_WARP = 3;
    static constexpr i32 LEVELS = ceil_div(ROWS, BLOCK_M > 0 ? BLOCK_M : 8);  // most blocks of an expert
    static_assert(CHUNKS < PLANNERS && SHARE <= 2 * kWarp && CLUSTER * PIECES <= kWarp, "experts and sends must fit the warps");

    struct alignas(16) Shared {
        u64 arrived;  // mbarrier: all rows' ids are here
        u64 unused;
        uint4 ids[ROWS][PIECES];  // 16 bits each
        u32 rows[E];              // of an expert: bit r if row r chose it
        u32 blocks[E];            // of the lower experts of the chunk
        u32 totals[8];            // blocks of each chunk
        typename Selection::Scratch row[2];
    };

    // A warp's place, and shared addresses.
    struct Here {
        u32 s;     // scratch of the row
        u32 warp;  // of the CTA
        u32 lane;
        u32 group;   // which of the CTA's rows
        u32 of_row;  // warp of the row
        u32 row;
        u32 cta;
        u32 arrived;
        u32 ids;
        u32 rows;
        u32 blocks;
        u32 totals;
    };

    static __device__ __forceinline__ void run(const FewArguments& a, Shared& shared) {
        const bool holds = threadIdx.x < PLAN_THREADS;
        Here h;
        h.cta = ptx::cluster_rank();
        h.row = h.cta + CLUSTER * (threadIdx.x / (WARPS * kWarp));
        const auto* logits = static_cast<const Logit*>(a.logits) + static_cast<u64>(h.row) * E;
        State state;
        if (holds && h.row < a.num_tokens) state.row = Selection::load(logits, a.bias, threadIdx.x % (WARPS * kWarp));
        h.warp = __shfl_sync(kFullWarp, threadIdx.x / kWarp, 0);  // tells the compiler that all lanes agree
        h.lane = threadIdx.x % kWarp;
        const bool plans = h.warp < PLANNERS;
        h.group = plans ? h.warp / WARPS : h.warp - PLANNERS;
        h.of_row = plans ? h.warp % WARPS : WARPS;
        h.row = h.cta + CLUSTER * h.group;
        h.s = shared.row[0].address() + h.group * sizeof(typename Selection::Scratch);
        h.arrived = ptx::shared_address(&shared.arrived);
        h.ids = ptx::shared_address(shared.ids);
        h.rows = ptx::shared_address(shared.rows);
        h.blocks = ptx::shared_address(shared.blocks);
        h.totals = ptx::shared_address(shared.totals);
        open(a, h);
        const bool has_row = h.row < a.num_tokens;
        const u32 ranker = !plans ? WRITER : h.warp == sender(h.group) ? SENDER : Selection::RANKERS;
        u32 local = kNotLocal;
        if (has_row) {
            if (plans) Selection::bound(h.s, h.of_row, h.lane, state);
            ptx::barrier_sync_aligned(kRowBarrier + h.group, Selection::ROW_THREADS);
            Selection::pick(h.s, kRowBarrier + h.group, logits, a.bias, h.of_row, h.lane, state);
            if (ranker < Selection::RANKERS) {
                Selection::rank(h.s, ranker, h.lane, state);
                if (ranker == SENDER) {
                    local = local_expert(a, state.mine);
                    send(h, state, local);
                }
                Selection::settle(h.s, ranker, h.lane, state);
                if (ranker == WRITER) write_row(a, h, state.mine);
            }
        }
        if (!plans) return;
        ptx::mbarrier_wait_cluster(h.arrived, 0);
        receive(a, h);
        ptx::barrier_sync_aligned(kPlanBarrier, PLAN_THREADS);
        if (h.warp < CHUNKS) count(a, h);
        ptx::barrier_sync_aligned(kPlanBarrier, PLAN_THREADS);
        if (ranker == SENDER && has_row) {
            write_pairs(a, h, state.mine, local);
        } else if (h.warp < 2) {
            write_experts(a, h);
        } else if (h.warp == TOTALS_WARP && h.cta == 0) {
            write_totals(a, h);
        }
    }

private:
    // Two warps that sit on different quarters of the multiprocessor, and on others than the two warps that write the rows.
    static __device__ __forceinline__ u32 sender(u32 group) {
        return group == 0 ? 2 : 7;
    }

    // The mbarrier, and the news to the cluster that it is there; empty masks. Nothing is sent before all CTAs have opened;
    // that wait is over long before the logits are here.
    static __device__ __forceinline__ void open(const FewArguments& a, const Here& h) {
        if (threadIdx.x == 0) {
            ptx::mbarrier_init(h.arrived, 1);
            ptx::mbarrier_init_fence();
        }
        __syncwarp();
        ptx::cluster_arrive_relaxed();  // the mbarrier's fence is all that it must order
        if (threadIdx.x == 0) ptx::mbarrier_arrive_expect(h.arrived, a.num_tokens * K * 2);
        ptx::store_shared_if(threadIdx.x < E / 4, h.rows + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
        if (a.expert_map != nullptr && h.warp == PLANNERS) ptx::touch<E>(a.expert_map, h.lane);
        ptx::barrier_sync_aligned(kPlanBarrier, THREADS);
        ptx::cluster_wait_acquire();
    }

    static __device__ __forceinline__ u32 block_m(const FewArguments& a) {
        return BLOCK_M > 0 ? BLOCK_M : a.block_m;
    }

    // The row's local ids, in any order, to all CTAs.
    static __device__ __forceinline__ void send(const Here& h, const State& state, u32 local) {
        const u32 at = Selection::locals(h.s, SENDER);
        ptx::store_shared_u16_if(state.mine.wins, at + state.place * 2, local);
        __syncwarp();
        const u32 piece = h.lane % PIECES;
        const u32 cta = h.lane / PIECES % CLUSTER;
        const uint4 v = ptx::load_shared_v4(at + piece * 16);
        const u32 to = h.ids + (h.row * PIECES + piece) * 16;
        if (h.lane < CLUSTER * PIECES) ptx::store_async(ptx::map_shared(to, cta), ptx::map_shared(h.arrived, cta), v);
    }

    static __device__ __forceinline__ void write_row(const FewArguments& a, const Here& h, const Settled& mine) {
        write_winner<K>(a, h.row, mine, Selection::weight(h.s, WRITER, mine, a.renormalize, a.factor));
    }

    // Two ids a thread become bits of the masks.
    static __device__ __forceinline__ void receive(const FewArguments& a, const Here& h) {
        constexpr u32 kThreads = K / 2;  // of a row
        const u32 thread = h.warp * kWarp + h.lane;
        const u32 row = thread / kThreads;
        const u32 two = row < a.num_tokens ? ptx::load_shared(h.ids + thread * 4) : 0xffffffffu;
        const u32 low = two & 0xffffu, high = two >> 16;
        ptx::or_shared_if(low != kNotLocal, h.rows + low * 4, 1u << row % 32);
        ptx::or_shared_if(high != kNotLocal, h.rows + high * 4, 1u << row % 32);
    }

    static __device__ __forceinline__ u32 blocks_of(u32 count, u32 bm) {
        if constexpr (BLOCK_M > 0) return (count + BLOCK_M - 1) / BLOCK_M;
        u32 blocks = 0;
#pragma unroll
        for (u32 i = 0; i < LEVELS; ++i) blocks += count > i * bm;
        return blocks;
    }

    // Blocks of the lower experts of a warp's chunk, for each of its experts.
    static __device__ __forceinline__ void count(const FewArguments& a, const Here& h) {
        const u32 bm = block_m(a), below = ptx::lanes_below();
        u32 counts[4], before[4];
        u32 sum = 0;
        bool more = false;
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
            const u32 rows = ptx::load_shared(h.rows + (h.warp * 128 + c * kWarp + h.lane) * 4);
            counts[c] = __popc(rows);
            const u32 used = __ballot_sync(kFullWarp, rows != 0);
            before[c] = sum + __popc(used & below);
            sum += __popc(used);
            more = more || counts[c] > bm;
        }
        if (__any_sync(kFullWarp, more)) {
            sum = 0;
#pragma unroll
            for (u32 c = 0; c < 4; ++c) {
                const u32 blocks = blocks_of(counts[c], bm);
                const u32 upto = ptx::warp_prefix_sum(blocks);
                before[c] = sum + upto - blocks;
                sum += __shfl_sync(kFullWarp, upto, kWarp - 1);
            }
        }
#pragma unroll
        for (u32 c = 0; c < 4; ++c) ptx::store_shared(h.blocks + (h.warp * 128 + c * kWarp + h.lane) * 4, before[c]);
        ptx::store_shared_if(h.lane == 0, h.totals + h.warp * 4, sum);
    }

    // Blocks of the chunks before one.
    static __device__ __forceinline__ u32 blocks_before(const Here& h, u32 chunk) {
        u32 before = 0;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i += 4) {
            const uint4 v = ptx::load_shared_v4(h.totals + i * 4);
            before += i < chunk ? v.x : 0;
            if (i + 1 < CHUNKS) before += i + 1 < chunk ? v.y : 0;
            if (i + 2 < CHUNKS) before += i + 2 < chunk ? v.z : 0;
            if (i + 3 < CHUNKS) before += i + 3 < chunk ? v.w : 0;
        }
        return before;
    }

    // What is known about one expert.
    struct Expert {
        u32 rows;
        u32 first_block;
    };

    static __device__ __forceinline__ Expert expert(const Here& h, u32 e) {
        return {ptx::load_shared(h.rows + e * 4), ptx::load_shared(h.blocks + e * 4) + blocks_before(h, e / 128)};
    }

    static __device__ __forceinline__ void write_pairs(const FewArguments& a, const Here& h, const Settled& mine, u32 local) {
        const bool placed = mine.wins && local != kNotLocal;
        const Expert e = expert(h, placed ? local : 0);
        const u32 rank = __popc(e.rows & ((1u << h.row % 32) - 1));
        if (placed) a.plan.sorted_token_ids[e.first_block * block_m(a) + rank] = static_cast<i32>(h.row * K + mine.slot);
    }

    // Counts, offsets, block ids and padding of the CTA's share of the experts.
    static __device__ __forceinline__ void write_experts(const FewArguments& a, const Here& h) {
        const u32 of_share = h.warp * kWarp + h.lane;
        const u32 id = h.cta * SHARE + of_share;
        if (of_share >= SHARE || id >= static_cast<u32>(a.num_local_experts)) return;
        const u32 bm = block_m(a);
        const Expert e = expert(h, id);
        const u32 count = __popc(e.rows), blocks = blocks_of(count, bm);
        a.plan.expert_offsets[id] = e.first_block * bm;
        a.plan.expert_counts[id] = count;
        a.plan.expert_scatter_offsets[id] = count;
#pragma unroll
        for (u32 i = 0; i < LEVELS; ++i)
            if (i < blocks) a.plan.expert_ids[e.first_block + i] = id;
        if (count != 0) pad<K, BLOCK_M>(a, e.first_block * bm + count, (e.first_block + blocks) * bm);
    }

    static __device__ __forceinline__ void write_totals(const FewArguments& a, const Here& h) {
        const i32 slots = blocks_before(h, CHUNKS) * block_m(a);
        if (h.lane != 0) return;
        a.plan.expert_offsets[a.num_local_experts] = slots;
        a.plan.num_tokens_post_padded[0] = slots;
    }
};

}  // namespace fused_router
