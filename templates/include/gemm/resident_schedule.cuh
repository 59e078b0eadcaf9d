// Work of a resident program: the strips of all row tiles in one line, cut into as many pieces of equal cost as there are CTAs.
// A CTA keeps a row tile while it walks along it, so it loads few of them.
#pragma once
#include "common/types.cuh"
#include "gemm/cut.cuh"
#include "gemm/resident_tile.cuh"
#include "gemm/rows.cuh"
#include "ptx/math.cuh"
#include "ptx/special.cuh"

namespace gemm {

// Strips [strip, strip + strips) of the rows in row slots [slot, slot + rows).
struct Part {
    u32 expert;
    u32 slot, rows;
    u32 width;  // rows as the tensor cores see them
    u32 strip, strips;
};

struct CostedCut : EvenCut {
    using EvenCut::EvenCut;
    // Of a strip, in units of one row's share: a k16 step of 64 outputs takes about 30 clocks and 0.42 for each row.
    __device__ __forceinline__ u32 cost() const { return 72 + resident_width(tile_rows); }
};

// Experts of 8 blocks from `block` on, kNoRow for those that are none. `limit`: blocks that count.
__device__ __forceinline__ void load_owners(u32 (&owner)[8], const IndexedRows& rows, u32 block, u32 limit) {
    const bool aligned = (reinterpret_cast<u64>(rows.expert_ids + block) & 15) == 0;
    if (aligned && block + 8 <= rows.num_blocks) {
#pragma unroll
        for (u32 j = 0; j < 8; j += 4) {
            const uint4 four = ptx::load_readonly_v4(rows.expert_ids + block + j);
            owner[j] = four.x, owner[j + 1] = four.y, owner[j + 2] = four.z, owner[j + 3] = four.w;
        }
    } else {
#pragma unroll
        for (u32 j = 0; j < 8; ++j) owner[j] = static_cast<u32>(rows.expert(block + j));
    }
#pragma unroll
    for (u32 j = 0; j < 8; ++j) owner[j] = block + j < limit && owner[j] < rows.num_experts ? owner[j] : kNoRow;
}

// Finds the runs from block `first` on: consecutive blocks of one expert, 8 blocks a thread at a time. By all producer threads.
// run_slot then holds a run's first block, run_tile the block after its last. A window ends where the lists are full.
template <class T>
__device__ __forceinline__ Window find_runs(const IndexedRows& rows, u32 shared, u32 first) {
    constexpr u32 kEach = 8, kChunk = kEach * T::producer_threads, kWarps = T::producer_threads / 32;
    const u32 thread = ptx::thread_id() - T::first_producer, warp = thread / 32, lane = thread % 32;
    // What is read next is asked for before the number of blocks is known.
    if (first + thread * kEach < rows.num_blocks) ptx::prefetch_line(rows.expert_ids + first + thread * kEach);
#pragma unroll
    for (u32 j = 0; j < 8; ++j) {
        const u32 line = first * rows.block_m + (j * T::producer_threads + thread) * 32;  // of 32 slots
        if (line < rows.num_slots) ptx::prefetch_line(rows.sorted_ids + line);
    }
    u32 owner[kEach];
    const u32 blocks = rows.blocks();
    u32 runs = 0, at = first, side = 0;
    bool room = true;
    while (room && at < blocks) {
        const u32 mine = at + thread * kEach;
        load_owners(owner, rows, mine, blocks);
        u32 before = mine > first ? static_cast<u32>(rows.expert(mine - 1)) : kNoRow;
        before = before < rows.num_experts ? before : kNoRow;
        u32 end = smaller(blocks, at + kChunk), starts, found, upto;
        while (true) {  // once more with fewer blocks when their runs would not fit
            starts = 0;
#pragma unroll
            for (u32 j = 0; j < kEach; ++j) {
                const u32 previous = j > 0 ? owner[j - 1] : before;
                starts |= mine + j < end && owner[j] != kNoRow && owner[j] != previous ? 1u << j : 0u;
            }
            upto = ptx::warp_prefix_sum(static_cast<u32>(__popc(starts)));
            const u32 counts = shared + T::run_counts + 4 * side;
            if (lane == 31) ptx::store_shared(counts + 4 * warp, upto);
            ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
            found = 0;
            upto += runs;
#pragma unroll
            for (u32 w = 0; w < kWarps; ++w) {
                const u32 count = ptx::load_shared(counts + 4 * w);
                upto += w < warp ? count : 0;
                found += count;
            }
            side = kWarps - side;  // the other place: a slower warp may still read this one
            if (runs + found <= T::runs) break;
            end = at + T::runs - runs;
            room = false;
        }
        u32 run = upto - __popc(starts);  // of the next start
#pragma unroll
        for (u32 j = 0; j < kEach; ++j) {
            const u32 previous = j > 0 ? owner[j - 1] : before;
            if (mine + j < end && owner[j] != previous) {
                if (previous != kNoRow) ptx::store_shared(shared + T::run_tile + 4 * (run - 1), mine + j);
                if (owner[j] != kNoRow) {
                    ptx::store_shared(shared + T::run_slot + 4 * run, mine + j);
                    ptx::store_shared(shared + T::run_expert + 4 * run, owner[j]);
                    ptx::store_shared(shared + T::run_rows + 4 * run, 0);
                    ++run;
                }
            }
        }
        runs += found;
        at = end;
    }
    if (thread == 0 && runs > 0 && static_cast<u32>(rows.expert(at - 1)) < rows.num_experts) {
        ptx::store_shared(shared + T::run_tile + 4 * (runs - 1), at);  // the last run goes on to the window's end
    }
    ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
    fill_rows<T>(rows, shared, runs);
    return {runs, at, at >= blocks};
}

// One copy in each producer warp: all follow the same sequence. Tiles stand in line by their position, a sum of costs: first the
// first halves of all experts' tiles, then the second halves, so that two CTAs read an expert's weights at the same time.
// Which CTA computes what changes no bit of it.
template <class T>
class ResidentSchedule {
public:
    __device__ __forceinline__ ResidentSchedule(u32 shared, u32 strips, u32 most_rows)
        : shared_(shared), strips_(strips), most_rows_(most_rows) {}

