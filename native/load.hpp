// Values of strips in float32, for files that are compiled once per instruction set.
//
// No standard template and no inline function stands outside of the namespace SM_ISA here: the
// linker keeps one copy of such, which would be of any instruction set.
#pragma once

#include "core.hpp"

#define SM_RESTRICT __restrict

namespace sm::SM_ISA {

SM_INLINE float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
SM_INLINE uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
SM_INLINE float of_bf16(uint16_t raw) { return as_float(static_cast<uint32_t>(raw) << 16); }
SM_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// a · b + c where a · b is exact, so that one rounding is as good as two.
SM_INLINE double exact_fma(double a, double b, double c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fma(a, b, c);
#else
    return a * b + c;
#endif
}

template <class T>
SM_INLINE const T *values_at(uint64_t at, int64_t begin) {
    return reinterpret_cast<const T *>(at + static_cast<uint64_t>(begin) * sizeof(T));
}

// Defined in convert.cpp of the same instruction set. All return whether every value is finite;
// `save` whether every stored one is.
bool load(uint64_t at, int64_t type, int64_t begin, int64_t count, float *out);
bool load_less(uint64_t at, int64_t type, int64_t begin, int64_t count, const float *less, float *out);
// As load_less, with zeros where the magnitude's pattern does not reach `from`.
bool load_less_from(uint64_t at, int64_t type, int64_t begin, int64_t count, const float *less,
                    int32_t from, float *out);
// Minus the reference; `room` is for its values.
bool load_difference(uint64_t at, int64_t type, uint64_t reference, int64_t reference_type,
                     int64_t begin, int64_t count, float *room, float *out);
bool save(const float *values, int64_t count, uint64_t at, int64_t type, int64_t begin);
// As load and load_less, where what follows shows whether all values are finite.
void take(uint64_t at, int64_t type, int64_t begin, int64_t count, float *out);
void take_less(uint64_t at, int64_t type, int64_t begin, int64_t count, const float *less, float *out);

// Defined in philox.cpp: random uint32 for the indices start, start + 1, … of a key.
void fill(uint32_t k0, uint32_t k1, int64_t start, int64_t count, uint32_t *out);

}  // namespace sm::SM_ISA
