// What Python calls of the family coordinates.
#include "bindings.hpp"

namespace sm {

using Table = const Array<const int64_t> &;
using Values = const Array<const float> &;

void bind_coordinates(nb::module_ &m) {
    m.def("count_variances", [](Table members, int64_t size, int64_t upper, const Array<int64_t> &counts) {
        const Source *sources = members_of(members);
        expect(members.rows >= 2 && size >= 0 && upper < 1 << 16, "an expert and the reference");
        expect(counts.size >= (upper < 0 ? (1 << 16) + 1 : 1 << 15), "a count for each place");
        Free released;
        return core.coordinates->count_variances(sources, members.rows, size, upper, counts.data);
    });
    m.def("squares_of_varying", [](Table members, int64_t size, int64_t threshold, int64_t ties, int64_t tile,
                                   const Array<double> &total) {
        const Source *sources = members_of(members);
        expect(members.rows >= 2 && size >= 0 && tile >= 1, "an expert and the reference");
        expect(total.size == members.rows - 1, "a sum for each expert");
        Free released;
        return core.coordinates->squares_of_varying(sources, members.rows, size, threshold, ties, tile, total.data);
    });
    m.def("swap_near", [](Values other, Values base, float t, const Array<float> &out) {
        expect(other.size == out.size && base.size == out.size, "rows of one length");
        Free released;
        core.coordinates->swap_near(other.data, base.data, out.size, t, out.data);
    });
    m.def("count_changes", [](Values values, float bound, const Array<int64_t> &alone, const Array<int64_t> &shared) {
        expect(alone.size == values.rows && shared.size == values.rows, "a count for each row");
        Free released;
        core.coordinates->count_changes(values.data, values.rows, values.columns, bound, alone.data, shared.data);
    });
    m.def("reinforce", [](Values values, float bound, Values factors, const Array<float> &out) {
        expect(factors.size == values.rows && out.size == values.columns, "a factor for each row");
        Free released;
        core.coordinates->reinforce(values.data, values.rows, values.columns, bound, factors.data, out.data);
    });
    m.def("divergences", [](Values values, Values base, int64_t length, const Array<double> &out) {
        expect(length >= 1 && values.size == out.size * length && base.size == values.size, "whole rows");
        Free released;
        core.coordinates->divergences(values.data, base.data, length, out.size, out.data);
    });
    m.def("scale_rows", [](Values values, int64_t length, const Array<const double> &factors, const Array<float> &out) {
        expect(length >= 1 && values.size == factors.size * length && out.size == values.size, "whole rows");
        Free released;
        core.coordinates->scale_rows(values.data, length, factors.data, factors.size, out.data);
    });
    m.def("keep_from", [](Values values, Values scores, float bound, const Array<float> &out) {
        expect(values.size == out.size && scores.size == out.size, "rows of one length");
        Free released;
        core.coordinates->keep_from(values.data, scores.data, out.size, bound, out.data);
    });
    m.def("count_keys", [](Values values, int64_t upper, const Array<int64_t> &counts) {
        expect(counts.size == 1 << 16 && upper < 1 << 16, "a count for each half of a key");
        Free released;
        core.coordinates->count_keys(values.data, values.size, upper, counts.data);
    });
}

}  // namespace sm
