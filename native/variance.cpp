#include "variance.hpp"

namespace sm::SM_ISA {

namespace {

constexpr int64_t SUMMED = 256;  // coordinates whose sums stay in the first cache
constexpr float UNSURE = -1;     // stands for a variance that is computed later

// Σ v and Σ v² of each coordinate from `begin` on, in the type of the sums.
template <class T>
void add_powers(const Rows &rows, int64_t begin, int64_t count, T *SM_RESTRICT sums, T *SM_RESTRICT squares) {
    const float *SM_RESTRICT row = rows[0] + begin;
    for (int64_t i = 0; i < count; i++) {
        T value = static_cast<T>(row[i]);
        sums[i] = value;
        squares[i] = value * value;
    }
    for (int64_t d = 1; d < rows.count; d++) {
        const float *SM_RESTRICT other = rows[d] + begin;
        for (int64_t i = 0; i < count; i++) {
            T value = static_cast<T>(other[i]);
            sums[i] += value;
            squares[i] += value * value;
        }
    }
}

float variance_at(const Rows &rows, int64_t i) {
    double mean = 0, total = 0, count = static_cast<double>(rows.count);
    for (int64_t d = 0; d < rows.count; d++) mean += static_cast<double>(rows[d][i]);
    mean /= count;
    for (int64_t d = 0; d < rows.count; d++) {
        double apart = static_cast<double>(rows[d][i]) - mean;
        total += apart * apart;
    }
    return static_cast<float>(__builtin_fabs(total / count));
}

// Compute the variances that are UNSURE.
void settle(const Rows &rows, int64_t begin, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i++)
        if (out[i] < 0) out[i] = variance_at(rows, begin + i);
}

}  // namespace

// Two divisions take longer than all else. Σ v² and Σ v give the variance but for an error that Σ v²
// bounds; where it rounds to one float32 with the error and without, that is the variance.
void variance(const Rows &rows, int64_t count, float *out) {
    double sums[SUMMED], squares[SUMMED], times = static_cast<double>(rows.count), share = 1 / (times * times);
    for (int64_t begin = 0; begin < count; begin += SUMMED) {
        int64_t some = least(SUMMED, count - begin);
        float *SM_RESTRICT here = out + begin;
        add_powers(rows, begin, some, sums, squares);
        uint32_t unsure = 0;
        for (int64_t i = 0; i < some; i++) {
            double found = (squares[i] * times - sums[i] * sums[i]) * share, error = squares[i] * 0x1p-46;
            float most = static_cast<float>(found + error);
            uint32_t sure = 0u - (static_cast<float>(found - error) == most);
            here[i] = as_float((bits_of(most) & sure) | (bits_of(UNSURE) & ~sure));
            unsure |= ~sure;
        }
        if (unsure) settle(rows, begin, some, here);
    }
}

// As `variance`, in float32, with a bound on its errors.
void variance_within(const Rows &rows, int64_t count, int64_t from, int64_t to, float *out) {
    float low = as_float(static_cast<uint32_t>(from)), high = as_float(static_cast<uint32_t>(to));
    if (!(low > 1e-30f && high < 1e30f)) {  // where squares are not exact enough
        variance(rows, count, out);
        return;
    }
    double number = static_cast<double>(rows.count);
    float sums[SUMMED], squares[SUMMED], times = static_cast<float>(rows.count);
    float error = static_cast<float>(number * (4 * number + 16) * 0x1p-24);
    low *= static_cast<float>(number * number * (1 - 0x1p-20));
    high *= static_cast<float>(number * number * (1 + 0x1p-20));
    for (int64_t begin = 0; begin < count; begin += SUMMED) {
        int64_t some = least(SUMMED, count - begin);
        float *SM_RESTRICT here = out + begin;
        add_powers(rows, begin, some, sums, squares);
        uint32_t unsure = 0;
        for (int64_t i = 0; i < some; i++) {
            float found = squares[i] * times - sums[i] * sums[i], slack = squares[i] * error;
            // Infinite is also a product that only just overflowed, and the other did not.
            uint32_t below = 0u - (found + slack < low);
            uint32_t above = (0u - (high < found - slack)) & (0u - (found - slack < __builtin_inff()));
            uint32_t bits = (above & 0x7F800000) | (~above & bits_of(UNSURE));
            here[i] = as_float(~below & bits);
            unsure |= ~(below | above);
        }
        if (unsure) settle(rows, begin, some, here);
    }
}

void keep_varying(const Rows &rows, int64_t count, Cut &cut, float *spread) {
    if (cut.threshold == ALL) return;
    variance_within(rows, count, cut.threshold, cut.threshold, spread);
    trim(spread, count, cut);
    for (int64_t d = 0; d < rows.count; d++) {
        float *SM_RESTRICT row = rows[d];
        const float *SM_RESTRICT kept = spread;
        for (int64_t i = 0; i < count; i++) row[i] = as_float(bits_of(row[i]) & (0u - (kept[i] != 0)));
    }
}

}  // namespace sm::SM_ISA
