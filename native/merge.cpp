// The arithmetic of the dense operators in float32, expert by expert in order: core/merge.py says
// what a formula is. Loops over coordinates choose by masks, since a branch does not run in vectors.
#include "sums.hpp"
#include "variance.hpp"

#include "families.hpp"

namespace sm::SM_ISA {

namespace {

SM_INLINE uint32_t mask(bool holds) { return 0u - holds; }
SM_INLINE float chosen(uint32_t mask, float value) { return as_float(bits_of(value) & mask); }
SM_INLINE float either(uint32_t mask, float value, float other) {
    return as_float((bits_of(value) & mask) | (bits_of(other) & ~mask));
}

// What a thinning needs beside the formula, for one chunk.
class Thinning {
  public:
    Thinning(Scratch &scratch, const Formula &formula, int64_t strip) : formula_(formula) {
        cuts = copy(scratch, formula.cuts, formula.thin == TRIM || formula.thin == BAND ? formula.experts : 1,
                    formula.thin == TRIM || formula.thin == BAND || formula.thin == SELECT);
        outliers_ = copy(scratch, formula.outliers, formula.experts, formula.thin == BAND);
        if (formula.thin == DROP || formula.thin == RANK) drawn_ = scratch.words(strip);
        if (formula.thin == PRUNE) {
            taken_ = static_cast<uint8_t *>(scratch.bytes(strip));
            scores_ = scratch.words(formula.groups[1]);
        }
    }
    // Zero what an expert loses before the combination; `cut` if what lies below its cut is zero.
    // The row starts at flat index `place` of the tensor and is strip `number` of the chunk.
    void thin(Ranks *ranks, int64_t expert, float *row, int64_t count, int64_t place, int64_t number, bool cut) {
        const int64_t *draws = formula_.draws + 3 * expert;
        Key key = {static_cast<uint32_t>(draws[0]), static_cast<uint32_t>(draws[1])};
        switch (formula_.thin) {
        case TRIM:
        case BAND:
            if (cut)
                keep_ties(row, count, cuts[expert]);
            else if (cuts[expert].threshold != ALL)
                trim(row, count, cuts[expert]);
            if (formula_.thin == BAND) clear_top(row, count, outliers_[expert]);
            break;
        case RANK:
            if (draws[2] > 0) {
                const double *odds = formula_.odds + 2 * expert;
                ranks->prune(row, count, key, place, odds[0], odds[1]);
                break;
            }
            [[fallthrough]];
        case DROP:
            if (draws[2] != ALL) drop(row, count, key, place, draws[2], drawn_);
            break;
        case PRUNE:
            if (expert == 0) __builtin_memset(taken_, 0, static_cast<size_t>(count));
            prune_groups(row, count, {formula_.groups[0], formula_.groups[1], formula_.groups[2] != 0},
                         taken_, scores_);
            break;
        case MARKED:
            keep_marked(row, count, formula_.marks + (number * formula_.experts + expert) * formula_.marked);
            break;
        }
    }
    Cut *cuts;  // a copy, which counts how many ties are left

