// Steps of weighted sums that other loops share.
#pragma once

#include "load.hpp"

namespace sm::SM_ISA {

// total += values · factor, each product and each sum rounded.
void add_scaled(float *total, int64_t count, const float *values, float factor);
// τ / divisor · factor, in place.
void scale(float *out, int64_t count, float divisor, float factor);

}  // namespace sm::SM_ISA
