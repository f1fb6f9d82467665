// Stored numbers to float32 and back, with a check for what is not finite on the way.
#include "families.hpp"
#include "load.hpp"

namespace sm::SM_ISA {

namespace {

constexpr uint32_t MAGNITUDE = 0x7FFFFFFF;

// The largest magnitude of 16-bit patterns: in a loop of its own, which takes twice as many at a
// time as one that widens.
uint16_t largest(const uint16_t *raw, int64_t count) {
    uint16_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint16_t magnitude = raw[i] & 0x7FFF;
        most = magnitude > most ? magnitude : most;
    }
    return most;
}

bool finite_f32(const float *values, int64_t count) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = static_cast<int32_t>(bits_of(values[i]) & MAGNITUDE);
        most = magnitude > most ? magnitude : most;
    }
    return most < 0x7F800000;
}

void widen_bf16(const uint16_t *SM_RESTRICT raw, int64_t count, float *SM_RESTRICT out) {
    for (int64_t i = 0; i < count; i++) out[i] = of_bf16(raw[i]);
}

void widen_f16(const uint16_t *SM_RESTRICT raw, int64_t count, float *SM_RESTRICT out) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = raw[i] & 0x7FFF, sign = static_cast<uint32_t>(raw[i] & 0x8000) << 16;
        uint32_t shifted = magnitude << 13;
        // Below 2^-14 a number has no leading one: give it one, then take that away again.
        uint32_t small = bits_of(as_float(shifted + 0x38800000) - 0x1p-14f);
        uint32_t normal = 0u - (magnitude < 0x7C00), tiny = 0u - (magnitude < 0x0400);
        uint32_t wide = (normal & (shifted + 0x38000000)) | (~normal & (shifted | 0x7F800000));
        wide = (tiny & small) | (~tiny & wide);
        out[i] = as_float(wide | sign);
    }
}

bool copy_f32(const float *SM_RESTRICT values, int64_t count, float *SM_RESTRICT out) {
    for (int64_t i = 0; i < count; i++) out[i] = values[i];
    return finite_f32(values, count);
}

bool narrow_bf16(const float *SM_RESTRICT values, int64_t count, uint16_t *SM_RESTRICT out) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]);
        out[i] = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
        int32_t magnitude = static_cast<int32_t>(bits & MAGNITUDE);
        most = magnitude > most ? magnitude : most;
    }
    // From here on rounding carries a number to infinity, and a NaN even past the sign.
    return most < 0x7F7F8000;
}

bool narrow_f16(const float *SM_RESTRICT values, int64_t count, uint16_t *SM_RESTRICT out) {
    int32_t most = 0;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(values[i]), magnitude = bits & MAGNITUDE, sign = (bits >> 16) & 0x8000;
        // From 2^-14 on: rebias the exponent and round away 13 bits, ties to the even one.
        uint32_t rounded = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
        // Below: adding a half makes the float32 unit round at the last place of float16.
        uint32_t small = bits_of(as_float(magnitude) + 0.5f) - 0x3F000000;
        uint32_t not_tiny = 0u - (magnitude >= 0x38800000), huge = 0u - (magnitude >= 0x47800000);
        uint32_t nan = 0u - (magnitude > 0x7F800000);
        uint32_t above = 0u - (rounded > 0x7C00);
        uint32_t large = (above & 0x7C00) | (~above & rounded);
        uint32_t code = (not_tiny & large) | (~not_tiny & small);
        code = (huge & 0x7C00) | (~huge & code);
        code = (nan & (0x7E00 | ((magnitude >> 13) & 0x3FF))) | (~nan & code);
        out[i] = static_cast<uint16_t>(code | sign);
        most = static_cast<int32_t>(code) > most ? static_cast<int32_t>(code) : most;
    }
    return most < 0x7C00;
}

bool widen(int64_t type, const void *raw, int64_t count, float *out) {
    return load(reinterpret_cast<uint64_t>(raw), type, 0, count, out);
}

bool narrow(int64_t type, const float *values, int64_t count, void *out) {
    return save(values, count, reinterpret_cast<uint64_t>(out), type, 0);
}

