// Inner products of float32 rows in float64, and what else one pass over task vectors gives.
//
// Every float64 sum runs in LANES interleaved lanes: coordinate j of a tile belongs to lane
// j mod LANES, a lane adds its coordinates in increasing j, and the lanes are added from 0 up. The
// product of two float32 is exact in float64, so that it does not matter whether multiply and add
// are one instruction. Together: the same bits everywhere.
#include "families.hpp"
#include "load.hpp"

namespace sm::SM_ISA {

namespace {

constexpr int64_t TURNS = 8;                      // coordinates of a lane in one strip
constexpr int64_t PRODUCT_STRIP = TURNS * LANES;  // few enough for the first-level cache

// Rows of a strip: float32 in memory, bfloat16 as stored, and that minus a reference.
struct Wide {
    const float *SM_RESTRICT values;
    SM_INLINE double operator[](int64_t i) const { return static_cast<double>(values[i]); }
};
struct Raw {
    const uint16_t *SM_RESTRICT raw;
    SM_INLINE double operator[](int64_t i) const { return static_cast<double>(of_bf16(raw[i])); }
};
struct RawLess {
    const uint16_t *SM_RESTRICT raw, *SM_RESTRICT base;
    SM_INLINE double operator[](int64_t i) const { return static_cast<double>(of_bf16(raw[i]) - of_bf16(base[i])); }
};

// left·left, left·right and right·right.
template <class Row>
SM_INLINE void triangle(Row left, Row right, double *SM_RESTRICT first, double *SM_RESTRICT mixed,
                        double *SM_RESTRICT second) {
    for (int64_t i = 0; i < LANES; i++) {
        double a = first[i], b = mixed[i], c = second[i];
#pragma GCC unroll 8
        for (int64_t turn = 0; turn < TURNS; turn++) {
            double x = left[i + turn * LANES], y = right[i + turn * LANES];
            a = exact_fma(x, x, a);
            b = exact_fma(x, y, b);
            c = exact_fma(y, y, c);
        }
        first[i] = a;
        mixed[i] = b;
        second[i] = c;
    }
}

// left·other and right·other.
template <class Row>
SM_INLINE void rectangle(Row left, Row right, Row other, double *SM_RESTRICT first, double *SM_RESTRICT second) {
    for (int64_t i = 0; i < LANES; i++) {
        double a = first[i], b = second[i];
#pragma GCC unroll 8
        for (int64_t turn = 0; turn < TURNS; turn++) {
            double x = other[i + turn * LANES];
            a = exact_fma(left[i + turn * LANES], x, a);
            b = exact_fma(right[i + turn * LANES], x, b);
        }
        first[i] = a;
        second[i] = b;
    }
}

template <class Row>
SM_INLINE void square(Row row, double *SM_RESTRICT lanes) {
    for (int64_t i = 0; i < LANES; i++) {
        double total = lanes[i];
#pragma GCC unroll 8
        for (int64_t turn = 0; turn < TURNS; turn++) {
            double x = row[i + turn * LANES];
            total = exact_fma(x, x, total);
        }
        lanes[i] = total;
    }
}

// Products of all pairs of rows of a strip are added to lanes (rows, rows, LANES). Rows are taken by
// twos, so that what is loaded and widened serves several products.
template <class Rows>
void add_products(Rows rows, int64_t count, double *lanes) {
    auto at = [&](int64_t a, int64_t b) { return lanes + (a * count + b) * LANES; };
    for (int64_t a = 0; a + 1 < count; a += 2) {
        triangle(rows(a), rows(a + 1), at(a, a), at(a, a + 1), at(a + 1, a + 1));
        for (int64_t b = a + 2; b < count; b++)
            rectangle(rows(a), rows(a + 1), rows(b), at(a, b), at(a + 1, b));
    }
    if (count % 2) square(rows(count - 1), at(count - 1, count - 1));
}

double lane_sum(const double *lanes) {
    double total = 0;
    for (int64_t i = 0; i < LANES; i++) total += lanes[i];
    return total;
}

// Add the sums of a tile to the inner products, and begin with zeros again.
void add_lanes(double *lanes, int64_t count, double *dots) {
    for (int64_t a = 0; a < count; a++)
        for (int64_t b = a; b < count; b++) {
            double pair = lane_sum(lanes + (a * count + b) * LANES);
            dots[a * count + b] += pair;
            if (a != b) dots[b * count + a] += pair;
        }
    __builtin_memset(lanes, 0, static_cast<size_t>(count * count * LANES) * sizeof(double));
}

bool all_bf16(const Reader &in) {
    bool all = true;
    for (int64_t d = 0; d < in.count; d++) all = all && in.types[d] == BF16;
    return all;
}

// A strip of every row, of which what is missing at the end is zero: that changes no sum.
struct Strips {
    float *rows;
    SM_INLINE float *of(int64_t d) const { return rows + d * PRODUCT_STRIP; }
    void end_at(int64_t d, int64_t count) const {
        for (int64_t i = count; i < PRODUCT_STRIP; i++) of(d)[i] = 0;
    }
};

void add_strip(const Reader &in, int64_t rows, bool vectors, int64_t begin, int64_t count, const Strips &strips,
               double *lanes) {
    float *less = strips.of(rows);
    if (vectors) take(in.at[rows], in.types[rows], begin, count, less);
    for (int64_t d = 0; d < rows; d++) {
        vectors ? take_less(in.at[d], in.types[d], begin, count, less, strips.of(d))
                : take(in.at[d], in.types[d], begin, count, strips.of(d));
        strips.end_at(d, count);
    }
    add_products([&](int64_t d) { return Wide{strips.of(d)}; }, rows, lanes);
}

// The same of a whole strip that is stored in bfloat16, which never leaves the registers.
void add_stored(const Reader &in, int64_t rows, bool vectors, int64_t begin, double *lanes) {
    auto raw = [&](int64_t d) { return values_at<uint16_t>(in.at[d], begin); };
    if (vectors)
        add_products([&](int64_t d) { return RawLess{raw(d), raw(rows)}; }, rows, lanes);
    else
        add_products([&](int64_t d) { return Raw{raw(d)}; }, rows, lanes);
}

bool gram(const Source *members, int64_t count, int64_t size, bool vectors, int64_t tile, double *dots) {
    Scratch scratch;
    Reader in(scratch, members, count, size, PRODUCT_STRIP);
    const int64_t rows = count - vectors;
    Strips strips = {scratch.floats((rows + 1) * PRODUCT_STRIP)};
    double *lanes = scratch.zeros(rows * rows * LANES);
    const bool direct = rows <= 3 && all_bf16(in);
    for (int64_t first = 0; first < size; first += tile) {
        const int64_t last = least(first + tile, size);
        for (int64_t begin = first; begin < last; begin += PRODUCT_STRIP) {
            int64_t some = least(PRODUCT_STRIP, last - begin);
            in.need(begin, begin + some);
            if (direct && some == PRODUCT_STRIP)
                add_stored(in, rows, vectors, begin, lanes);
            else
                add_strip(in, rows, vectors, begin, some, strips, lanes);
        }
        add_lanes(lanes, rows, dots);
    }
    // What is not finite shows in the squares, which never reach infinity otherwise.
    bool fine = true;
    for (int64_t d = 0; d < rows; d++) fine = fine && __builtin_isfinite(dots[d * rows + d]);
    return fine;
}

// Let the range of every coordinate hold one more value.
void stretch(const float *SM_RESTRICT row, float *SM_RESTRICT highest, float *SM_RESTRICT lowest) {
    for (int64_t i = 0; i < PRODUCT_STRIP; i++) {
        float value = row[i], high = highest[i], low = lowest[i];
        highest[i] = value > high ? value : high;
        lowest[i] = value < low ? value : low;
    }
}

void add_masses(const float *SM_RESTRICT highest, const float *SM_RESTRICT lowest, double *SM_RESTRICT contested,
                double *SM_RESTRICT total) {
    for (int64_t begin = 0; begin < PRODUCT_STRIP; begin += LANES)
        for (int64_t i = 0; i < LANES; i++) {
            float high = highest[begin + i], low = lowest[begin + i];
            float most = high > -low ? high : -low;
            uint32_t opposed = (0u - (high > 0)) & (0u - (low < 0));
            total[i] += static_cast<double>(most);
            contested[i] += static_cast<double>(as_float(bits_of(most) & opposed));
        }
}

bool signature(const Source *members, int64_t count, int64_t size, int64_t tile, double *dots, double *mass) {
    Scratch scratch;
    Reader in(scratch, members, count, size, PRODUCT_STRIP);
    const int64_t experts = count - 1;
    Strips strips = {scratch.floats((experts + 3) * PRODUCT_STRIP)};
    float *less = strips.of(experts), *highest = strips.of(experts + 1), *lowest = strips.of(experts + 2);
    double *lanes = scratch.zeros(experts * experts * LANES), *masses = scratch.zeros(2 * LANES);
    bool fine = true;
    for (int64_t first = 0; first < size; first += tile) {
        const int64_t last = least(first + tile, size);
        for (int64_t begin = first; begin < last; begin += PRODUCT_STRIP) {
            int64_t some = least(PRODUCT_STRIP, last - begin);
            in.need(begin, begin + some);
            strips.end_at(experts + 1, 0);
            strips.end_at(experts + 2, 0);
            fine = load(in.at[experts], in.types[experts], begin, some, less) && fine;
            for (int64_t d = 0; d < experts; d++) {
                fine = load_less(in.at[d], in.types[d], begin, some, less, strips.of(d)) && fine;
                strips.end_at(d, some);
                stretch(strips.of(d), highest, lowest);
            }
            add_masses(highest, lowest, masses, masses + LANES);
            add_products([&](int64_t d) { return Wide{strips.of(d)}; }, experts, lanes);
        }
        add_lanes(lanes, experts, dots);
        mass[0] += lane_sum(masses);
        mass[1] += lane_sum(masses + LANES);
        __builtin_memset(masses, 0, 2 * LANES * sizeof(double));
    }
    return fine;
}

double dot(const float *left, const float *right, int64_t count) {
    double total = 0;
    for (int64_t i = 0; i < count; i++)
        total = exact_fma(static_cast<double>(left[i]), static_cast<double>(right[i]), total);
    return total;
}

void add_scaled(float *SM_RESTRICT total, const float *SM_RESTRICT row, int64_t count, float factor) {
    for (int64_t i = 0; i < count; i++) total[i] += row[i] * factor;
}

// Vector o · inner + i has its entries at (o, ·, i).
void grams_along(const float *values, int64_t rows, int64_t size, int64_t length, int64_t inner, double *dots) {
    const int64_t vectors = size / length;
    for (int64_t i = 0; i < vectors * rows * rows; i++) dots[i] = 0;
    for (int64_t a = 0; a < rows; a++)
        for (int64_t b = a; b < rows; b++) {
            const float *left = values + a * size, *right = values + b * size;
            for (int64_t vector = 0; inner == 1 && vector < vectors; vector++)
                dots[(vector * rows + a) * rows + b] = dot(left + vector * length, right + vector * length, length);
            for (int64_t outer = 0; inner > 1 && outer < vectors / inner; outer++)
                for (int64_t k = 0; k < length; k++) {
                    const int64_t first = (outer * length + k) * inner;
                    double *to = dots + (outer * inner * rows + a) * rows + b;
                    for (int64_t i = 0; i < inner; i++)
                        to[i * rows * rows] = exact_fma(static_cast<double>(left[first + i]),
                                                        static_cast<double>(right[first + i]), to[i * rows * rows]);
                }
            for (int64_t vector = 0; vector < vectors; vector++)
                dots[(vector * rows + b) * rows + a] = dots[(vector * rows + a) * rows + b];
        }
}

void combine_along(const float *values, int64_t rows, int64_t size, int64_t length, int64_t inner,
                   const float *coefficients, float *out) {
    for (int64_t i = 0; i < size; i++) out[i] = 0;
    for (int64_t d = 0; d < rows; d++) {
        for (int64_t vector = 0; inner == 1 && vector < size / length; vector++)
            add_scaled(out + vector * length, values + d * size + vector * length, length, coefficients[vector * rows + d]);
        for (int64_t outer = 0; inner > 1 && outer < size / length / inner; outer++)
            for (int64_t k = 0; k < length; k++) {
                const int64_t first = (outer * length + k) * inner;
                const float *SM_RESTRICT row = values + d * size + first, *own = coefficients + outer * inner * rows + d;
                float *SM_RESTRICT to = out + first;
                for (int64_t i = 0; i < inner; i++) to[i] += row[i] * own[i * rows];
            }
    }
}

}  // namespace

extern const Products products;
const Products products = {gram, signature, grams_along, combine_along};

}  // namespace sm::SM_ISA