    // Cuts a window whose runs are in the lists. By all producer warps together.
    __device__ __forceinline__ void open_window(const Window& window) {
        window_ = window;
        add_up();
        u32 place, strip;  // odd lanes work out the end
        cut(blockIdx.x + ptx::thread_id() % 2, place, strip);
        place_ = __shfl_sync(kFullWarp, place, 0), strip_ = __shfl_sync(kFullWarp, strip, 0);
        end_ = __shfl_sync(kFullWarp, place, 1), end_strip_ = __shfl_sync(kFullWarp, strip, 1);
    }

    // The next part of this CTA in the window; false when there is none.
    __device__ __forceinline__ bool next(Part& part) {
        const bool whole = place_ < end_;
        if (!whole && (place_ > end_ || strip_ >= end_strip_)) return false;
        part.strip = strip_;
        part.strips = (whole ? strips_ : end_strip_) - strip_;
        place_ += fill(part, place_);
        strip_ = 0;
        return true;
    }

private:
    // Writes every run's position, of its first half to run_tile, of its second to run_later.
    __device__ __forceinline__ void add_up() {
        constexpr u32 kWarps = T::producer_threads / 32;
        const u32 thread = ptx::thread_id() - T::first_producer, lane = thread % 32, warp = thread / 32;
        const u32 each = ceil_div(window_.runs, T::producer_threads);
        const u32 first = thread * each, last = smaller(first + each, window_.runs);
        u32 sum = 0, later = 0;
        for (u32 run = first; run < last; ++run) {
            const CostedCut tiles(ptx::load_shared(shared_ + T::run_rows + 4 * run), most_rows_);
            sum += ceil_div(tiles.tiles, 2u) * tiles.cost();
            later += tiles.tiles / 2 * tiles.cost();
        }
        const u32 upto = ptx::warp_prefix_sum(sum), later_upto = ptx::warp_prefix_sum(later);
        if (lane == 31) {
            ptx::store_shared(shared_ + T::run_counts + 4 * warp, upto);
            ptx::store_shared(shared_ + T::run_counts + 4 * (kWarps + warp), later_upto);
        }
        ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
        u32 position = upto - sum, later_position = later_upto - later;
        half_ = total_ = 0;
#pragma unroll
        for (u32 w = 0; w < kWarps; ++w) {
            const u32 count = ptx::load_shared(shared_ + T::run_counts + 4 * w);
            const u32 later_count = ptx::load_shared(shared_ + T::run_counts + 4 * (kWarps + w));
            position += w < warp ? count : 0;
            later_position += w < warp ? later_count : 0;
            half_ += count;
            total_ += later_count;
        }
        later_position += half_;
        total_ += half_;
        for (u32 run = first; run < last; ++run) {
            const CostedCut tiles(ptx::load_shared(shared_ + T::run_rows + 4 * run), most_rows_);
            ptx::store_shared(shared_ + T::run_tile + 4 * run, position);
            ptx::store_shared(shared_ + T::run_later + 4 * run, later_position);
            position += ceil_div(tiles.tiles, 2u) * tiles.cost();
            later_position += tiles.tiles / 2 * tiles.cost();
        }
        ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
    }