  private:
    static Cut *copy(Scratch &scratch, const int64_t *table, int64_t rows, bool wanted) {
        if (!wanted) return nullptr;
        Cut *made = static_cast<Cut *>(scratch.bytes(rows * 16));
        __builtin_memcpy(made, table, static_cast<size_t>(rows) * 16);
        return made;
    }
    const Formula &formula_;
    Cut *outliers_;
    uint32_t *drawn_ = nullptr, *scores_ = nullptr;
    uint8_t *taken_ = nullptr;
};

// What only RANK needs, whose counts take megabytes.
Ranks *ranks_of(Scratch &scratch, const Formula &formula, int64_t strip, void *room) {
    if (formula.thin != RANK) return nullptr;
    Axis axis = {formula.axis[0], formula.axis[1], formula.axis[2] != 0};
    return new (room) Ranks(scratch, axis, strip);
}

void rescale(float *row, int64_t count, float factor, float divisor) {
    if (factor != 1)
        for (int64_t i = 0; i < count; i++) row[i] *= factor;
    if (divisor != 1)
        for (int64_t i = 0; i < count; i++) row[i] /= divisor;
}

// Σ_d w_d v_d.
void weighted_sum(const Rows &rows, const float *weights, int64_t count, float *out) {
    const float *SM_RESTRICT first = rows[0];
    float *SM_RESTRICT total = out;
    for (int64_t i = 0; i < count; i++) total[i] = first[i] * weights[0];
    for (int64_t d = 1; d < rows.count; d++) add_scaled(out, count, rows[d], weights[d]);
}

// The sums whose signs are elected; the sign of a zero does not matter.
void elect(const Rows &rows, const float *weights, bool weighted, int64_t count, float *SM_RESTRICT sums) {
    if (weighted) {
        weighted_sum(rows, weights, count, sums);
        return;
    }
    const float *SM_RESTRICT first = rows[0];
    for (int64_t i = 0; i < count; i++) sums[i] = first[i];
    for (int64_t d = 1; d < rows.count; d++) {
        const float *SM_RESTRICT row = rows[d];
        for (int64_t i = 0; i < count; i++) sums[i] += row[i];
    }
}

SM_INLINE float mean(float total, float share) { return total / either(mask(share != 0), share, 1.0f); }

// A sign per coordinate, then the sum or the mean of the weighted entries that agree. A sum of zero
// elects `cancelled`, 1 or −1; a sum that is not a number elects nothing; zeros never agree.
void disjoint(const Rows &rows, const Formula &formula, int64_t count, float *out, float *room, float *more) {
    elect(rows, formula.weights, formula.weighted, count, room);
    float *SM_RESTRICT total = out, *SM_RESTRICT sign = room, *SM_RESTRICT share = more;
    float zero = formula.cancelled;
    for (int64_t d = 0; d < rows.count; d++) {
        const float *SM_RESTRICT row = rows[d];
        float weight = formula.weights[d];
        if (d == 0)
            for (int64_t i = 0; i < count; i++) {
                float elected = either(mask(sign[i] * zero >= 0), zero, -zero);
                sign[i] = chosen(mask(sign[i] == sign[i]), elected);
                float entry = row[i] * weight;
                uint32_t agrees = mask(entry * sign[i] > 0);
                total[i] = chosen(agrees, entry);
                share[i] = chosen(agrees, weight);
            }
        else if (formula.normalize && d == rows.count - 1)
            // One loop, since others add while a division runs.
            for (int64_t i = 0; i < count; i++) {
                float entry = row[i] * weight;
                uint32_t agrees = mask(entry * sign[i] > 0);
                total[i] = mean(total[i] + chosen(agrees, entry), share[i] + chosen(agrees, weight));
            }
        else
            for (int64_t i = 0; i < count; i++) {
                float entry = row[i] * weight;
                uint32_t agrees = mask(entry * sign[i] > 0);
                total[i] += chosen(agrees, entry);
                share[i] += chosen(agrees, weight);
            }
    }
    if (formula.normalize && rows.count == 1)
        for (int64_t i = 0; i < count; i++) total[i] = mean(total[i], share[i]);
}

// One claimant: its weighted entry. Several: the mean of those that agree with their sum.
void merge_overlaps(const Rows &rows, const float *weights, int64_t count, float *out, float *room, float *more) {
    weighted_sum(rows, weights, count, room);
    const float *SM_RESTRICT total = room;
    float *SM_RESTRICT agreeing = out, *SM_RESTRICT number = more;
    for (int64_t i = 0; i < count; i++) agreeing[i] = number[i] = 0;
    for (int64_t d = 0; d < rows.count; d++) {
        const float *SM_RESTRICT row = rows[d];
        for (int64_t i = 0; i < count; i++) {
            float entry = row[i] * weights[d];
            uint32_t above = mask(entry > 0) & mask(total[i] >= 0), below = mask(entry < 0) & mask(total[i] < 0);
            agreeing[i] += chosen(above | below, entry);
            number[i] += chosen(above | below, 1.0f);
        }
    }
    for (int64_t i = 0; i < count; i++) agreeing[i] = mean(agreeing[i], number[i]);
}

// The weighted mean of the entries whose sign is that of their plain sum; a sum of 0 is +.
void agreeing_mean(const Rows &rows, const float *weights, int64_t count, float *out, float *room, float *more) {
    elect(rows, weights, false, count, room);
    float *SM_RESTRICT total = out, *SM_RESTRICT sign = room, *SM_RESTRICT share = more;
    for (int64_t i = 0; i < count; i++) {
        sign[i] = either(mask(sign[i] >= 0), 1.0f, -1.0f);
        total[i] = share[i] = 0;
    }
    for (int64_t d = 0; d < rows.count; d++) {
        const float *SM_RESTRICT row = rows[d];
        for (int64_t i = 0; i < count; i++) {
            uint32_t agrees = mask(row[i] * sign[i] > 0);
            total[i] += chosen(agrees, row[i] * weights[d]);
            share[i] += chosen(agrees, weights[d]);
        }
    }
    for (int64_t i = 0; i < count; i++) total[i] /= either(mask(share[i] > 1e-6f), share[i], 1e-6f);
}

// How many more coordinates elect + than −.
int64_t lead_of_plus(const float *SM_RESTRICT sums, int64_t count) {
    int32_t lead = 0;
    for (int64_t i = 0; i < count; i++) lead += (sums[i] > 0) - (sums[i] < 0);
    return lead;
}

// Entry i goes to lane (shift + i) mod LANES: a fixed order of addition that runs in vectors.
void add_magnitudes(const float *SM_RESTRICT row, int64_t count, double *SM_RESTRICT lanes, int64_t shift) {
    int64_t begin = 0;
    if (shift == 0)
        for (; begin + LANES <= count; begin += LANES)
            for (int64_t i = 0; i < LANES; i++)
                lanes[i] += static_cast<double>(__builtin_fabsf(row[begin + i]));
    for (; begin < count; begin++)
        lanes[(shift + begin) % LANES] += static_cast<double>(__builtin_fabsf(row[begin]));
}

double total_of(const double *lanes) {
    double total = 0;
    for (int64_t i = 0; i < LANES; i++) total += lanes[i];
    return total;
}

Merged merge(const Formula &formula, const Source *members, int64_t count, int64_t start, int64_t size,
             int64_t tile, int64_t strip, const Source &target, double &number_made) {
    Scratch scratch;
    bool is_norm = target.type == NORM, is_number = is_norm || target.type == LEAD, fine = true, stored = true;
    bool cuts = formula.vectors && (formula.thin == TRIM || formula.thin == BAND);
    int64_t experts = formula.experts, stride = (strip + 15) / 16 * 16, number = -1;
    Reader in(scratch, members, count, size, strip);
    const Source nowhere = {F32, MEMORY, 0};
    Sink out(scratch, is_number ? nowhere : target, size, strip);
    Rows rows = {scratch.floats(experts * stride), experts, stride};
    float *here = scratch.floats(stride), *base = scratch.floats(stride);
    float *room = scratch.floats(stride), *more = scratch.floats(stride);
    double *lanes = scratch.doubles(LANES);
    Thinning thinning(scratch, formula, strip);
    alignas(Ranks) uint8_t ranks_room[sizeof(Ranks)];
    Ranks *ranks = ranks_of(scratch, formula, strip, ranks_room);
    for (int64_t first = 0; first < size; first += tile) {
        int64_t last = least(first + tile, size);
        if (is_norm) __builtin_memset(lanes, 0, LANES * 8);
        for (int64_t begin = first; begin < last; begin += strip) {
            int64_t some = least(strip, last - begin);
            in.need(begin, begin + some);
            number++;
            if (count > experts) fine = load(in.at[experts], in.types[experts], begin, some, base) && fine;
            for (int64_t d = 0; d < experts; d++) {
                int32_t from = cuts ? least_kept(thinning.cuts[d]) : 0;
                if (from > 0)
                    fine = load_less_from(in.at[d], in.types[d], begin, some, base, from, rows[d]) && fine;
                else if (formula.vectors)
                    fine = load_less(in.at[d], in.types[d], begin, some, base, rows[d]) && fine;
                else
                    fine = load(in.at[d], in.types[d], begin, some, rows[d]) && fine;
                thinning.thin(ranks, d, rows[d], some, start + begin, number, from > 0);
                rescale(rows[d], some, formula.rescale[2 * d], formula.rescale[2 * d + 1]);
            }
            if (formula.thin == SELECT) keep_varying(rows, some, thinning.cuts[0], more);
            if (target.type == LEAD) {
                elect(rows, formula.weights, formula.weighted, some, room);
                number_made += static_cast<double>(lead_of_plus(room, some));
                continue;
            }
            switch (formula.combine) {
            case SUM: weighted_sum(rows, formula.weights, some, here); break;
            case DISJOINT: disjoint(rows, formula, some, here, room, more); break;
            case OVERLAPS: merge_overlaps(rows, formula.weights, some, here, room, more); break;
            default: agreeing_mean(rows, formula.weights, some, here, room, more);
            }
            for (int64_t step = 0; step < formula.steps; step++) {
                const float *after = formula.after + 3 * step;
                scale(here, some, after[0], after[1]);
                if (after[2] != 0) add_scaled(here, some, base, after[2]);
            }
            if (is_norm) {
                add_magnitudes(here, some, lanes, (begin - first) % LANES);
                continue;
            }
            stored = save(here, some, out.at, out.type, begin) && stored;
            if (!stored && target.descriptor != MEMORY) return {fine, false, out.checksum};
            out.drain(begin + some);
        }
        if (is_norm) number_made += total_of(lanes);
    }
    return {fine, stored, out.checksum};
}

bool measure(const Formula &formula, const Source *members, int64_t count, int64_t start, int64_t size,
             int64_t tile, int64_t strip, double *norms, uint8_t *marks, int64_t marked) {
    Scratch scratch;
    int64_t experts = count - 1, number = -1;
    Reader in(scratch, members, count, size, strip);
    float *base = scratch.floats(strip), *row = scratch.floats(strip);
    double *lanes = scratch.doubles(2 * experts * LANES);
    Thinning thinning(scratch, formula, strip);
    alignas(Ranks) uint8_t ranks_room[sizeof(Ranks)];
    Ranks *ranks = ranks_of(scratch, formula, strip, ranks_room);
    bool fine = true;
    for (int64_t first = 0; first < size; first += tile) {
        int64_t last = least(first + tile, size);
        __builtin_memset(lanes, 0, static_cast<size_t>(2 * experts * LANES) * 8);
        for (int64_t begin = first; begin < last; begin += strip) {
            int64_t some = least(strip, last - begin), shift = (begin - first) % LANES;
            in.need(begin, begin + some);
            number++;
            fine = load(in.at[experts], in.types[experts], begin, some, base) && fine;
            for (int64_t d = 0; d < experts; d++) {
                fine = load_less(in.at[d], in.types[d], begin, some, base, row) && fine;
                add_magnitudes(row, some, lanes + d * LANES, shift);
                thinning.thin(ranks, d, row, some, start + begin, number, false);
                add_magnitudes(row, some, lanes + (experts + d) * LANES, shift);
                if (marks) mark(row, some, marks + (number * experts + d) * marked);
            }
        }
        for (int64_t d = 0; d < 2 * experts; d++) norms[d] += total_of(lanes + d * LANES);
    }
    return fine;
}

double norm(const float *values, int64_t count) {
    alignas(64) double lanes[LANES] = {};
    add_magnitudes(values, count, lanes, 0);
    return total_of(lanes);
}

void sum_rows(const float *values, int64_t experts, int64_t stride, const float *weights, int64_t count, float *out) {
    weighted_sum({const_cast<float *>(values), experts, stride}, weights, count, out);
}

}  // namespace

extern const Merge merging;
const Merge merging = {merge, measure, norm, sum_rows};

}  // namespace sm::SM_ISA
