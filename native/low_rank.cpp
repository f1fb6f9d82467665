// W + s·BA on any run of coordinates, and the norms and factors of its rows or columns (LoRA, DoRA).
//
// A product of two float32 numbers is exact in float64, and the sum over the rank has one order: an
// entry has the same bits in whatever piece it is formed.
#include "families.hpp"
#include "load.hpp"

namespace sm::SM_ISA {

namespace {

constexpr int64_t COLUMNS = 1024;  // whose float64 sums stay in the first-level cache

// Σ_k in order, four factors in one pass over the sums.
void add_four(const double *factors, const double *SM_RESTRICT right, int64_t step, int64_t count,
              double *SM_RESTRICT sums) {
    const double first = factors[0], second = factors[1], third = factors[2], fourth = factors[3];
    const double *SM_RESTRICT a = right, *SM_RESTRICT b = right + step, *SM_RESTRICT c = right + 2 * step,
                              *SM_RESTRICT d = right + 3 * step;
    for (int64_t j = 0; j < count; j++)
        sums[j] = exact_fma(fourth, d[j], exact_fma(third, c[j], exact_fma(second, b[j], exact_fma(first, a[j], sums[j]))));
}

void add_one(double factor, const double *SM_RESTRICT right, int64_t count, double *SM_RESTRICT sums) {
    for (int64_t j = 0; j < count; j++) sums[j] = exact_fma(factor, right[j], sums[j]);
}

void add(const double *left, const double *right, int64_t rank, int64_t columns, double factor, int64_t skip,
         float *out, int64_t size) {
    double sums[COLUMNS];
    for (int64_t done = 0; done < size;) {
        const int64_t row = (skip + done) / columns, column = (skip + done) % columns;
        const int64_t count = least(least(columns - column, size - done), COLUMNS);
        const double *own = left + row * rank, *here = right + column;
        for (int64_t j = 0; j < count; j++) sums[j] = 0;
        int64_t k = 0;
        for (; k + 4 <= rank; k += 4) add_four(own + k, here + k * columns, columns, count, sums);
        for (; k < rank; k++) add_one(own[k], here + k * columns, count, sums);
        float *SM_RESTRICT to = out + done;
        for (int64_t j = 0; j < count; j++) to[j] += static_cast<float>(factor * sums[j]);
        done += count;
    }
}

// A run of values as pieces of rows: piece(first of the piece, its length, row, column).
template <class Piece>
SM_INLINE void by_row(int64_t size, int64_t columns, int64_t skip, Piece piece) {
    for (int64_t done = 0; done < size;) {
        const int64_t row = (skip + done) / columns, column = (skip + done) % columns;
        const int64_t count = least(columns - column, size - done);
        piece(done, count, row, column);
        done += count;
    }
}

void add_squares(const float *values, int64_t size, int64_t columns, int64_t skip, bool of_rows, double *sums) {
    by_row(size, columns, skip, [&](int64_t first, int64_t count, int64_t row, int64_t column) {
        const float *SM_RESTRICT some = values + first;
        double *SM_RESTRICT to = sums + column;
        double total = of_rows ? sums[row] : 0;
        if (of_rows) {
            for (int64_t i = 0; i < count; i++)
                total = exact_fma(static_cast<double>(some[i]), static_cast<double>(some[i]), total);
            sums[row] = total;
        } else {
            for (int64_t i = 0; i < count; i++)
                to[i] = exact_fma(static_cast<double>(some[i]), static_cast<double>(some[i]), to[i]);
        }
    });
}

void multiply_along(float *values, int64_t size, int64_t columns, int64_t skip, bool of_rows, const double *factors) {
    by_row(size, columns, skip, [&](int64_t first, int64_t count, int64_t row, int64_t column) {
        float *SM_RESTRICT some = values + first;
        const double *SM_RESTRICT by = factors + column;
        const double one = of_rows ? factors[row] : 0;
        if (of_rows)
            for (int64_t i = 0; i < count; i++) some[i] = static_cast<float>(static_cast<double>(some[i]) * one);
        else
            for (int64_t i = 0; i < count; i++) some[i] = static_cast<float>(static_cast<double>(some[i]) * by[i]);
    });
}

}  // namespace

extern const LowRank low_rank;
const LowRank low_rank = {add, add_squares, multiply_along};

}  // namespace sm::SM_ISA
