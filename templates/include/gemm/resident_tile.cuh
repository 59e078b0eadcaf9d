// Sizes of a resident program: a row tile stays in shared memory for all of K, strips of weights stream past it. How shared
// memory is shared out depends on K, which a launch brings. Counts are elements unless the name says bytes.
#pragma once
#include "common/types.cuh"
#include "gemm/tile.cuh"

namespace gemm {

// Row tiles start on such a border, as the swizzle repeats there. So an item's header holds a tile's address and its rows in one
// word: address + rows.
constexpr u32 kTileAlignment = 1024;

// kGroups: math warpgroups, each with a strip of its own. kMaxRows: most token rows of a tile. kMaxK: largest K.
// kStoreWarps: warps that store what one math warpgroup has multiplied.
// kStreamWarps, kGatherWarps: the producer's warps, which stream weights, strip by strip in turn, and gather rows.
template <u32 kGroups, u32 kMaxRows, u32 kMaxK, u32 kStoreWarps, u32 kStreamWarps, u32 kGatherWarps>
struct ResidentTile {
    static constexpr u32 groups = kGroups, max_rows = kMaxRows, buffers = 2, slots = buffers + 1;
    static constexpr u32 max_blocks = kMaxK / kBlock;

    // Behind the math warps: warps that stream weights, that gather token rows, that store.
    static constexpr u32 math_warps = 4 * kGroups, math_threads = 32 * math_warps, first_producer = math_threads;
    static constexpr u32 stream_warps = kStreamWarps, gather_warps = kGatherWarps;
    static constexpr u32 producer_warps = kStreamWarps + kGatherWarps, producer_threads = 32 * producer_warps;
    static constexpr u32 store_warps = kStoreWarps, all_store_warps = kGroups * kStoreWarps;
    static constexpr u32 store_threads = 32 * round_up(all_store_warps, 4u);
    static constexpr u32 threads = first_producer + producer_threads + store_threads;

    // Registers a thread: what the launch reserves, and how the warpgroups share it out (in steps of 8).
    static constexpr u32 entry_registers = 65536 / threads / 8 * 8;
    static constexpr u32 producer_registers = kGroups == 4 ? 48 : 56;
    // Of a storing thread: what it needs besides, and the places of its rows, eight lanes a row (resident_store.cuh).
    static constexpr u32 store_registers = round_up((kGroups == 4 ? 30 : 36) + ceil_div(kMaxRows, 4 * kStoreWarps), 8u);
    static constexpr u32 math_registers = (threads * entry_registers - producer_threads * producer_registers -
                                           store_threads * store_registers) / math_threads / 8 * 8;

    // A slot: what the warps must know of an item. Header of 16 bytes, output rows, their factors.
    static constexpr u32 slot_ids = 16, slot_factors = slot_ids + 4 * kMaxRows;
    static constexpr u32 slot_bytes = slot_factors + 4 * kMaxRows;

    // A warpgroup's finished strip, transposed: a row of 64 outputs a token, 16 bytes of padding against bank conflicts.
    static constexpr u32 staging_pitch = kBlock * 2 + 16, staging_bytes = kMaxRows * staging_pitch;

    // Lists of runs: a plan with more of them is worked off in windows.
    static constexpr u32 runs = 512;

    static constexpr u32 max_stages = 16;
    static constexpr u32 full = 0, empty = full + 8 * max_stages;
    static constexpr u32 item_full = empty + 8 * max_stages, item_empty = item_full + 8 * slots;
    static constexpr u32 tokens_empty = item_empty + 8 * slots;
    static constexpr u32 staged_full = tokens_empty + 8 * buffers, staged_empty = staged_full + 8 * kGroups;
    static constexpr u32 run_slot = 512, run_rows = run_slot + 4 * runs;
    static constexpr u32 run_expert = run_rows + 4 * runs, run_tile = run_expert + 4 * runs;
    static constexpr u32 run_later = run_tile + 4 * runs, run_counts = run_later + 4 * runs;
    static constexpr u32 slot_base = run_counts + 4 * 16;
    static constexpr u32 staging = round_up(slot_base + slots * slot_bytes, 128u);
    static constexpr u32 tokens = round_up(staging + kGroups * staging_bytes, kTileAlignment);
    static constexpr u32 smem_bytes = 232448;  // all that a CTA may have: the ring takes what is left

    // At least so much is left for the ring, so that weights keep streaming; whole rounds of stages, max_stages at most, may fill less
    // of it. Its stages are a multiple of what follows: each stage then
    // belongs to one warpgroup and to one streaming warp. Were it not so, either could come to a stage whose round before is not
    // over, and a wait by parity would take that for the round after.
    static constexpr u32 min_ring_bytes = 54 * 1024;
    static constexpr u32 stage_multiple = kGroups * kStreamWarps / (kGroups % 2 == 0 && kStreamWarps == 2 ? 2 : 1);

    static_assert(kMaxRows % 16 == 0 && kMaxRows >= 64 && kMaxRows <= 192, "a tile holds up to 64, 80, ... 192 rows");
    static_assert(kMaxRows < kTileAlignment, "a tile's rows are told in the lower bits of its address");
    static_assert(kMaxK % kBlock == 0, "k comes in blocks");
    static_assert(producer_warps % 4 == 0, "the producer is warpgroups of its own, as registers are shared out to these");
    static_assert(store_registers <= entry_registers && producer_registers <= entry_registers, "helpers give registers away");
    static_assert(kStreamWarps == 1 || kStreamWarps == 2, "one warp streams, or two in turn");
    static_assert(staged_empty + 8 * kGroups <= run_slot, "barriers end before lists begin");
    static_assert(tokens + min_ring_bytes < smem_bytes, "no room for tokens");
};

// The widths that exist as code: every multiple of 8 up to 64 rows, then every multiple of 16.
__device__ __forceinline__ u32 resident_width(u32 rows) { return round_up(rows, rows <= 64 ? 8u : 16u); }
constexpr u32 next_resident_width(u32 width) { return width + (width < 64 ? 8 : 16); }

// How a launch's K shares out shared memory: row tiles first, the ring of strips behind them. Two tiles are held at once where both
// find room, one at each end.
template <class T>
struct ResidentLayout {
    u32 blocks;      // of 64 k
    u32 tile_rows;   // most rows of a tile
    u32 held_bytes;  // for the tiles
    u32 ring, stage_bytes, stages;

    __device__ __forceinline__ explicit ResidentLayout(u32 k_blocks) : blocks(k_blocks) {
        const u32 room = T::smem_bytes - T::tokens, row_bytes = blocks * kTokenRowBytes;
        stage_bytes = blocks * kBlockBytes;
        const u32 least = larger(T::min_ring_bytes, larger(T::stage_multiple, 4u) * stage_bytes);
        const u32 rows = (room - least) / row_bytes;
        tile_rows = smaller(rows > 64 ? rows / 16 * 16 : rows / 8 * 8, T::max_rows);
        held_bytes = smaller(rows / 8 * 8, 2 * T::max_rows) * row_bytes;
        ring = T::tokens + held_bytes;
        stages = smaller((T::smem_bytes - ring) / stage_bytes, T::max_stages) / T::stage_multiple * T::stage_multiple;
    }
};

}  // namespace gemm
