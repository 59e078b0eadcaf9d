// How an expert's rows are cut into tiles.
#pragma once
#include "common/types.cuh"

namespace gemm {

// Evenly into the fewest tiles of at most `most` rows.
struct EvenCut {
    u32 tiles, tile_rows;
    __device__ __forceinline__ EvenCut(u32 rows, u32 most) {
        const u32 fewest = ceil_div(rows, most);
        tile_rows = fewest > 1 ? round_up(ceil_div(rows, fewest), 8u) : rows;
        tiles = rows > 0 ? ceil_div(rows, tile_rows) : 0;
    }
};

}  // namespace gemm
