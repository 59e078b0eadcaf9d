// Sizes of one program and the map of its shared memory. Counts are elements unless the name says bytes.
#pragma once
#include "common/types.cuh"

namespace gemm {

// The packed weights: blocks of 64 outputs x 64 k, four strips of 64 outputs side by side (docs/notes/moe_w4a16.md).
constexpr u32 kBlock = 64;
constexpr u32 kBlockBytes = 2304;  // 2048 of codes, then 256 of bfloat16 scales
constexpr u32 kScaleBytes = 2048;  // where the scales start
constexpr u32 kStrips = 4;         // strips of a group
constexpr u32 kTokenRowBytes = 128;

// kMaxRows: most token rows of a tile. kStageBlocks: k64 blocks of a ring stage. kWindow: runs of rows looked at together.
// kSharedBytes: 0, or all that a program with several tiles takes: barriers and lists then lie at its end, for each of them.
// kItemStrips: strips of an item, all four of a group or one.
template <u32 kMaxRows, u32 kStageBlocks, u32 kStages, u32 kSlots, u32 kWindow, u32 kSharedBytes = 0, u32 kItemStrips = kStrips>
struct Tile {
    static constexpr u32 item_strips = kItemStrips;
    static constexpr bool chooses = kSharedBytes > 0;  // it is one of a program's several tiles
    static constexpr u32 max_rows = kMaxRows, stage_blocks = kStageBlocks, stages = kStages, slots = kSlots;
    static constexpr u32 window = kWindow;

    // One warpgroup a strip multiplies; of the producer's four warps one streams weights, three gather token rows.
    static constexpr u32 math_warps = 4 * kStrips, math_threads = 32 * math_warps;
    static constexpr u32 gather_warps = 3, producer_threads = 32 * (1 + gather_warps);
    static constexpr u32 first_producer = math_threads, threads = math_threads + producer_threads;

    // A stage: tokens as [k64][row][128 bytes, swizzled], then weights as [k64][strip][2304].
    static constexpr u32 token_block_bytes = kMaxRows * kTokenRowBytes;
    static constexpr u32 token_bytes = kStageBlocks * token_block_bytes;
    static constexpr u32 weight_bytes = kStageBlocks * kItemStrips * kBlockBytes;
    static constexpr u32 stage_bytes = token_bytes + weight_bytes;

    // A slot: what the math warps must know of an item. Header of 16 bytes, output rows, their factors; and the rows of x
    // for the gather warps.
    static constexpr u32 slot_ids = 16, slot_factors = slot_ids + 4 * kMaxRows, slot_sources = slot_factors + 4 * kMaxRows;
    static constexpr u32 slot_bytes = round_up(slot_sources + 4 * kMaxRows, 16u);

    // Transposed output: 16 token rows x 64 outputs a warpgroup, 16 bytes of padding against bank conflicts.
    static constexpr u32 staging_rows = 16, staging_pitch = kBlock * 2 + 16;
    static constexpr u32 staging_bytes = staging_rows * staging_pitch;

    // The barriers, as many as every tile of a program needs; then slots and staging memory, then lists.
    static constexpr u32 barrier_stages = kSharedBytes > 0 ? 4 : kStages;
    static constexpr u32 barrier_bytes = round_up(16 * (barrier_stages + kSlots), 16u);
    static constexpr u32 list_bytes = 4 * 4 * kWindow + 64;
    static constexpr u32 choice = kSharedBytes - 16;  // which of a program's tiles it is
    static constexpr u32 chosen = choice + 8;         // the barrier that says that it is known
    static constexpr u32 full = kSharedBytes > 0 ? choice - list_bytes - barrier_bytes : kStages * stage_bytes;
    static constexpr u32 empty = full + 8 * barrier_stages;
    static constexpr u32 item_full = empty + 8 * barrier_stages;
    static constexpr u32 item_empty = item_full + 8 * kSlots;
    static constexpr u32 slot_base = kStages * stage_bytes + (kSharedBytes > 0 ? 0 : barrier_bytes);
    static constexpr u32 staging = slot_base + kSlots * slot_bytes;
    static constexpr u32 staging_end = staging + kStrips * staging_bytes;
    static constexpr u32 lists = kSharedBytes > 0 ? choice - list_bytes : staging_end;

    // Runs of the window: first row slot, rows, expert, first tile; then 16 bytes for each of the producer's warps.
    static constexpr u32 run_slot = lists, run_rows = run_slot + 4 * kWindow, run_expert = run_rows + 4 * kWindow;
    static constexpr u32 run_tile = run_expert + 4 * kWindow, run_counts = run_tile + 4 * kWindow;
    static constexpr u32 smem_bytes = kSharedBytes > 0 ? kSharedBytes : lists + list_bytes;

    static_assert(kMaxRows % 8 == 0 && kMaxRows <= 128, "a tile holds 8, 16, ... 128 rows");
    static_assert(kStageBlocks == 1 || kStageBlocks == 2 || kStageBlocks == 4, "a stage holds 1, 2 or 4 k64 blocks");
    static_assert(kItemStrips == 1 || kItemStrips == kStrips, "an item is a group of strips or one strip");
    static_assert(kSharedBytes == 0 || full >= staging_end, "the tile must leave room for barriers and lists");
    static_assert(kStages <= barrier_stages, "every stage has its barriers");
    static_assert(kWindow % producer_threads == 0, "every producer thread looks at the same number of runs");
    static_assert((kWindow & (kWindow - 1)) == 0, "an item's run is found by halving");
    static_assert(stage_bytes % 1024 == 0, "the swizzle repeats every 1024 bytes, so stages must start on such a border");

    // The widths that exist as code: every multiple of 8.
    static constexpr u32 next_width(u32 width) { return width + 8; }
    static __device__ __forceinline__ u32 width_of(u32 rows) { return round_up(rows, 8u); }
};

// A position of a ring of mbarrier-guarded places, with the parity of its current round.
struct RingPosition {
    u32 index = 0, parity = 0;
    template <u32 kDepth>
    __device__ __forceinline__ void next() {
        if (++index == kDepth) {
            index = 0;
            parity ^= 1;
        }
    }
};

}  // namespace gemm
