// Magnitude patterns of float32, which are ordered like the magnitudes.
#pragma once

#include "load.hpp"

namespace sm::SM_ISA {

constexpr uint32_t MAGNITUDE = 0x7FFFFFFF;
constexpr int LOW_BITS = 15;
constexpr uint32_t LOW_BINS = 1u << LOW_BITS;
constexpr int64_t HIGH_PLACES = 2 << 16;  // of a histogram by `high_place`

// Where a pattern is counted by its upper 16 bits; the order of places is that of magnitudes.
SM_INLINE uint32_t high_place(uint32_t bits) {
    uint32_t magnitude = bits & MAGNITUDE;
    return (magnitude >> LOW_BITS << 1) | ((magnitude & (LOW_BINS - 1)) != 0);
}

}  // namespace sm::SM_ISA
