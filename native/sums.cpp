// Weighted sums of stored rows: what many merges come down to.
//
// The same float32 operations in the same order as the loops of merge.cpp that thin and combine,
// but a stored value is widened, multiplied and added in one loop, and no row of it is kept.
#include "sums.hpp"

#include "families.hpp"

namespace sm::SM_ISA {

void add_scaled(float *SM_RESTRICT total, int64_t count, const float *SM_RESTRICT values, float factor) {
    for (int64_t i = 0; i < count; i++) total[i] += values[i] * factor;
}

void scale(float *out, int64_t count, float divisor, float factor) {
    if (divisor == 1 && factor == 1) return;
    for (int64_t i = 0; i < count; i++) out[i] = out[i] / divisor * factor;
}

namespace {

// Three rows of a strip: the sum, the reference, and room for one more.
struct Strips {
    float *total, *base, *row;
    int64_t begin, count;
};

void begin_sum(float *SM_RESTRICT total, int64_t count, const float *SM_RESTRICT row, float weight) {
    for (int64_t i = 0; i < count; i++) total[i] = row[i] * weight;
}

// Add w · v to the total, or begin it so.
void add(const Reader &in, int64_t d, const Strips &at, float weight, bool first) {
    if (in.types[d] == BF16) {
        const uint16_t *SM_RESTRICT raw = values_at<uint16_t>(in.at[d], at.begin);
        float *SM_RESTRICT total = at.total;
        if (first)
            for (int64_t i = 0; i < at.count; i++) total[i] = of_bf16(raw[i]) * weight;
        else
            for (int64_t i = 0; i < at.count; i++) total[i] += of_bf16(raw[i]) * weight;
        return;
    }
    take(in.at[d], in.types[d], at.begin, at.count, at.row);
    first ? begin_sum(at.total, at.count, at.row, weight) : add_scaled(at.total, at.count, at.row, weight);
}

// As `add`, with w · (v − θ_ref).
void add_vector(const Reader &in, int64_t d, const Strips &at, float weight, bool first) {
    if (in.types[d] == BF16) {
        const uint16_t *SM_RESTRICT raw = values_at<uint16_t>(in.at[d], at.begin);
        const float *SM_RESTRICT base = at.base;
        float *SM_RESTRICT total = at.total;
        if (first)
            for (int64_t i = 0; i < at.count; i++) total[i] = (of_bf16(raw[i]) - base[i]) * weight;
        else
            for (int64_t i = 0; i < at.count; i++) total[i] += (of_bf16(raw[i]) - base[i]) * weight;
        return;
    }
    take_less(in.at[d], in.types[d], at.begin, at.count, at.base, at.row);
    first ? begin_sum(at.total, at.count, at.row, weight) : add_scaled(at.total, at.count, at.row, weight);
}

Merged weighted_rows(const float *weights, int64_t experts, bool vectors, const float *after,
                     int64_t steps, const Source *members, int64_t count, int64_t size,
                     const Source &target) {
    Scratch scratch;
    Reader in(scratch, members, count, size);
    Sink out(scratch, target, size);
    Strips at = {scratch.floats(STRIP), scratch.floats(STRIP), scratch.floats(STRIP), 0, 0};
    bool fine = true, stored = true;
    for (at.begin = 0; at.begin < size; at.begin += STRIP) {
        at.count = least(STRIP, size - at.begin);
        in.need(at.begin, at.begin + at.count);
        if (vectors) take(in.at[experts], in.types[experts], at.begin, at.count, at.base);
        for (int64_t d = 0; d < experts; d++)
            vectors ? add_vector(in, d, at, weights[d], d == 0) : add(in, d, at, weights[d], d == 0);
        for (int64_t step = 0; step < steps; step++) {
            const float *row = after + 3 * step;
            scale(at.total, at.count, row[0], row[1]);
            if (row[2] != 0 && vectors)
                add_scaled(at.total, at.count, at.base, row[2]);
            else if (row[2] != 0)
                add(in, experts, at, row[2], false);
        }
        if (!save(at.total, at.count, out.at, out.type, at.begin)) {
            // A sum with a term that is not finite is not: all others need not be looked at.
            stored = false;
            for (int64_t d = 0; d < count; d++)
                fine = load(in.at[d], in.types[d], at.begin, at.count, at.row) && fine;
            if (target.descriptor != MEMORY) break;
        }
        out.drain(at.begin + at.count);
    }
    return {fine, stored, out.checksum};
}

bool load_rows(const Source *members, int64_t count, const Source *reference, int64_t size, float *rows) {
    Scratch scratch;
    Reader in(scratch, members, count, size), base(scratch, reference, reference ? 1 : 0, size);
    float *less = scratch.floats(STRIP);
    bool fine = true;
    for (int64_t begin = 0; begin < size; begin += STRIP) {
        int64_t some = least(STRIP, size - begin);
        in.need(begin, begin + some);
        base.need(begin, begin + some);
        if (reference) fine = load(base.at[0], base.types[0], begin, some, less) && fine;
        for (int64_t d = 0; d < count; d++) {
            float *row = rows + d * size + begin;
            fine = (reference ? load_less(in.at[d], in.types[d], begin, some, less, row)
                              : load(in.at[d], in.types[d], begin, some, row)) && fine;
        }
    }
    return fine;
}

}  // namespace

extern const Sums sums;
const Sums sums = {weighted_rows, add_scaled, scale, load_rows};

}  // namespace sm::SM_ISA
