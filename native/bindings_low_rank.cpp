// What Python calls of the family low_rank.
#include "bindings.hpp"

namespace sm {

// Rows that a matrix has up to the end of a run of `size` values.
static int64_t rows_of(int64_t size, int64_t columns, int64_t skip) {
    expect(columns >= 1 && skip >= 0, "a run of a matrix");
    return size ? (skip + size - 1) / columns + 1 : 0;
}

void bind_low_rank(nb::module_ &m) {
    m.def("add_low_rank", [](const Array<const double> &left, const Array<const double> &right, double scale,
                             int64_t skip, const Array<float> &out) {
        const int64_t rank = right.rows, columns = right.columns;
        expect(left.columns == rank || left.rows == 0, "as many factors on either side");
        expect(rows_of(out.size, columns, skip) <= left.rows, "a row of the left factor for each row");
        Free released;
        core.low_rank->add(left.data, right.data, rank, columns, scale, skip, out.data, out.size);
    });
    m.def("add_squares", [](const Array<const float> &values, int64_t columns, int64_t skip, bool by_row,
                            const Array<double> &sums) {
        int64_t rows = rows_of(values.size, columns, skip);
        expect(sums.size >= (by_row ? rows : columns), "a sum for each row, or column");
        Free released;
        core.low_rank->add_squares(values.data, values.size, columns, skip, by_row, sums.data);
    });
    m.def("multiply_along", [](const Array<float> &values, int64_t columns, int64_t skip, bool by_row,
                               const Array<const double> &factors) {
        int64_t rows = rows_of(values.size, columns, skip);
        expect(factors.size >= (by_row ? rows : columns), "a factor for each row, or column");
        Free released;
        core.low_rank->multiply_along(values.data, values.size, columns, skip, by_row, factors.data);
    });
}

}  // namespace sm
