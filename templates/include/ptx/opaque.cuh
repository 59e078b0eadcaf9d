// Values of which the compiler knows nothing.
#pragma once
#include "common/types.cuh"

namespace ptx {

// The same value: what follows from it is worked out where it is needed, and not kept in registers.
__device__ __forceinline__ u32 opaque(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

}  // namespace ptx
