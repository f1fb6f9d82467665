#include "thinning.hpp"

namespace sm::SM_ISA {

namespace {

constexpr int DIGIT = 11;         // bits of a key that one pass of a sort looks at, at most
constexpr int COUNTED_BITS = 20;  // bits of a key that has a count of its own, at most
// A count for each such key, a bit for each in words of 32, and a bit for each word.
constexpr int64_t WORDS_AT = int64_t{1} << COUNTED_BITS, GROUPS_AT = WORDS_AT + (WORDS_AT >> 5);
constexpr int64_t COUNTS = GROUPS_AT + (WORDS_AT >> 10);

SM_INLINE float kept(float value, bool holds) { return as_float(bits_of(value) & (0u - holds)); }

void keep_from(float *row, int64_t count, int32_t from) {
    for (int64_t i = 0; i < count; i++)
        row[i] = kept(row[i], static_cast<int32_t>(bits_of(row[i]) & MAGNITUDE) >= from);
}

// How many scores reach a bound.
int64_t reached(const uint32_t *scores, int64_t count, uint32_t bound) {
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++) found += scores[i] >= bound;
    return found;
}

}  // namespace

int32_t least_kept(const Cut &cut) {
    if (cut.ties > 0) return static_cast<int32_t>(cut.threshold);
    return static_cast<int32_t>(least(cut.threshold, 0x7FFFFFFE) + 1);
}

void trim(float *row, int64_t count, Cut &cut) {
    keep_from(row, count, least_kept(cut));
    keep_ties(row, count, cut);
}

void keep_ties(float *row, int64_t count, Cut &cut) {
    if (cut.ties == 0 || cut.ties >= ANY_TIES) return;
    uint32_t tied = 0, pattern = static_cast<uint32_t>(cut.threshold);
    for (int64_t i = 0; i < count; i++) tied += (bits_of(row[i]) & MAGNITUDE) == pattern;
    if (tied <= cut.ties) {
        cut.ties -= tied;
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        bool is_tie = (bits_of(row[i]) & MAGNITUDE) == pattern;
        row[i] = kept(row[i], !is_tie || cut.ties > 0);
        cut.ties -= is_tie && cut.ties > 0;
    }
}

void clear_top(float *row, int64_t count, Cut &cut) {
    int32_t pattern = static_cast<int32_t>(cut.threshold);
    if (cut.ties > 0 && cut.ties < ANY_TIES) {
        for (int64_t i = 0; i < count; i++) {
            int32_t magnitude = static_cast<int32_t>(bits_of(row[i]) & MAGNITUDE);
            bool tied = magnitude == pattern && cut.ties > 0;
            cut.ties -= tied;
            row[i] = kept(row[i], magnitude <= pattern && !tied);
        }
        return;
    }
    int32_t most = pattern - (cut.ties > 0);
    for (int64_t i = 0; i < count; i++)
        row[i] = kept(row[i], static_cast<int32_t>(bits_of(row[i]) & MAGNITUDE) <= most);
}

void drop(float *row, int64_t count, Key key, int64_t start, int64_t keep, uint32_t *SM_RESTRICT drawn) {
    if (keep <= 0) {
        for (int64_t i = 0; i < count; i++) row[i] = 0;
        return;
    }
    fill(key.first, key.second, start, count, drawn);
    uint32_t last = static_cast<uint32_t>(keep - 1);
    for (int64_t i = 0; i < count; i++) row[i] = kept(row[i], drawn[i] <= last);
}

void prune_groups(float *row, int64_t count, const Groups &groups, uint8_t *taken,
                  uint32_t *SM_RESTRICT scores) {
    // A score is 0 for what is not to be had, else one more than a magnitude, or than any.
    constexpr uint32_t ABOVE_ALL = 0x80000001;
    int64_t m = groups.m, whole = count / m * m;
    for (int64_t base = 0; base < whole; base += m) {
        float *SM_RESTRICT own = row + base;
        uint8_t *SM_RESTRICT before = taken + base;
        int64_t free = 0;
        for (int64_t i = 0; i < m; i++) {
            uint32_t is_free = before[i] == 0;
            scores[i] = ((bits_of(own[i]) & MAGNITUDE) + 1) & (0u - is_free);
            free += is_free;
        }
        int64_t wanted = groups.n;
        if (groups.overlap && free < wanted)  // every free entry first, taken ones by magnitude
            for (int64_t i = 0; i < m; i++) {
                uint32_t is_free = 0u - (before[i] == 0);
                scores[i] = (is_free & ABOVE_ALL) | (~is_free & ((bits_of(own[i]) & MAGNITUDE) + 1));
            }
        wanted = least(wanted, groups.overlap ? m : free);
        // The score of the last one that stays, bit by bit from the top.
        uint32_t threshold = 0;
        for (uint32_t bit = 0x80000000; bit && wanted; bit >>= 1)
            if (reached(scores, m, threshold | bit) >= wanted) threshold |= bit;
        int64_t ties = wanted;
        for (int64_t i = 0; i < m; i++) ties -= scores[i] > threshold;
        for (int64_t i = 0; i < m; i++) {
            bool tied = scores[i] == threshold && ties > 0;
            bool stays = wanted && (scores[i] > threshold || tied);
            ties -= tied;
            own[i] = kept(own[i], stays);
            before[i] |= static_cast<uint8_t>(stays);
        }
    }
    for (int64_t i = whole; i < count; i++) row[i] = 0;
}

