// Rules that look at one coordinate of all members at a time, in float32.
#include <math.h>

#include "families.hpp"
#include "variance.hpp"

namespace sm::SM_ISA {

namespace {

SM_INLINE uint32_t all_if(bool holds) { return 0u - holds; }
SM_INLINE float chosen(uint32_t mask, float one, float other) {
    return as_float((bits_of(one) & mask) | (bits_of(other) & ~mask));
}
SM_INLINE uint32_t magnitude_of(float value) { return bits_of(value) & MAGNITUDE; }

// A strip of every task vector; the last member is the reference.
class Vectors {
  public:
    Vectors(Scratch &scratch, const Source *members, int64_t count, int64_t size)
        : rows{scratch.floats((count - 1) * STRIP), count - 1, STRIP}, in_(scratch, members, count, size),
          less_(scratch.floats(STRIP)) {}
    void take(int64_t begin, int64_t count) {
        in_.need(begin, begin + count);
        fine = load(in_.at[rows.count], in_.types[rows.count], begin, count, less_) && fine;
        for (int64_t d = 0; d < rows.count; d++)
            fine = load_less(in_.at[d], in_.types[d], begin, count, less_, rows[d]) && fine;
    }
    const Rows rows;
    bool fine = true;

  private:
    Reader in_;
    float *less_;
};

bool count_variances(const Source *members, int64_t count, int64_t size, int64_t upper, int64_t *counts) {
    Scratch scratch;
    Vectors vectors(scratch, members, count, size);
    float *spread = scratch.floats(STRIP);
    int64_t zeros = 0;
    for (int64_t begin = 0; begin < size; begin += STRIP) {
        int64_t some = least(STRIP, size - begin);
        vectors.take(begin, some);
        if (upper < 0) {
            variance(vectors.rows, some, spread);
            for (int64_t i = 0; i < some; i++) counts[bits_of(spread[i]) >> LOW_BITS]++;
            for (int64_t i = 0; i < some; i++) zeros += bits_of(spread[i]) == 0;
            continue;
        }
        variance_within(vectors.rows, some, upper << LOW_BITS, (upper + 1) << LOW_BITS, spread);
        for (int64_t i = 0; i < some; i++)
            if (bits_of(spread[i]) >> LOW_BITS == upper) counts[bits_of(spread[i]) & (LOW_BINS - 1)]++;
    }
    if (upper < 0) counts[1 << 16] += zeros;
    return vectors.fine;
}

void add_squares(const float *SM_RESTRICT row, int64_t count, double *SM_RESTRICT lanes) {
    int64_t begin = 0;
    for (; begin + LANES <= count; begin += LANES)
        for (int64_t i = 0; i < LANES; i++) {
            double value = static_cast<double>(row[begin + i]);
            lanes[i] = exact_fma(value, value, lanes[i]);
        }
    for (int64_t i = 0; begin + i < count; i++) {
        double value = static_cast<double>(row[begin + i]);
        lanes[i] = exact_fma(value, value, lanes[i]);
    }
}

bool squares_of_varying(const Source *members, int64_t count, int64_t size, int64_t threshold, int64_t ties,
                        int64_t tile, double *total) {
    Scratch scratch;
    Vectors vectors(scratch, members, count, size);
    const Rows &rows = vectors.rows;
    float *spread = scratch.floats(STRIP);
    double *lanes = scratch.zeros(rows.count * LANES);
    Cut cut = {threshold, ties};
    for (int64_t first = 0; first < size; first += tile) {
        const int64_t last = least(first + tile, size);
        for (int64_t begin = first; begin < last; begin += STRIP) {
            int64_t some = least(STRIP, last - begin);
            vectors.take(begin, some);
            keep_varying(rows, some, cut, spread);
            for (int64_t d = 0; d < rows.count; d++) add_squares(rows[d], some, lanes + d * LANES);
        }
        for (int64_t d = 0; d < rows.count; d++)
            for (int64_t i = 0; i < LANES; i++) total[d] += lanes[d * LANES + i];
        __builtin_memset(lanes, 0, static_cast<size_t>(rows.count * LANES) * sizeof(double));
    }
    return vectors.fine;
}

void swap_near(const float *SM_RESTRICT other, const float *SM_RESTRICT base, int64_t size, float t,
               float *SM_RESTRICT out) {
    for (int64_t i = 0; i < size; i++) {
        float apart = as_float(magnitude_of(base[i] - other[i]));
        apart = chosen(all_if(apart < 1e-6f), 1e-6f, apart);
        float share = t / apart;
        share = chosen(all_if(share < 0), 0, share);
        share = chosen(all_if(share > 1), 1, share);
        out[i] = share * other[i] + (1 - share) * base[i];
    }
}

// How many rows have an entry above a bound, coordinate by coordinate of a strip.
void count_changed(const float *values, int64_t rows, int64_t size, int64_t begin, int64_t count, float bound,
                   uint32_t *SM_RESTRICT changed) {
    for (int64_t i = 0; i < count; i++) changed[i] = 0;
    for (int64_t d = 0; d < rows; d++) {
        const float *SM_RESTRICT row = values + d * size + begin;
        for (int64_t i = 0; i < count; i++) changed[i] += as_float(magnitude_of(row[i])) > bound;
    }
}

void count_changes(const float *values, int64_t rows, int64_t size, float bound, int64_t *alone, int64_t *shared) {
    uint32_t changed[STRIP];
    for (int64_t begin = 0; begin < size; begin += STRIP) {
        const int64_t count = least(STRIP, size - begin);
        count_changed(values, rows, size, begin, count, bound, changed);
        for (int64_t d = 0; d < rows; d++) {
            const float *SM_RESTRICT row = values + d * size + begin;
            uint32_t here = 0, only = 0;
            for (int64_t i = 0; i < count; i++) {
                uint32_t above = as_float(magnitude_of(row[i])) > bound;
                here += above;
                only += above & (changed[i] == 1);
            }
            alone[d] += only;
            shared[d] += here - only;
        }
    }
}

void reinforce(const float *values, int64_t rows, int64_t size, float bound, const float *factors, float *out) {
    uint32_t changed[STRIP];
    float own[STRIP];
    for (int64_t begin = 0; begin < size; begin += STRIP) {
        const int64_t count = least(STRIP, size - begin);
        float *SM_RESTRICT total = out + begin;
        count_changed(values, rows, size, begin, count, bound, changed);
        for (int64_t i = 0; i < count; i++) total[i] = own[i] = 0;
        for (int64_t d = 0; d < rows; d++) {
            const float *SM_RESTRICT row = values + d * size + begin;
            const float factor = factors[d];
            for (int64_t i = 0; i < count; i++) {
                uint32_t above = all_if(as_float(magnitude_of(row[i])) > bound);
                float among = static_cast<float>(static_cast<int32_t>(changed[i]));  // 0 only where it is not
                own[i] = chosen(above, row[i] * factor, own[i]);
                total[i] = chosen(above, total[i] + row[i] / among, total[i]);
            }
        }
        for (int64_t i = 0; i < count; i++) total[i] = chosen(all_if(changed[i] == 1), own[i], total[i]);
    }
}

void divergences(const float *values, const float *base, int64_t length, int64_t rows, double *out) {
    for (int64_t row = 0; row < rows; row++, values += length, base += length) {
        double high = static_cast<double>(values[0]), low = static_cast<double>(base[0]);
        for (int64_t i = 1; i < length; i++) {
            high = static_cast<double>(values[i]) > high ? static_cast<double>(values[i]) : high;
            low = static_cast<double>(base[i]) > low ? static_cast<double>(base[i]) : low;
        }
        double above = 0, below = 0, total = 0;
        for (int64_t i = 0; i < length; i++) {
            above += exp(static_cast<double>(values[i]) - high);
            below += exp(static_cast<double>(base[i]) - low);
        }
        for (int64_t i = 0; i < length; i++) {
            double p = exp(static_cast<double>(values[i]) - high) / above + 1e-8;
            double q = exp(static_cast<double>(base[i]) - low) / below + 1e-8;
            total += p * log(p / q);
        }
        out[row] = total;
    }
}

void scale_rows(const float *SM_RESTRICT values, int64_t length, const double *factors, int64_t rows,
                float *SM_RESTRICT out) {
    for (int64_t row = 0; row < rows; row++, values += length, out += length) {
        const float factor = static_cast<float>(factors[row]);
        for (int64_t i = 0; i < length; i++) out[i] = as_float(magnitude_of(values[i])) * factor;
    }
}

void keep_from(const float *SM_RESTRICT values, const float *SM_RESTRICT scores, int64_t size, float bound,
               float *SM_RESTRICT out) {
    for (int64_t i = 0; i < size; i++) out[i] = as_float(bits_of(values[i]) & all_if(scores[i] >= bound));
}

// Keys are in the order of the numbers.
SM_INLINE uint32_t key_of(float value) {
    uint32_t bits = bits_of(value), negative = all_if(bits >> 31 != 0);
    return bits ^ (negative | 0x80000000);
}

void count_keys(const float *values, int64_t size, int64_t upper, int64_t *counts) {
    if (upper < 0)
        for (int64_t i = 0; i < size; i++) counts[key_of(values[i]) >> 16]++;
    else
        for (int64_t i = 0; i < size; i++)
            if (key_of(values[i]) >> 16 == upper) counts[key_of(values[i]) & 0xFFFF]++;
}

}  // namespace

extern const Coordinates coordinates;
const Coordinates coordinates = {count_variances, squares_of_varying, swap_near, count_changes, reinforce,
                                 divergences,     scale_rows,         keep_from, count_keys};

}  // namespace sm::SM_ISA
