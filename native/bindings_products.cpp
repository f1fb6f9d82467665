// What Python calls of the family products.
#include "bindings.hpp"

namespace sm {

using Table = const Array<const int64_t> &;

void bind_products(nb::module_ &m) {
    m.def("gram", [](Table members, int64_t size, bool vectors, int64_t tile, const Array<double> &dots) {
        const Source *sources = members_of(members);
        expect(members.rows >= 1 + vectors && size >= 0 && tile >= 1, "members, a size and a tile");
        expect(dots.rows == members.rows - vectors && dots.columns == dots.rows, "a sum for each pair");
        Free released;
        return core.products->gram(sources, members.rows, size, vectors, tile, dots.data);
    });
    m.def("signature", [](Table members, int64_t size, int64_t tile, const Array<double> &dots,
                          const Array<double> &mass) {
        const Source *sources = members_of(members);
        expect(members.rows >= 1 && size >= 0 && tile >= 1, "members, a size and a tile");
        expect(dots.rows == members.rows - 1 && dots.columns == dots.rows && mass.size == 2, "a sum for each pair");
        Free released;
        return core.products->signature(sources, members.rows, size, tile, dots.data, mass.data);
    });
    m.def("grams_along", [](const Array<const float> &values, int64_t length, int64_t inner,
                            const Array<double> &dots) {
        const int64_t rows = values.rows, size = values.columns;
        expect(length >= 1 && inner >= 1 && size % (length * inner) == 0, "whole vectors");
        expect(dots.size == size / length * rows * rows, "a sum for each vector and pair");
        Free released;
        core.products->grams_along(values.data, rows, size, length, inner, dots.data);
    });
    m.def("combine_along", [](const Array<const float> &values, int64_t length, int64_t inner,
                              const Array<const float> &coefficients, const Array<float> &out) {
        const int64_t rows = values.rows, size = values.columns;
        expect(length >= 1 && inner >= 1 && size % (length * inner) == 0, "whole vectors");
        expect(coefficients.size == size / length * rows && out.size == size, "a coefficient for each vector and row");
        Free released;
        core.products->combine_along(values.data, rows, size, length, inner, coefficients.data, out.data);
    });
}

}  // namespace sm
