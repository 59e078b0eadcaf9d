// Fixed-width types and launch-independent helpers. No toolkit header is used anywhere, so they are spelled here once.
#pragma once

using i32 = int;
using i64 = long long;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using f32 = float;

static_assert(sizeof(i32) == 4 && sizeof(i64) == 8 && sizeof(u16) == 2, "unexpected integer widths");

// Storage of a bfloat16: its value is the float whose upper half it is.
struct bf16 {
    u16 bits;
};

constexpr u32 kFullWarp = 0xffffffffu;
constexpr i32 kWarp = 32;  // lanes

template <typename T>
constexpr T ceil_div(T a, T b) {
    return (a + b - 1) / b;
}

template <typename T>
constexpr T round_up(T a, T b) {
    return ceil_div(a, b) * b;
}

template <typename T>
constexpr T smaller(T a, T b) {
    return a < b ? a : b;
}

template <typename T>
constexpr T larger(T a, T b) {
    return a > b ? a : b;
}
