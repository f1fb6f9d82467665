// Thinning a row of a task vector out: by cuts, by groups, at random, at random with a rank's odds.
#pragma once

#include "select.hpp"

namespace sm::SM_ISA {

constexpr int64_t ALL = -1;                          // a threshold or bound that keeps every entry
constexpr int64_t ANY_TIES = int64_t{1} << 62;       // more ties than there can be

// Where a top-k ends: everything above the pattern stays, and the first `ties` entries equal to it.
struct Cut {
    int64_t threshold, ties;
};
struct Key {
    uint32_t first, second;
};

// The least magnitude's pattern that a cut keeps, some or all of its ties among them; not above
// zero if it keeps ALL.
int32_t least_kept(const Cut &);
// Zero what lies below a cut, and ties after the first ones; the cut has what ties are left.
void trim(float *row, int64_t count, Cut &);
// The second half of `trim`, where what lies below the cut is zero.
void keep_ties(float *row, int64_t count, Cut &);
// Zero what lies above a cut, and the first ties; as `trim`.
void clear_top(float *row, int64_t count, Cut &);
// Keep an entry if its draw lies below `keep`, at most 2^32. `drawn` is room.
void drop(float *row, int64_t count, Key, int64_t start, int64_t keep, uint32_t *drawn);

// n:m pruning (CABS) of one expert's row: a group keeps its n largest entries that no earlier expert
// has taken. With `overlap`, a group that runs out of free entries fills up from taken ones. Ties go
// to the lowest index; a tail shorter than m is zeroed. `scores` has room for a group.
struct Groups {
    int64_t n, m;
    bool overlap;
};
void prune_groups(float *row, int64_t count, const Groups &, uint8_t *taken, uint32_t *scores);

// Each entry is kept with a probability that depends on its rank among the magnitudes along an axis;
// equal ones rank by index. Seen along it a row is (…, length, inner). With `inverse` a survivor is
// divided by its probability.
struct Axis {
    int64_t length, inner;
    bool inverse;
};
class Ranks {
  public:
    Ranks(Scratch &, const Axis &, int64_t strip);
    SM_INLINE void *operator new(size_t, void *room) { return room; }  // <new> is a standard header
    void prune(float *row, int64_t count, Key, int64_t start, double least_odds, double most_odds);

  private:
    void prune_one(float *row, const uint32_t *draws);
    int64_t rank();
    void place(int64_t found, int bits);
    void sort(int bits);
    int squeeze();
    Axis axis_;
    double *odds_, least_ = -1, most_ = -1;
    uint32_t *lasts_, *drawn_, *keys_, *ranks_, *seen_, *spare_, *counts_;
};

// A bit for each entry, eight to a byte: whether it is not zero. The n-th bits of all bytes are those
// of the n-th eighth of the entries.
void mark(const float *row, int64_t count, uint8_t *marks);
// Zero the entries whose bit is not set.
void keep_marked(float *row, int64_t count, const uint8_t *marks);

}  // namespace sm::SM_ISA
