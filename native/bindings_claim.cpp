// What Python calls of the family claim.
#include "bindings.hpp"

namespace sm {

using Table = const Array<const int64_t> &;
using Owner = const Array<uint8_t> &;

namespace {

// Rows of members, in as many dimensions as there are.
const Source *sources_of(Table rows) {
    expect(rows.size % 3 == 0, "rows of members are int64 (…, 3)");
    for (int64_t i = 0; i < rows.size; i += 3)
        expect(rows.data[i] >= BF16 && rows.data[i] <= F32, "a member has no known type");
    return reinterpret_cast<const Source *>(rows.data);
}

// The tiles [first, last) of edges that ascend to the size of the owner map.
void expect_tiles(Table edges, Owner owner, int64_t first, int64_t last) {
    int64_t tiles = edges.size - 1;
    expect(tiles >= 0 && 0 <= first && first <= last && last <= tiles, "tiles of the block");
    for (int64_t t = 0; t < tiles; t++) expect(edges.data[t] <= edges.data[t + 1], "edges ascend");
    expect(edges.data[0] == 0 && edges.data[tiles] == owner.size, "an owner for each coordinate");
}

Tiles tiles_of(Table edges, Table expert, Table reference, Table key, Owner owner, int64_t first, int64_t last) {
    expect_tiles(edges, owner, first, last);
    expect(key.size == 3, "a key of three numbers");
    expect(key.data[0] || (expert.size == 3 * (edges.size - 1) && reference.size == expert.size),
           "a row of each member for each tile");
    return {edges.data, sources_of(expert), sources_of(reference), key.data};
}

Settlement settlement_of(int64_t code, Table ties, Table counts, int64_t tiles) {
    expect(counts.size == 2 * ties.size && (ties.size == 0 || ties.size == tiles), "ties of each tile");
    return {static_cast<uint8_t>(code), ties.size ? ties.data : nullptr, counts.data};
}

}  // namespace

void bind_claim(nb::module_ &m) {
    m.def("claim_high", [](Table edges, Table expert, Table reference, Table key, Owner owner, int64_t first,
                           int64_t last, int64_t every, int64_t code, Table ties, Table counts,
                           const Array<uint32_t> &histogram) {
        Tiles tiles = tiles_of(edges, expert, reference, key, owner, first, last);
        Settlement before = settlement_of(code, ties, counts, edges.size - 1);
        expect(every >= 1 && histogram.size == 2 << 16, "one run in at least one, and a histogram");
        Free released;
        core.claims->count_high(tiles, owner.data, first, last, every, before, histogram.data);
    });
    m.def("claim_low", [](Table edges, Table expert, Table reference, Table key, Owner owner, int64_t first,
                          int64_t last, int64_t every, int64_t code, Table ties, Table counts, uint32_t high,
                          const Array<uint32_t> &histogram) {
        Tiles tiles = tiles_of(edges, expert, reference, key, owner, first, last);
        Settlement before = settlement_of(code, ties, counts, edges.size - 1);
        expect(every >= 1 && histogram.size == 1 << 15, "one run in at least one, and a histogram");
        Free released;
        core.claims->count_low(tiles, owner.data, first, last, every, before, high, histogram.data);
    });
    m.def("claim_mark", [](Table edges, Table expert, Table reference, Table key, Owner owner, int64_t first,
                           int64_t last, int64_t code, Table ties, Table before_counts, int64_t threshold,
                           const Array<int64_t> &counts, const Array<double> &mass) {
        Tiles tiles = tiles_of(edges, expert, reference, key, owner, first, last);
        Settlement before = settlement_of(code, ties, before_counts, edges.size - 1);
        expect(counts.size == 2 * (edges.size - 1) && mass.size == edges.size - 1, "a count for each tile");
        Free released;
        return core.claims->mark(tiles, owner.data, first, last, before, threshold, counts.data, mass.data);
    });
    m.def("claim_settle", [](Table edges, Owner owner, int64_t first, int64_t last, int64_t code, Table ties,
                             Table counts) {
        expect_tiles(edges, owner, first, last);
        Settlement marks = settlement_of(code, ties, counts, edges.size - 1);
        if (!marks.ties) return;
        Free released;
        core.claims->settle(edges.data, owner.data, first, last, marks);
    });
    m.def("claim_tally", [](Table edges, Table expert, Table reference, Table key, Owner owner, int64_t first,
                            int64_t last, int64_t code, const Array<int64_t> &support, const Array<double> &mass) {
        Tiles tiles = tiles_of(edges, expert, reference, key, owner, first, last);
        expect(support.size == edges.size - 1 && mass.size == support.size, "a sum for each tile");
        Free released;
        return core.claims->tally(tiles, owner.data, first, last, static_cast<uint8_t>(code), support.data,
                                  mass.data);
    });
    m.def("claim_admit", [](int64_t form, float scale, Table domains, int64_t below, Table keys, Table edges,
                            Owner owner, int64_t first, int64_t last, Table members, Table target) {
        const int64_t tiles = edges.size - 1, count = tiles ? members.size / (3 * tiles) : 0;
        expect_tiles(edges, owner, first, last);
        const Source *sources = sources_of(members);
        expect(members.size == 3 * tiles * count && count >= 2, "a row of each member for each tile");
        expect(keys.size == 2 * domains.size, "a key for each domain");
        expect(form >= Update::ADD && form <= Update::REPLACE, "a form of update");
        for (int64_t i = 0; i < domains.size; i++)
            expect(domains.data[i] >= 0 && domains.data[i] < count - 2, "no such domain");
        expect(target.size == 3 && target.data[0] >= BF16 && target.data[0] <= F32, "a row for the target");
        Update update = {form, scale, domains.data, keys.data, domains.size, below};
        Merged merged;
        {
            Free released;
            merged = core.claims->admit(update, edges.data, owner.data, first, last, sources, count, tiles,
                                        *reinterpret_cast<const Source *>(target.data));
        }
        return nb::make_tuple(merged.fine, merged.stored, merged.checksum);
    });
}

}  // namespace sm
