// Counting, where C++ takes an instruction more.
#pragma once
#include "common/types.cuh"

namespace ptx {

// Adds 1 if a < b. In floating point the additions have a pipe of their own beside the comparisons.
__device__ __forceinline__ void count_if_less(f32& count, u32 a, u32 b) {
    asm("{\n\t.reg .pred p;\n\tsetp.lt.u32 p, %1, %2;\n\t@p add.f32 %0, %0, 0f3F800000;\n\t}"
        : "+f"(count)
        : "r"(a), "r"(b));
}

}  // namespace ptx
