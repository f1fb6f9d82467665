// The functions of each family that are compiled once per instruction set, as tables of pointers.
//
// A file that is compiled so (see CMakeLists.txt) defines its table in the namespace SM_ISA; the
// table of the processor at hand is chosen when the module is loaded (dispatch.cpp).
#pragma once

#include "core.hpp"

namespace sm {

// Stored numbers to float32 and back, rounded to nearest even. What is returned says whether all
// values, of a narrowing all stored values, are finite.
struct Convert {
    bool (*widen)(int64_t type, const void *raw, int64_t count, float *out);
    bool (*narrow)(int64_t type, const float *values, int64_t count, void *out);
    bool (*finite)(int64_t type, const void *raw, int64_t count);
};

// NH, the inner part of UMAC: see checksum.cpp.
struct Checksum {
    // Adds the words of which the first has the place `first`; `words` need not be aligned.
    uint64_t (*sum_words)(const void *words, int64_t count, uint64_t first, uint64_t total);
};

// Philox4x32-10: random uint32 for the indices start, start + 1, … of a key.
struct Philox {
    void (*fill)(uint32_t k0, uint32_t k1, int64_t start, int64_t count, uint32_t *out);
};

// The tiles of a block in flat order: where they begin and the last ends, and the members' rows. With
// key[0] scores are not Δ_d but random bits of the flat index, of the key (key[1], key[2]).
struct Tiles {
    const int64_t *edges;
    const Source *expert, *reference;
    const int64_t *key;
};

// What a domain claims of its marks: all above, and the first ties[t] of tile t; counts (tiles, 2)
// is what `mark` found. Null ties: there is nothing to settle.
struct Settlement {
    uint8_t code;
    const int64_t *ties, *counts;
};

// Eq. (occupancy): what a claimed coordinate takes from its owner. `domains` are the rows that own
// anything, keys (count, 2) those of their draws, of which those below `below` drop an entry.
struct Update {
    enum Form : int64_t { ADD, SPARSE, REPLACE };
    int64_t form;
    float scale;
    const int64_t *domains, *keys;
    int64_t count, below;
};

// Sequential occupancy on the tiles [first, last) of a block (Algorithm 1, lines 14-16): claim.cpp.
struct Claim {
    // Histograms of the free coordinates' magnitudes in one run in `every` of each tile.
    void (*count_high)(const Tiles &, const uint8_t *owner, int64_t first, int64_t last, int64_t every,
                       const Settlement &before, uint32_t *histogram);
    void (*count_low)(const Tiles &, const uint8_t *owner, int64_t first, int64_t last, int64_t every,
                      const Settlement &before, uint32_t high, uint32_t *histogram);
    // Settle what was claimed `before`, and mark the free by a threshold: counts (tiles, 2) of those
    // above and tied, Σ|score| of those above. The first tile that is not finite, or −1.
    int64_t (*mark)(const Tiles &, uint8_t *owner, int64_t first, int64_t last, const Settlement &before,
                    int64_t threshold, int64_t *counts, double *mass);
    void (*settle)(const int64_t *edges, uint8_t *owner, int64_t first, int64_t last, const Settlement &);
    // Nonzero scores and their ℓ1 mass by tile where the owner is `code`.
    int64_t (*tally)(const Tiles &, const uint8_t *owner, int64_t first, int64_t last, uint8_t code,
                     int64_t *support, double *mass);
    // The repaired values. Rows of members (count, tiles): the domains, the reference, the anchor.
    // Merged.fine says whether the anchor is finite.
    Merged (*admit)(const Update &, const int64_t *edges, const uint8_t *owner, int64_t first, int64_t last,
                    const Source *members, int64_t count, int64_t tiles, const Source &target);
};

// Inner products in float64, in one order of addition: products.cpp.
struct Products {
    // Add all inner products, tile by tile, to dots (rows, rows): of θ_d − θ_ref, the reference being
    // the last member, with `vectors`; else of all members' values. Whether all squares are finite.
    bool (*gram)(const Source *members, int64_t count, int64_t size, bool vectors, int64_t tile, double *dots);
    // Eq. (views), p and s: ⟨Δ_d, Δ_d'⟩ is added to dots, and to mass Σ_j m_j c_j and Σ_j m_j with
    // m_j = max_d |Δ_d[j]| and c_j = 1 where signs differ. Whether all that is read is finite.
    bool (*signature)(const Source *members, int64_t count, int64_t size, int64_t tile, double *dots, double *mass);
    // Of every vector along an axis: rows (rows, size) seen as (outer, length, inner), and dots
    // (vectors, rows, rows); Σ_d c_d v_d with coefficients (vectors, rows).
    void (*grams_along)(const float *values, int64_t rows, int64_t size, int64_t length, int64_t inner, double *dots);
    void (*combine_along)(const float *values, int64_t rows, int64_t size, int64_t length, int64_t inner,
                          const float *coefficients, float *out);
};

// Updates of low rank on a run of a matrix's coordinates, of which the first has the flat index `skip`:
// low_rank.cpp.
struct LowRank {
    // Add float32(factor · Σ_k left[r, k] · right[k, c]); the factors are float64 that hold float32.
    void (*add)(const double *left, const double *right, int64_t rank, int64_t columns, double factor, int64_t skip,
                float *out, int64_t size);
    // Squares to the sums of rows, or of columns; values times the factor of theirs, rounded once.
    void (*add_squares)(const float *values, int64_t size, int64_t columns, int64_t skip, bool of_rows, double *sums);
    void (*multiply_along)(float *values, int64_t size, int64_t columns, int64_t skip, bool of_rows,
                           const double *factors);
};

// Rules that look at one coordinate of all members at a time: coordinates.cpp. Rows are (rows, size).
struct Coordinates {
    // Count the task vectors' variances by the upper 16 bits of their pattern, or with `upper` ≥ 0 by
    // the lower 15 of those with these upper bits; without, one more place counts zeros.
    bool (*count_variances)(const Source *members, int64_t count, int64_t size, int64_t upper, int64_t *counts);
    // Add each task vector's Σ Δ² over the coordinates whose variance a cut keeps, in lanes of a tile.
    bool (*squares_of_varying)(const Source *members, int64_t count, int64_t size, int64_t threshold, int64_t ties,
                               int64_t tile, double *total);
    // The base, moved by t towards the other value, or to it where that is nearer.
    void (*swap_near)(const float *other, const float *base, int64_t size, float t, float *out);
    // By row, how many entries above a bound stand alone at their coordinate, and how many not.
    void (*count_changes)(const float *values, int64_t rows, int64_t size, float bound, int64_t *alone, int64_t *shared);
    // The mean of the entries above a bound; one that stands alone is multiplied by its row's factor.
    void (*reinforce)(const float *values, int64_t rows, int64_t size, float bound, const float *factors, float *out);
    // The Kullback-Leibler divergence of the softmaxes of rows, in float64; 1e-8 is added to each p.
    void (*divergences)(const float *values, const float *base, int64_t length, int64_t rows, double *out);
    // |v| times the factor of its row; values whose score reaches a bound; numbers by half of a key
    // that is in their order: the upper half, or the lower one of those with `upper`.
    void (*scale_rows)(const float *values, int64_t length, const double *factors, int64_t rows, float *out);
    void (*keep_from)(const float *values, const float *scores, int64_t size, float bound, float *out);
    void (*count_keys)(const float *values, int64_t size, int64_t upper, int64_t *counts);
};

// Weighted sums of stored rows: what many merges come down to.
struct Sums {
    // Σ_d w_d v_d with v_d = θ_d, or θ_d − θ_ref (the last member) with `vectors`; then τ / divisor
    // · factor + share · θ_ref for each row of `after` (steps, 3). Once something is not finite in
    // what a file shall hold, nothing more is written there.
    Merged (*weighted_rows)(const float *weights, int64_t experts, bool vectors, const float *after,
                            int64_t steps, const Source *members, int64_t count, int64_t size,
                            const Source &target);
    void (*add_scaled)(float *total, int64_t count, const float *values, float factor);
    void (*scale)(float *out, int64_t count, float divisor, float factor);
    // One row of `size` a member, minus the reference if there is one.
    bool (*load_rows)(const Source *members, int64_t count, const Source *reference, int64_t size,
                      float *rows);
};

// Exact selection by magnitude: see select.cpp. Members are all experts and the reference; one run
// of SAMPLE_RUN coordinates in `every` is looked at.
struct Select {
    // counts (experts, 2 · 2^16): by the upper 16 bits of |Δ|'s pattern, first where all lower bits
    // are zero.
    bool (*count_high)(const Source *members, int64_t count, int64_t size, const int64_t *experts,
                       int64_t wanted, int64_t every, uint32_t *counts);
    // ranges (experts, 3): first pattern, length, shift. What is left out of an offset goes to
    // left_out (bits, and complements in the upper byte); above[row] gains what lies above.
    bool (*count_inside)(const Source *members, int64_t count, int64_t size, const int64_t *experts,
                         int64_t wanted, int64_t every, const int64_t *ranges, uint32_t *counts,
                         uint16_t *left_out, int64_t places, int64_t *above);
    // Places with a count, which are zero afterwards: kept (3, most) of place, count, left out;
    // `stops` (rows + 1): how many there are in all rows before.
    void (*take_occupied)(uint32_t *counts, uint16_t *left_out, int64_t rows, int64_t places,
                          uint32_t *kept, int64_t most, int64_t *stops);
    // Add counts, and what was left out, to those of the same place, of which `first` is number 0.
    void (*add_run)(const int64_t *places, const int64_t *counts, const int64_t *left_out, int64_t size,
                    int64_t first, int64_t *total_counts, int64_t *total_left_out);
    // The place that holds the k-th largest entry, or −1; `left`: how many are wanted from it.
    int64_t (*bin_of_rank)(const int64_t *histogram, int64_t size, int64_t k, int64_t &left);
    int64_t (*entries)(const int64_t *histogram, int64_t size);
};

// What is done on every strip of a merge: core/merge.py's Formula.
enum Thin : int64_t { KEEP_ALL, TRIM, DROP, PRUNE, BAND, RANK, SELECT, MARKED };
enum Combine : int64_t { SUM, DISJOINT, OVERLAPS, AGREEING };
// Kinds of output beside the stored types, which are one number: the ℓ1 norm of the result; how many
// more coordinates elect + than −.
constexpr int64_t NORM = 3, LEAD = 4;
struct Formula {
    const float *weights;
    int64_t experts;
    bool vectors;
    int64_t thin;
    const int64_t *cuts, *outliers;  // (experts, 2): a pattern, and how many ties
    const int64_t *draws;            // (experts, 3): two words of a key, and a bound
    const double *odds;              // (experts, 2)
    const int64_t *axis;             // length, inner, whether survivors are divided
    const uint8_t *marks;            // (strips, experts, `marked`)
    int64_t marked;
    const float *rescale;            // (experts, 2): factor, divisor
    const int64_t *groups;           // n, m, whether they are filled up
    int64_t combine;
    bool weighted, normalize;
    float cancelled;
    const float *after;              // (steps, 3): divisor, factor, share of the reference
    int64_t steps;
};
struct Merge {
    // Of `size` coordinates from `start` on: into `target`, or added to `number` for NORM and LEAD.
    Merged (*merge)(const Formula &, const Source *members, int64_t count, int64_t start, int64_t size,
                    int64_t tile, int64_t strip, const Source &target, double &number);
    // Adds the ℓ1 norms of task vectors before and after thinning to (2, experts), and marks what
    // stays, a bit each, unless `marks` is null; whether all is finite.
    bool (*measure)(const Formula &, const Source *members, int64_t count, int64_t start, int64_t size,
                    int64_t tile, int64_t strip, double *norms, uint8_t *marks, int64_t marked);
    double (*norm)(const float *values, int64_t count);
    void (*sum_rows)(const float *values, int64_t experts, int64_t stride, const float *weights,
                     int64_t count, float *out);
};

#define SM_FAMILIES(X) \
    X(Convert, convert) \
    X(Checksum, checksums) \
    X(Philox, philox) \
    X(Claim, claims) \
    X(Products, products) \
    X(LowRank, low_rank) \
    X(Coordinates, coordinates) \
    X(Sums, sums) \
    X(Select, select) \
    X(Merge, merging)

// The chosen tables: core.convert->widen(…).
struct Core {
#define SM_MEMBER(Family, name) const Family *name;
    SM_FAMILIES(SM_MEMBER)
#undef SM_MEMBER
};
extern Core core;

}  // namespace sm
