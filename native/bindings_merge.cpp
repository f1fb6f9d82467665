// What Python calls of the family merge.
#include "bindings.hpp"

namespace sm {

namespace {

using Table = const Array<const int64_t> &;
using Floats = const Array<const float> &;

int64_t pieces(int64_t size, int64_t length) { return (size + length - 1) / length; }

bool whole_vectors(Table axis, int64_t tile, int64_t strip) {
    if (axis.data[0] < 1 || axis.data[1] < 1) return false;
    int64_t whole = axis.data[0] * axis.data[1];
    return strip % whole == 0 && tile % whole == 0;
}

void expect_formula(const Formula &formula, Table cuts, Table outliers, Table draws,
                    const Array<const double> &odds, Table axis, const Array<const uint8_t> &marks,
                    Floats rescale, Table groups, Table members, int64_t size, int64_t tile, int64_t strip) {
    int64_t experts = formula.experts;
    expect(experts >= 1 && members.rows >= experts, "an expert, and a member for each");
    expect(formula.thin >= KEEP_ALL && formula.thin <= MARKED && formula.combine >= SUM &&
               formula.combine <= AGREEING, "no such formula");
    expect(size >= 0 && tile >= 1 && strip >= 1, "a size, a tile, a strip");
    expect(cuts.size >= 2 * (formula.thin == SELECT ? 1 : experts) && outliers.size == 2 * experts &&
               draws.size == 3 * experts && odds.size == 2 * experts && rescale.size == 2 * experts &&
               axis.size == 3 && groups.size == 3, "a row for each expert");
    expect(groups.data[0] >= 0 && groups.data[1] >= 1, "groups of one or more");
    expect(formula.thin != RANK || whole_vectors(axis, tile, strip), "strips of whole vectors");
    if (formula.thin == MARKED)
        expect(8 * formula.marked >= (strip < size ? strip : size) &&
                   marks.rows >= pieces(size, tile) * pieces(tile < size ? tile : size, strip),
               "a bit for every entry");
}

}  // namespace

void bind_merge(nb::module_ &m) {
    // The fields of core/merge.py's Formula, in their order.
    m.def("merge", [](Floats weights, bool vectors, int64_t thin, Table cuts, Table outliers, Table draws,
                      const Array<const double> &odds, Table axis, const Array<const uint8_t> &marks,
                      Floats rescale, Table groups, int64_t combine, bool weighted, bool normalize,
                      float cancelled, Floats after, Table members, int64_t start, int64_t size, int64_t tile,
                      int64_t strip, Table target, const Array<double> &number) {
        const Source *sources = members_of(members);
        Formula formula = {weights.data, weights.size, vectors, thin, cuts.data, outliers.data, draws.data,
                           odds.data, axis.data, marks.data, marks.rows ? marks.columns / weights.size : 0,
                           rescale.data, groups.data, combine, weighted, normalize, cancelled, after.data,
                           after.size / 3};
        expect_formula(formula, cuts, outliers, draws, odds, axis, marks, rescale, groups, members, size, tile,
                       strip);
        bool base = vectors;
        for (int64_t step = 0; step < formula.steps; step++) base = base || after.data[3 * step + 2] != 0;
        expect(members.rows == weights.size + base || !base, "the reference is a member");
        expect(target.size == 3 && target.data[0] >= BF16 && target.data[0] <= LEAD && number.size >= 1,
               "a row for the target, and a number");
        Merged merged;
        {
            Free released;
            merged = core.merging->merge(formula, sources, members.rows, start, size, tile, strip,
                                         *reinterpret_cast<const Source *>(target.data), number.data[0]);
        }
        return nb::make_tuple(merged.fine, merged.stored, merged.checksum);
    });
    m.def("norms_of_thinning", [](int64_t thin, Table cuts, Table outliers, Table draws,
                                  const Array<const double> &odds, Table axis, Table groups, Table members,
                                  int64_t start, int64_t size, int64_t tile, int64_t strip,
                                  const Array<double> &norms, const Array<uint8_t> &marks) {
        const Source *sources = members_of(members);
        int64_t experts = members.rows - 1, marked = marks.rows && experts ? marks.columns / experts : 0;
        Formula formula = {nullptr, experts, true, thin, cuts.data, outliers.data, draws.data, odds.data,
                           axis.data, nullptr, 0, nullptr, groups.data, SUM, false, false, 1, nullptr, 0};
        expect(norms.size == 2 * experts, "two norms for each expert");
        expect(thin != MARKED && thin != SELECT, "no such formula");
        expect(experts >= 1 && cuts.size == 2 * experts && outliers.size == 2 * experts &&
                   draws.size == 3 * experts && odds.size == 2 * experts && axis.size == 3 && groups.size == 3 &&
                   groups.data[1] >= 1 && size >= 0 && tile >= 1 && strip >= 1, "a row for each expert");
        expect(thin != RANK || whole_vectors(axis, tile, strip), "strips of whole vectors");
        expect(!marks.size || (8 * marked >= (strip < size ? strip : size) &&
                               marks.rows >= pieces(size, tile) * pieces(tile < size ? tile : size, strip)),
               "a bit for every entry");
        Free released;
        return core.merging->measure(formula, sources, members.rows, start, size, tile, strip, norms.data,
                                     marks.size ? marks.data : nullptr, marked);
    });
    m.def("norm", [](Floats values) {
        Free released;
        return core.merging->norm(values.data, values.size);
    });
    m.def("weighted_sum", [](Floats values, Floats weights, const Array<float> &out) {
        expect(values.rows == weights.size && weights.size >= 1 && values.columns == out.size,
               "a row for each weight");
        Free released;
        core.merging->sum_rows(values.data, weights.size, values.columns, weights.data, out.size, out.data);
    });
}

}  // namespace sm