    __device__ __forceinline__ u32 list_of(u32 place) const { return shared_ + (place < half_ ? T::run_tile : T::run_later); }

    // The run at a place: the last one that does not begin beyond it, so runs without tiles are stepped over.
    __device__ __forceinline__ u32 run_at(u32 list, u32 place) const {
        u32 run = 0;
#pragma unroll
        for (u32 step = T::runs / 2; step > 0; step /= 2) {
            const u32 other = run + step;
            if (other < window_.runs && ptx::load_shared(list + 4 * other) <= place) run = other;
        }
        return run;
    }

    // Where the piece of a CTA begins: the position of a tile, and a strip of it.
    __device__ __forceinline__ void cut(u32 cta, u32& place, u32& strip) const {
        place = total_;
        strip = 0;
        if (cta >= gridDim.x || total_ == 0) return;
        const u64 all = u64{total_} * strips_;
        u64 along;
        u32 whole;
        if (all >> 32 == 0) {  // by divisions of 32 bits, as those of 64 take 1 us
            const u32 each = u32(all) / gridDim.x, rest = u32(all) % gridDim.x;
            along = each * cta + rest * cta / gridDim.x;
            whole = u32(along) / strips_;
        } else {
            along = all * cta / gridDim.x;
            whole = static_cast<u32>(along / strips_);
        }
        const u32 list = list_of(whole), run = run_at(list, whole);
        const u32 begin = ptx::load_shared(list + 4 * run);
        const u32 cost = CostedCut(ptx::load_shared(shared_ + T::run_rows + 4 * run), most_rows_).cost();
        const u32 tile = (whole - begin) / cost;
        place = begin + tile * cost;
        strip = static_cast<u32>(along - u64{place} * strips_) / cost;
    }

    // All of the part but its strips; returns the tile's cost.
    __device__ __forceinline__ u32 fill(Part& part, u32 place) const {
        const u32 list = list_of(place), run = run_at(list, place);
        const u32 rows = ptx::load_shared(shared_ + T::run_rows + 4 * run);
        const CostedCut tiles(rows, most_rows_);
        const u32 first_half = place < half_ ? 0 : ceil_div(tiles.tiles, 2u);
        const u32 first = ((place - ptx::load_shared(list + 4 * run)) / tiles.cost() + first_half) * tiles.tile_rows;
        part.expert = ptx::load_shared(shared_ + T::run_expert + 4 * run);
        part.slot = ptx::load_shared(shared_ + T::run_slot + 4 * run) + first;
        part.rows = smaller(rows - first, tiles.tile_rows);
        part.width = resident_width(part.rows);
        return tiles.cost();
    }

    u32 shared_, strips_, most_rows_;
    u32 place_, strip_, end_, end_strip_;  // of this CTA: where it is and where it ends
    u32 half_, total_;                     // position of the second halves, and behind them
    Window window_;
};

}  // namespace gemm
