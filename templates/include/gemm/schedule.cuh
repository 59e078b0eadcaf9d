// Items of work: (row tile, group of 256 outputs), handed round the CTAs of a persistent grid. No host knows how many.
#pragma once
#include "common/types.cuh"
#include "gemm/rows.cuh"
#include "gemm/sort.cuh"
#include "gemm/tile.cuh"

namespace gemm {

struct Item {
    u32 expert;
    u32 slot, rows;  // row slots [slot, slot + rows)
    u32 width;       // rows as the tensor cores see them
    u32 group;       // of 256 outputs
    u32 strip, strips;
    bool only;       // its run has no other tile
};

// One copy in each producer warp: all follow the same sequence. Items are numbered tile by tile, outputs fastest, so that
// neighbouring CTAs share an expert's token rows, wide tiles before narrow ones. They are handed round to and fro: CTA b
// takes b, then 2 grid - 1 - b, then 2 grid + b, ..., so that a round's wider items and the next one's narrower ones meet.
// Which CTA computes a tile changes no bit of it. When the last round would leave most CTAs idle, its items are cut into
// halves or quarters by strips. (Items of one strip are not cut.)
template <class T>
class Schedule {
public:
    __device__ __forceinline__ Schedule(u32 shared, u32 strips)
        : shared_(shared), strips_(strips), groups_(ceil_div(strips, T::item_strips)), place_(blockIdx.x),
          step_(2 * (gridDim.x - blockIdx.x) - 1) {}

    // The next item of this CTA in the window at hand; false when there is none.
    __device__ __forceinline__ bool next(Item& item) {
        if (place_ < whole_) {
            fill(item, place_, 0, T::item_strips);
            place_ += step_;
            step_ = 2 * gridDim.x - step_;
            return true;
        }
        if (T::item_strips == 1 || parts_ == 1) return false;
        const u32 index = whole_ + blockIdx.x / parts_, each = kStrips / parts_;
        if (index < items_) fill(item, index, blockIdx.x % parts_ * each, each);
        parts_ = 1;
        return index < items_ && item.strips > 0;
    }

    // Another window is to be opened.
    __device__ __forceinline__ void leave_window() {
        place_ -= items_;
        before_ = (before_ + items_) % gridDim.x;
    }

    // Works out the items of a window whose runs are in the lists and added up. By all producer threads.
    __device__ __forceinline__ void open_window(const Window& window) {
        window_ = window;
        if (window.tiles > 0) {
            items_ = whole_ = window.tiles * groups_;
        } else {
            if (window.widest > kSortedRows) sort_runs<T>(shared_, window_.runs);
            items_ = whole_ = number_tiles() * groups_;
        }
        parts_ = 1;
        const u32 rest = (before_ + items_) % gridDim.x;  // items of the last, incomplete round
        if (T::item_strips > 1 && window_.last && rest > 0 && rest <= items_ && rest * 2 <= gridDim.x) {
            parts_ = rest * kStrips <= gridDim.x ? kStrips : 2;
            whole_ = items_ - rest;
        }
    }

private:
    // Writes the first tile of every run; returns the number of tiles.
    __device__ __forceinline__ u32 number_tiles() const {
        constexpr u32 kEach = T::window / T::producer_threads;
        const u32 thread = threadIdx.x - T::first_producer, lane = thread % 32, warp = thread / 32;
        u32 tiles[kEach], sum = 0;
#pragma unroll
        for (u32 j = 0; j < kEach; ++j) {
            const u32 run = thread * kEach + j;
            tiles[j] = run < window_.runs ? RowCut<T>(ptx::load_shared(shared_ + T::run_rows + 4 * run)).tiles : 0;
            sum += tiles[j];
        }
        u32 upto = sum;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 other = __shfl_up_sync(kFullWarp, upto, step);
            upto += lane >= step ? other : 0;
        }
        if (lane == 31) ptx::store_shared(shared_ + T::run_counts + 4 * warp, upto);
        ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
        u32 tile = upto - sum, total = 0;
#pragma unroll
        for (u32 w = 0; w < T::producer_threads / 32; ++w) {
            const u32 count = ptx::load_shared(shared_ + T::run_counts + 4 * w);
            tile += w < warp ? count : 0;
            total += count;
        }
#pragma unroll
        for (u32 j = 0; j < kEach; ++j) {
            const u32 run = thread * kEach + j;
            if (run < window_.runs) ptx::store_shared(shared_ + T::run_tile + 4 * run, tile);
            tile += tiles[j];
        }
        ptx::barrier_sync_aligned(kProducerBarrier, T::producer_threads);
        return total;
    }

    __device__ __forceinline__ void fill(Item& item, u32 place, u32 strip, u32 strips) const {
        const u32 tile = place / groups_;
        u32 run = 0;  // the last run whose first tile is not beyond `tile`: runs without rows are stepped over
#pragma unroll
        for (u32 step = T::window / 2; step > 0; step /= 2) {
            const u32 other = run + step;
            if (other < window_.runs && ptx::load_shared(shared_ + T::run_tile + 4 * other) <= tile) run = other;
        }
        const u32 rows = ptx::load_shared(shared_ + T::run_rows + 4 * run);
        const u32 first = (tile - ptx::load_shared(shared_ + T::run_tile + 4 * run)) * RowCut<T>(rows).tile_rows;
        item.expert = ptx::load_shared(shared_ + T::run_expert + 4 * run);
        item.slot = ptx::load_shared(shared_ + T::run_slot + 4 * run) + first;
        item.rows = smaller(rows - first, RowCut<T>(rows).tile_rows);
        item.width = T::width_of(item.rows);
        item.only = item.rows == rows;
        item.group = place - tile * groups_;
        if constexpr (T::item_strips == 1) {
            strip = item.group % kStrips;
            item.group /= kStrips;
        }
        const u32 exist = smaller(strips_ - item.group * kStrips, kStrips);
        item.strip = strip;
        item.strips = strip < exist ? smaller(exist - strip, strips) : 0;
    }

    u32 shared_, strips_, groups_;  // groups_: items of a row tile
    u32 place_;       // of this CTA's next item, from the window's first one
    u32 step_;        // from there to the one after it
    u32 before_ = 0;  // items of earlier windows, modulo the grid
    u32 items_, whole_, parts_;
    Window window_;
};

}  // namespace gemm