Ranks::Ranks(Scratch &scratch, const Axis &axis, int64_t strip)
    : axis_(axis), odds_(scratch.doubles(axis.length)), lasts_(scratch.words(axis.length)),
      drawn_(scratch.words(strip)), keys_(scratch.words(axis.length)), ranks_(scratch.words(axis.length)),
      seen_(scratch.words(axis.length + 1)), spare_(scratch.words(axis.length)),
      counts_(scratch.words(COUNTS)) {
    __builtin_memset(counts_, 0, COUNTS * 4);
}

void Ranks::prune(float *row, int64_t count, Key key, int64_t start, double least_odds, double most_odds) {
    if (least_odds != least_ || most_odds != most_) {
        least_ = least_odds;
        most_ = most_odds;
        double step = (most_odds - least_odds) / static_cast<double>(axis_.length > 1 ? axis_.length - 1 : 1);
        for (int64_t rank = 0; rank < axis_.length; rank++) {
            odds_[rank] = least_odds + step * static_cast<double>(rank);
            // The highest draw that keeps an entry of this rank.
            double last = __builtin_ceil(odds_[rank] * 0x1p32) - 1;
            last = last > 0 ? last : 0;
            lasts_[rank] = static_cast<uint32_t>(last < 4294967295.0 ? last : 4294967295.0);
        }
    }
    fill(key.first, key.second, start, count, drawn_);
    int64_t inner = axis_.inner, whole = axis_.length * inner;
    for (int64_t outer = 0; outer + whole <= count; outer += whole) {
        if (inner == 1) {
            prune_one(row + outer, drawn_ + outer);
            continue;
        }
        for (int64_t first = outer; first < outer + inner; first++) {
            for (int64_t k = 0; k < axis_.length; k++) keys_[k] = bits_of(row[first + k * inner]) & MAGNITUDE;
            int64_t found = rank();
            for (int64_t k = 0; k < axis_.length; k++) {
                uint32_t own = ranks_[k] + counts_[keys_[k]];
                float &value = row[first + k * inner];
                if (axis_.inverse) value /= static_cast<float>(odds_[own]);
                value = kept(value, drawn_[first + k * inner] <= lasts_[own]);
            }
            for (int64_t i = 0; i < found; i++) counts_[seen_[i]] = 0;
        }
    }
}

void Ranks::prune_one(float *SM_RESTRICT row, const uint32_t *SM_RESTRICT draws) {
    int64_t length = axis_.length;
    uint32_t *SM_RESTRICT keys = keys_, *SM_RESTRICT ranks = ranks_;
    const uint32_t *SM_RESTRICT lasts = lasts_, *SM_RESTRICT counts = counts_;
    for (int64_t k = 0; k < length; k++) keys[k] = bits_of(row[k]) & MAGNITUDE;
    int64_t found = rank();
    // One table a loop: a loop that looks up in two, one place given by the other, takes twice as
    // long as both.
    for (int64_t k = 0; k < length; k++) ranks[k] += counts[keys[k]];
    if (axis_.inverse)
        for (int64_t k = 0; k < length; k++) row[k] /= static_cast<float>(odds_[ranks[k]]);
    for (int64_t k = 0; k < length; k++) keys[k] = lasts[ranks[k]];
    for (int64_t k = 0; k < length; k++) row[k] = kept(row[k], draws[k] <= keys[k]);
    for (int64_t i = 0; i < found; i++) counts_[seen_[i]] = 0;
}

// Rank keys, equal ones by index: the rank of entry i is ranks[i] + counts[keys[i]]. Few bits tell
// the differences of stored halves apart: each such key has a count. Others are sorted, and become
// the key 0. Returns how many keys of `seen` have counts, which the caller clears.
int64_t Ranks::rank() {
    int bits = squeeze();
    if (bits > COUNTED_BITS) {
        sort(bits);
        for (int64_t i = 0; i < axis_.length; i++) keys_[i] = 0;
        return 0;
    }
    int64_t found = 0;
    for (int64_t i = 0; i < axis_.length; i++) {
        uint32_t key = keys_[i], before = counts_[key];
        ranks_[i] = before;
        counts_[key] = before + 1;
        // Adding 0 or 1 keeps the loop free of a branch that no one can predict.
        seen_[found] = key;
        found += before == 0;
    }
    place(found, bits);
    return found;
}

