// Exact top-k by magnitude without a sort: the histograms of core/select.py.
#include "select.hpp"

#include "families.hpp"

namespace sm::SM_ISA {

namespace {

constexpr int64_t GROUP = 64;  // coordinates that are looked through one by one if any is in a range

// A run of coordinates of every wanted expert's task vector, one after the other.
class Vectors {
  public:
    Vectors(Scratch &scratch, const Source *members, int64_t count, int64_t size, int64_t strip,
            int64_t every)
        : in_(scratch, members, count, size, strip), delta_(scratch.floats(strip)),
          less_(scratch.floats(strip)), size_(size), strip_(strip), every_(every) {}
    bool next() {
        begin_ = begin_ < 0 ? 0 : begin_ + strip_ * every_;
        if (begin_ >= size_) return false;
        count = least(strip_, size_ - begin_);
        every_ == 1 ? in_.need(begin_, begin_ + count) : in_.only(begin_, begin_ + count);
        fine = load(in_.at[in_.count - 1], in_.types[in_.count - 1], begin_, count, less_) && fine;
        return true;
    }
    const float *of(int64_t expert) {
        fine = load_less(in_.at[expert], in_.types[expert], begin_, count, less_, delta_) && fine;
        return delta_;
    }
    int64_t count = 0;
    bool fine = true;