bool finite(int64_t type, const void *raw, int64_t count) {
    if (type == F32) return finite_f32(static_cast<const float *>(raw), count);
    return largest(static_cast<const uint16_t *>(raw), count) < (type == BF16 ? 0x7F80 : 0x7C00);
}

}  // namespace

bool load(uint64_t at, int64_t type, int64_t begin, int64_t count, float *out) {
    if (type == F32) return copy_f32(values_at<float>(at, begin), count, out);
    const uint16_t *raw = values_at<uint16_t>(at, begin);
    take(at, type, begin, count, out);
    return largest(raw, count) < (type == BF16 ? 0x7F80 : 0x7C00);
}

void take(uint64_t at, int64_t type, int64_t begin, int64_t count, float *out) {
    if (type == BF16)
        widen_bf16(values_at<uint16_t>(at, begin), count, out);
    else if (type == F16)
        widen_f16(values_at<uint16_t>(at, begin), count, out);
    else
        __builtin_memcpy(out, values_at<float>(at, begin), static_cast<size_t>(count) * 4);
}

void take_less(uint64_t at, int64_t type, int64_t begin, int64_t count, const float *less, float *out) {
    const float *SM_RESTRICT minus = less;
    float *SM_RESTRICT to = out;
    if (type == BF16) {
        const uint16_t *SM_RESTRICT raw = values_at<uint16_t>(at, begin);
        for (int64_t i = 0; i < count; i++) to[i] = of_bf16(raw[i]) - minus[i];
    } else if (type == F32) {
        const float *SM_RESTRICT values = values_at<float>(at, begin);
        for (int64_t i = 0; i < count; i++) to[i] = values[i] - minus[i];
    } else {
        take(at, type, begin, count, out);
        for (int64_t i = 0; i < count; i++) to[i] -= minus[i];
    }
}

bool load_less(uint64_t at, int64_t type, int64_t begin, int64_t count, const float *less, float *out) {
    take_less(at, type, begin, count, less, out);
    return finite(type, values_at<uint8_t>(at, begin * width_of(type)), count);
}

bool load_less_from(uint64_t at, int64_t type, int64_t begin, int64_t count, const float *less,
                    int32_t from, float *out) {
    if (type != BF16) {
        bool fine = load_less(at, type, begin, count, less, out);
        for (int64_t i = 0; i < count; i++) {
            uint32_t bits = bits_of(out[i]);
            out[i] = as_float(bits & (0u - (static_cast<int32_t>(bits & MAGNITUDE) >= from)));
        }
        return fine;
    }
    const uint16_t *SM_RESTRICT raw = values_at<uint16_t>(at, begin);
    const float *SM_RESTRICT minus = less;
    float *SM_RESTRICT to = out;
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits = bits_of(of_bf16(raw[i]) - minus[i]);
        to[i] = as_float(bits & (0u - (static_cast<int32_t>(bits & MAGNITUDE) >= from)));
    }
    return largest(raw, count) < 0x7F80;
}

bool load_difference(uint64_t at, int64_t type, uint64_t reference, int64_t reference_type,
                     int64_t begin, int64_t count, float *room, float *out) {
    if (type == BF16 && reference_type == BF16) {
        const uint16_t *SM_RESTRICT minuend = values_at<uint16_t>(at, begin);
        const uint16_t *SM_RESTRICT subtrahend = values_at<uint16_t>(reference, begin);
        float *SM_RESTRICT to = out;
        for (int64_t i = 0; i < count; i++) to[i] = of_bf16(minuend[i]) - of_bf16(subtrahend[i]);
        return largest(minuend, count) < 0x7F80 && largest(subtrahend, count) < 0x7F80;
    }
    bool fine = load(reference, reference_type, begin, count, room);
    return load_less(at, type, begin, count, room, out) && fine;
}

bool save(const float *values, int64_t count, uint64_t at, int64_t type, int64_t begin) {
    void *place = const_cast<uint8_t *>(values_at<uint8_t>(at, begin * width_of(type)));
    if (type == BF16) return narrow_bf16(values, count, static_cast<uint16_t *>(place));
    if (type == F16) return narrow_f16(values, count, static_cast<uint16_t *>(place));
    return copy_f32(values, count, static_cast<float *>(place));
}

extern const Convert convert;
const Convert convert = {widen, narrow, finite};

}  // namespace sm::SM_ISA
