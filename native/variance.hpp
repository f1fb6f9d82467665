// The variance of a coordinate over the members, exact to the last bit.
#pragma once

#include "thinning.hpp"

namespace sm::SM_ISA {

// Rows of float32, `stride` from one to the next.
struct Rows {
    float *values;
    int64_t count, stride;
    SM_INLINE float *operator[](int64_t d) const { return values + d * stride; }
};

// The variances of coordinates, computed in float64 and rounded once; a NaN has no sign.
void variance(const Rows &, int64_t count, float *out);
// The variances between two patterns; 0 for those below, and infinity for those above.
void variance_within(const Rows &, int64_t count, int64_t from, int64_t to, float *out);
// Zero the coordinates whose variance lies below a cut; as `trim`. `spread` is room.
void keep_varying(const Rows &, int64_t count, Cut &, float *spread);

}  // namespace sm::SM_ISA