  private:
    Reader in_;
    float *delta_, *less_;
    int64_t size_, strip_, every_, begin_ = -1;
};

// Places are computed in vectors, and counted one by one.
void count_some(const float *SM_RESTRICT values, int64_t count, uint32_t *SM_RESTRICT histogram) {
    uint32_t places[GROUP];
    for (int64_t i = 0; i < count; i++) places[i] = high_place(bits_of(values[i]));
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) {
        uint32_t a = places[i], b = places[i + 1], c = places[i + 2], d = places[i + 3];
        histogram[a]++;
        histogram[b]++;
        histogram[c]++;
        histogram[d]++;
    }
    for (; i < count; i++) histogram[places[i]]++;
}

bool count_high(const Source *members, int64_t count, int64_t size, const int64_t *experts,
                int64_t wanted, int64_t every, uint32_t *counts) {
    Scratch scratch;
    Vectors vectors(scratch, members, count, size, SAMPLE_RUN, every);
    while (vectors.next())
        for (int64_t row = 0; row < wanted; row++) {
            const float *delta = vectors.of(experts[row]);
            uint32_t *histogram = counts + row * HIGH_PLACES;
            for (int64_t begin = 0; begin < vectors.count; begin += GROUP)
                count_some(delta + begin, least(GROUP, vectors.count - begin), histogram);
        }
    return vectors.fine;
}

struct Range {
    uint32_t lowest, width;
};
struct Hits {
    uint32_t above, inside;
};

// How many magnitudes lie above a range, and how many inside.
Hits count_range(const float *values, int64_t count, Range range) {
    uint32_t above = 0, inside = 0, top = range.lowest + range.width;
    for (int64_t i = 0; i < count; i++) {
        uint32_t magnitude = bits_of(values[i]) & MAGNITUDE;
        above += magnitude >= top;
        inside += magnitude - range.lowest < range.width;
    }
    return {above, inside};
}

// Write the offsets inside a range behind the first `found`; returns how many there are now.
int64_t append(const float *values, int64_t count, Range range, uint32_t *inside, int64_t found) {
    for (int64_t i = 0; i < count; i++) {
        // Adding 0 or 1 keeps the loop free of a branch that no one can predict.
        uint32_t offset = (bits_of(values[i]) & MAGNITUDE) - range.lowest;
        inside[found] = offset;
        found += offset < range.width;
    }
    return found;
}

// The offsets inside a range, of which there are `hits`.
void gather(const float *values, int64_t count, Range range, int64_t hits, uint32_t *inside) {
    if (hits * GROUP > count) {
        append(values, count, range, inside, 0);
        return;
    }
    int64_t found = 0;
    for (int64_t begin = 0; begin < count && found < hits; begin += GROUP) {  // most have none
        int64_t some = least(GROUP, count - begin);
        if (count_range(values + begin, some, range).inside)
            found = append(values + begin, some, range, inside, found);
    }
}

void count_places(const uint32_t *offsets, int64_t count, int64_t shift, uint32_t *counts,
                  uint16_t *left_out) {
    uint32_t mask = (1u << shift) - 1;
    for (int64_t i = 0; i < count; i++) {
        uint32_t place = offsets[i] >> shift, last = offsets[i] & mask;
        counts[place]++;
        left_out[place] |= static_cast<uint16_t>(last | (last ^ mask) << 8);
    }
}

bool count_inside(const Source *members, int64_t count, int64_t size, const int64_t *experts,
                  int64_t wanted, int64_t every, const int64_t *ranges, uint32_t *counts,
                  uint16_t *left_out, int64_t places, int64_t *above) {
    Scratch scratch;
    int64_t strip = every == 1 ? STRIP : SAMPLE_RUN;
    Vectors vectors(scratch, members, count, size, strip, every);
    uint32_t *inside = scratch.words(strip + 1);
    while (vectors.next())
        for (int64_t row = 0; row < wanted; row++) {
            const int64_t *own = ranges + 3 * row;
            Range range = {static_cast<uint32_t>(own[0]), static_cast<uint32_t>(own[1])};
            const float *delta = vectors.of(experts[row]);
            Hits hits = count_range(delta, vectors.count, range);
            above[row] += hits.above;
            if (range.width == 1) {
                counts[row * places] += hits.inside;
            } else if (hits.inside) {
                gather(delta, vectors.count, range, hits.inside, inside);
                count_places(inside, hits.inside, own[2], counts + row * places, left_out + row * places);
            }
        }
    return vectors.fine;
}

void take_occupied(uint32_t *counts, uint16_t *left_out, int64_t rows, int64_t places,
                   uint32_t *kept, int64_t most, int64_t *stops) {
    int64_t found = 0;
    for (int64_t row = 0; row < rows; row++, counts += places) {
        for (int64_t begin = 0; begin < places; begin += GROUP) {  // most places are empty
            int64_t end = least(begin + GROUP, places);
            uint32_t any = 0;
            for (int64_t i = begin; i < end; i++) any |= counts[i];
            if (!any) continue;
            for (int64_t i = begin; i < end; i++) {
                if (!counts[i]) continue;
                kept[found] = static_cast<uint32_t>(i);
                kept[most + found] = counts[i];
                kept[2 * most + found] = left_out ? left_out[row * places + i] : 0;
                counts[i] = 0;
                if (left_out) left_out[row * places + i] = 0;
                found++;
            }
        }
        stops[row + 1] = found;
    }
}

void add_run(const int64_t *places, const int64_t *counts, const int64_t *left_out, int64_t size,
             int64_t first, int64_t *total_counts, int64_t *total_left_out) {
    for (int64_t i = 0; i < size; i++) {
        int64_t place = places[i] - first;
        total_counts[place] += counts[i];
        total_left_out[place] |= left_out[i];
    }
}

int64_t bin_of_rank(const int64_t *histogram, int64_t size, int64_t k, int64_t &left) {
    left = k;
    for (int64_t place = size - 1; place >= 0; place--) {
        if (histogram[place] >= left) return place;
        left -= histogram[place];
    }
    return -1;
}

int64_t entries(const int64_t *histogram, int64_t size) {
    int64_t total = 0;
    for (int64_t i = 0; i < size; i++) total += histogram[i];
    return total;
}

}  // namespace

extern const Select select;
const Select select = {count_high, count_inside, take_occupied, add_run, bin_of_rank, entries};

}  // namespace sm::SM_ISA