// Turn the counts of the keys that were seen into sums of all before. A bit for each key, and one for
// each word of those, bring them in order.
void Ranks::place(int64_t found, int bits) {
    uint32_t *words = counts_ + WORDS_AT, *groups = counts_ + GROUPS_AT;
    for (int64_t i = 0; i < found; i++) {
        uint32_t word = seen_[i] >> 5;
        words[word] |= 1u << (seen_[i] & 31);
        groups[word >> 5] |= 1u << (word & 31);
    }
    uint32_t total = 0;
    for (uint32_t group = 0; group < 1u << (bits > 10 ? bits - 10 : 0); group++) {
        uint32_t left = groups[group];
        groups[group] = 0;
        for (; left; left &= left - 1) {
            uint32_t word = group << 5 | static_cast<uint32_t>(__builtin_ctz(left)), keys = words[word];
            words[word] = 0;
            for (; keys; keys &= keys - 1) {
                uint32_t key = word << 5 | static_cast<uint32_t>(__builtin_ctz(keys)), own = counts_[key];
                counts_[key] = total;
                total += own;
            }
        }
    }
}

// Rank keys of so many bits by counting, a digit at a time; the last pass leaves ranks.
void Ranks::sort(int bits) {
    int passes = (bits + DIGIT - 1) / DIGIT, width = (bits + passes - 1) / passes;
    uint32_t mask = (1u << width) - 1, places[1 << DIGIT];
    uint32_t *source = seen_, *target = spare_;
    for (int64_t i = 0; i < axis_.length; i++) source[i] = static_cast<uint32_t>(i);
    for (int number = 0; number < passes; number++) {
        int shift = number * width;
        for (uint32_t digit = 0; digit <= mask; digit++) places[digit] = 0;
        for (int64_t i = 0; i < axis_.length; i++) places[(keys_[i] >> shift) & mask]++;
        uint32_t before = 0;
        for (uint32_t digit = 0; digit <= mask; digit++) {
            uint32_t own = places[digit];
            places[digit] = before;
            before += own;
        }
        bool last = number == passes - 1;
        for (int64_t i = 0; i < axis_.length; i++) {
            uint32_t k = source[i], place = places[(keys_[k] >> shift) & mask]++;
            if (last)
                ranks_[k] = place;
            else
                target[place] = k;
        }
        uint32_t *other = source;
        source = target;
        target = other;
    }
}

// Make keys small in the same order; returns how many bits the highest has. Bits that are zero in
// all of them go, and the gap between zero and the lowest other key.
int Ranks::squeeze() {
    uint32_t lowest = 0xFFFFFFFF, highest = 0, ones = 0, *SM_RESTRICT keys = keys_;
    const int64_t length = axis_.length;
    for (int64_t i = 0; i < length; i++) {
        uint32_t key = keys[i];
        lowest = key - 1 < lowest ? key - 1 : lowest;
        highest = key > highest ? key : highest;
        ones |= key;
    }
    if (!ones) return 0;
    int shift = __builtin_ctz(ones);
    uint32_t gap = lowest >> shift;
    for (int64_t i = 0; i < length; i++) keys[i] = ((keys[i] >> shift) - gap) & (0u - (keys[i] != 0));
    uint32_t most = (highest >> shift) - gap;
    return most ? 32 - __builtin_clz(most) : 0;
}

void mark(const float *row, int64_t count, uint8_t *SM_RESTRICT marks) {
    int64_t width = (count + 7) / 8;
    for (int64_t i = 0; i < width; i++) marks[i] = 0;
    for (int eighth = 0; eighth < 8; eighth++) {
        const float *SM_RESTRICT some = row + eighth * width;
        int64_t length = least(width, count - eighth * width);
        for (int64_t i = 0; i < length; i++)
            marks[i] = static_cast<uint8_t>(marks[i] | (bits_of(some[i]) != 0) << eighth);
    }
}

void keep_marked(float *row, int64_t count, const uint8_t *SM_RESTRICT marks) {
    int64_t width = (count + 7) / 8;
    for (int eighth = 0; eighth < 8; eighth++) {
        float *SM_RESTRICT some = row + eighth * width;
        int64_t length = least(width, count - eighth * width);
        for (int64_t i = 0; i < length; i++) some[i] = kept(some[i], (marks[i] >> eighth) & 1);
    }
}

}  // namespace sm::SM_ISA
