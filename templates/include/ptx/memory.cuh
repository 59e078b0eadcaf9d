// Loads, stores and copies that C++ cannot spell: cache hints, memory order, distributed shared memory, bulk prefetch.
#pragma once
#include "common/types.cuh"

namespace ptx {

// 32-bit address of shared memory, as the instructions of this folder take it.
__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

// Adds to shared memory and returns the old value, lane by lane: the compiler may not merge the lanes first.
__device__ __forceinline__ u32 shared_fetch_add(u32 address, u32 value) {
    u32 old;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(address), "r"(value) : "memory");
    return old;
}

// Address, in the cluster's window, of the same shared location in CTA `rank`.
__device__ __forceinline__ u32 map_shared(u32 address, u32 rank) {
    u32 remote;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
    return remote;
}

// Stores to a CTA of the cluster that add their bytes to its mbarrier `bar` (both addresses by map_shared).
__device__ __forceinline__ void store_async(u32 address, u32 bar, u32 value) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address),
                 "r"(value), "r"(bar)
                 : "memory");
}

__device__ __forceinline__ void store_async(u32 address, u32 bar, u64 value) {
    asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(address),
                 "l"(value), "r"(bar)
                 : "memory");
}

__device__ __forceinline__ void store_async(u32 address, u32 bar, uint4 value) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(address),
        "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(bar)
        : "memory");
}

// Read-only global loads. "once": the line is not kept in L1. volatile, so that they stay where they are written.
__device__ __forceinline__ uint4 load_once_v4(const void* pointer) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer));
    return v;
}

__device__ __forceinline__ uint2 load_once_v2(const void* pointer) {
    uint2 v;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer));
    return v;
}

__device__ __forceinline__ uint4 load_readonly_v4(const void* pointer) {
    uint4 v;
    asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(pointer));
    return v;
}

__device__ __forceinline__ uint2 load_readonly_v2(const void* pointer) {
    uint2 v;
    asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(pointer));
    return v;
}

// Device-scope order, for joins of a grid through global memory.
__device__ __forceinline__ u32 load_acquire(const u32* pointer) {
    u32 value;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

__device__ __forceinline__ u32 fetch_add_acq_rel(u32* pointer, u32 value) {
    u32 old;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
    return old;
}

// A load that must see other CTAs' data: it bypasses L1.
__device__ __forceinline__ u32 load_l2(const void* pointer) {
    u32 value;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(value) : "l"(pointer) : "memory");
    return value;
}

// 16 bytes at once, whole or not at all, as seen by all of the device: they carry their own news.
__device__ __forceinline__ void store_whole(void* pointer, uint4 v) {
    asm volatile(
        "{\n\t.reg .b128 v;\n\t.reg .b64 low, high;\n\t"
        "mov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\tmov.b128 v, {low, high};\n\t"
        "st.relaxed.gpu.global.b128 [%0], v;\n\t}" ::"l"(pointer),
        "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
        : "memory");
}

__device__ __forceinline__ uint4 load_whole(const void* pointer) {
    uint4 v;
    asm volatile(
        "{\n\t.reg .b128 v;\n\t.reg .b64 low, high;\n\t"
        "ld.relaxed.gpu.global.b128 v, [%4];\n\tmov.b128 {low, high}, v;\n\t"
        "mov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(pointer)
        : "memory");
    return v;
}

// Asks for the 32-byte sector at an address to be brought into L2.
__device__ __forceinline__ void prefetch_sector_l2(const void* pointer) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

// 16 bytes from global to shared memory without passing registers.
__device__ __forceinline__ void copy_async_16(u32 destination, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(destination), "l"(source) : "memory");
}

__device__ __forceinline__ void copy_async_wait_all() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace ptx
