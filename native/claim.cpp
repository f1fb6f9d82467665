// Sequential occupancy on tiles: the loops of Algorithm 1, lines 14-16.
//
// The owner map is one byte per coordinate: a domain's index, or FREE. While a domain claims, the
// free coordinates carry two provisional codes as well, ABOVE and TIED, so that a claim whose
// threshold was guessed can be marked again, and ties can be counted over all tiles before the first
// of them is handed out. Every code from ABOVE on is therefore free until a domain's marks are
// settled, which happens while the next domain marks.
#include "families.hpp"
#include "select.hpp"

namespace sm::SM_ISA {

namespace {

constexpr uint8_t ABOVE = 253, TIED = 254, FREE = 255;

SM_INLINE uint32_t all_if(bool holds) { return 0u - holds; }
SM_INLINE float chosen(uint32_t mask, float one, float other) {
    return as_float((bits_of(one) & mask) | (bits_of(other) & ~mask));
}

// The scores of one tile, a strip at a time: Δ_d, or random bits of the flat index.
class Scores {
  public:
    Scores(Scratch &scratch, const Tiles &tiles, int64_t tile, int64_t strip)
        : begin(tiles.edges[tile]), size(tiles.edges[tile + 1] - begin), tiles_(tiles),
          pair_{tiles.key[0] ? Source{F32, MEMORY, 0} : tiles.expert[tile],
                tiles.key[0] ? Source{F32, MEMORY, 0} : tiles.reference[tile]},
          in_(scratch, pair_, 2, size, strip), room_(scratch.floats(strip)), out_(scratch.floats(strip)) {}
    // Of `count` coordinates from `at` on; `alone`: those that follow are not read.
    const float *take(int64_t at, int64_t count, bool alone) {
        if (tiles_.key[0]) {
            fill(static_cast<uint32_t>(tiles_.key[1]), static_cast<uint32_t>(tiles_.key[2]), begin + at, count,
                 reinterpret_cast<uint32_t *>(out_));
            return out_;
        }
        alone ? in_.only(at, at + count) : in_.need(at, at + count);
        fine = load_difference(in_.at[0], in_.types[0], in_.at[1], in_.types[1], at, count, room_, out_) && fine;
        return out_;
    }
    const int64_t begin, size;
    bool fine = true;

  private:
    const Tiles &tiles_;
    const Source pair_[2];
    Reader in_;
    float *room_, *out_;
};

// The least code of a free coordinate while `before` is not settled yet. Of a tile some of whose
// ties are claimed, all count as free: few tiles, which a sample may have.
uint8_t least_free(const Settlement &before, int64_t tile) {
    if (!before.ties) return ABOVE;
    return before.ties[tile] == before.counts[2 * tile + 1] ? FREE : TIED;
}

void count_high(const Tiles &tiles, const uint8_t *owner, int64_t first, int64_t last, int64_t every,
                const Settlement &before, uint32_t *histogram) {
    for (int64_t tile = first; tile < last; tile++) {
        Scratch scratch;
        Scores scores(scratch, tiles, tile, SAMPLE_RUN);
        uint32_t *places = scratch.words(SAMPLE_RUN);
        const uint8_t *here = owner + scores.begin;
        const uint8_t free = least_free(before, tile);
        for (int64_t at = 0; at < scores.size; at += SAMPLE_RUN * every) {
            int64_t count = least(SAMPLE_RUN, scores.size - at);
            const float *delta = scores.take(at, count, every > 1);
            for (int64_t i = 0; i < count; i++) places[i] = high_place(bits_of(delta[i]));
            // Adding 0 or 1 keeps the loop free of a branch that no one can predict.
            for (int64_t i = 0; i < count; i++) histogram[places[i]] += here[at + i] >= free;
        }
    }
}

void count_low(const Tiles &tiles, const uint8_t *owner, int64_t first, int64_t last, int64_t every,
               const Settlement &before, uint32_t high, uint32_t *histogram) {
    for (int64_t tile = first; tile < last; tile++) {
        Scratch scratch;
        Scores scores(scratch, tiles, tile, SAMPLE_RUN);
        uint32_t *inside = scratch.words(SAMPLE_RUN + 1);
        const uint8_t *here = owner + scores.begin;
        const uint8_t free = least_free(before, tile);
        for (int64_t at = 0; at < scores.size; at += SAMPLE_RUN * every) {
            int64_t count = least(SAMPLE_RUN, scores.size - at), found = 0;
            const float *delta = scores.take(at, count, every > 1);
            for (int64_t i = 0; i < count; i++) {
                uint32_t magnitude = bits_of(delta[i]) & MAGNITUDE;
                inside[found] = magnitude & (LOW_BINS - 1);
                found += (magnitude >> LOW_BITS == high) & (here[at + i] >= free);
            }
            for (int64_t i = 0; i < found; i++) histogram[inside[i]]++;
        }
    }
}

// Hand out what a domain marked in a tile: all above, and the first `ties` of `tied` coordinates.
void settle_tile(uint8_t *SM_RESTRICT owner, int64_t size, uint8_t code, int64_t ties, int64_t tied) {
    int64_t end = ties == tied ? size : 0;
    for (int64_t left = ties < tied ? ties : 0; left > 0 && end < size; end++)
        left -= owner[end] == TIED;
    for (int64_t i = 0; i < end; i++) {
        uint8_t marked = static_cast<uint8_t>(-((owner[i] == ABOVE) | (owner[i] == TIED)));
        owner[i] = static_cast<uint8_t>((code & marked) | (owner[i] & ~marked));
    }
    for (int64_t i = end; i < size; i++) {
        uint8_t above = static_cast<uint8_t>(-(owner[i] == ABOVE)), freed = static_cast<uint8_t>(-(owner[i] == TIED));
        owner[i] = static_cast<uint8_t>((code & above) | ((owner[i] | freed) & ~above));
    }
}

void settle(const int64_t *edges, uint8_t *owner, int64_t first, int64_t last, const Settlement &marks) {
    for (int64_t tile = first; tile < last; tile++)
        settle_tile(owner + edges[tile], edges[tile + 1] - edges[tile], marks.code, marks.ties[tile],
                    marks.counts[2 * tile + 1]);
}

struct Marked {
    int64_t above, tied;
};

// Mark what is free in a strip: ABOVE, TIED or FREE.
Marked mark_strip(const float *SM_RESTRICT delta, int64_t count, int32_t cut, uint8_t *SM_RESTRICT owner) {
    uint8_t codes[STRIP];
    for (int64_t i = 0; i < count; i++) {
        int32_t magnitude = static_cast<int32_t>(bits_of(delta[i]) & MAGNITUDE);
        codes[i] = static_cast<uint8_t>(FREE - (magnitude > cut) - (magnitude >= cut));
    }
    // A strip's counts fit into 16 bits, of which a vector holds many.
    uint16_t above = 0, tied = 0;
    for (int64_t i = 0; i < count; i++) {
        uint8_t free = static_cast<uint8_t>(-(owner[i] >= ABOVE));
        uint8_t code = static_cast<uint8_t>((codes[i] & free) | (owner[i] & ~free));
        owner[i] = code;
        above = static_cast<uint16_t>(above + (code == ABOVE));
        tied = static_cast<uint16_t>(tied + (code == TIED));
    }
    return {above, tied};
}

// Add |value| where the owner is `code`: float64, entry i to lane i mod 64, which fixes the order.
void add_mass(const float *SM_RESTRICT values, const uint8_t *SM_RESTRICT owner, int64_t count, uint8_t code,
              double *SM_RESTRICT lanes) {
    int64_t begin = 0;
    for (; begin + LANES <= count; begin += LANES)
        for (int64_t i = 0; i < LANES; i++) {
            uint32_t own = all_if(owner[begin + i] == code);
            lanes[i] += static_cast<double>(as_float(bits_of(values[begin + i]) & MAGNITUDE & own));
        }
    for (int64_t i = 0; begin + i < count; i++) {
        uint32_t own = all_if(owner[begin + i] == code);
        lanes[i] += static_cast<double>(as_float(bits_of(values[begin + i]) & MAGNITUDE & own));
    }
}

double total_of(const double *lanes) {
    double total = 0;
    for (int64_t i = 0; i < LANES; i++) total += lanes[i];
    return total;
}

int64_t mark(const Tiles &tiles, uint8_t *owner, int64_t first, int64_t last, const Settlement &before,
             int64_t threshold, int64_t *counts, double *mass) {
    int64_t wrong = -1;
    for (int64_t tile = first; tile < last; tile++) {
        Scratch scratch;
        Scores scores(scratch, tiles, tile, STRIP);
        double *lanes = scratch.zeros(LANES);
        uint8_t *here = owner + scores.begin;
        if (before.ties)
            settle_tile(here, scores.size, before.code, before.ties[tile], before.counts[2 * tile + 1]);
        Marked all = {0, 0};
        for (int64_t at = 0; at < scores.size; at += STRIP) {
            int64_t count = least(STRIP, scores.size - at);
            const float *delta = scores.take(at, count, false);
            Marked some = mark_strip(delta, count, static_cast<int32_t>(threshold), here + at);
            all = {all.above + some.above, all.tied + some.tied};
            if (some.above) add_mass(delta, here + at, count, ABOVE, lanes);
        }
        counts[2 * tile] = all.above;
        counts[2 * tile + 1] = all.tied;
        mass[tile] = total_of(lanes);
        if (!scores.fine && wrong < 0) wrong = tile;
    }
    return wrong;
}

int64_t support_of(const float *SM_RESTRICT values, const uint8_t *SM_RESTRICT owner, int64_t count, uint8_t code) {
    uint32_t found = 0;
    for (int64_t i = 0; i < count; i++)
        found += all_if(owner[i] == code) & ((bits_of(values[i]) & MAGNITUDE) != 0);
    return found;
}

int64_t tally(const Tiles &tiles, const uint8_t *owner, int64_t first, int64_t last, uint8_t code,
              int64_t *support, double *mass) {
    int64_t wrong = -1;
    for (int64_t tile = first; tile < last; tile++) {
        Scratch scratch;
        Scores scores(scratch, tiles, tile, STRIP);
        double *lanes = scratch.zeros(LANES);
        const uint8_t *here = owner + scores.begin;
        support[tile] = 0;
        for (int64_t at = 0; at < scores.size; at += STRIP) {
            int64_t count = least(STRIP, scores.size - at);
            const float *delta = scores.take(at, count, false);
            support[tile] += support_of(delta, here + at, count, code);
            add_mass(delta, here + at, count, code, lanes);
        }
        mass[tile] = total_of(lanes);
        if (!scores.fine && wrong < 0) wrong = tile;
    }
    return wrong;
}

struct Strip {
    float *SM_RESTRICT values;
    const uint8_t *SM_RESTRICT owner;
    int64_t count;
};

void add(const Strip &strip, uint8_t code, const float *SM_RESTRICT delta, float factor) {
    float *SM_RESTRICT values = strip.values;
    const uint8_t *SM_RESTRICT owner = strip.owner;
    for (int64_t i = 0; i < strip.count; i++)
        values[i] = chosen(all_if(owner[i] == code), values[i] + factor * delta[i], values[i]);
}

// As `add`, but an entry whose draw lies below the bound is dropped.
void add_kept(const Strip &strip, uint8_t code, const float *SM_RESTRICT delta, float factor,
              const uint32_t *SM_RESTRICT draws, int64_t below) {
    float *SM_RESTRICT values = strip.values;
    const uint8_t *SM_RESTRICT owner = strip.owner;
    if (below > UINT32_MAX) return;
    const uint32_t bound = static_cast<uint32_t>(below);
    for (int64_t i = 0; i < strip.count; i++) {
        uint32_t kept = all_if(owner[i] == code) & all_if(draws[i] >= bound);
        values[i] = chosen(kept, values[i] + factor * delta[i], values[i]);
    }
}

// Move from the anchor's value to the expert's by `factor`. At 1 the expert's own value is taken,
// which anchor + (expert − anchor) may miss.
void replace(const Strip &strip, uint8_t code, const float *SM_RESTRICT own, float factor) {
    float *SM_RESTRICT values = strip.values;
    const uint8_t *SM_RESTRICT owner = strip.owner;
    const uint32_t whole = all_if(factor == 1);
    for (int64_t i = 0; i < strip.count; i++) {
        float moved = values[i] + factor * (own[i] - values[i]);
        values[i] = chosen(all_if(owner[i] == code), chosen(whole, own[i], moved), values[i]);
    }
}

// One domain's update of a strip that begins at the flat index `index` of the block.
struct Rooms {
    float *less, *delta;
    uint32_t *draws;
};

void take_update(const Update &update, int64_t row, const Reader &in, int64_t at, int64_t index,
                 const Strip &strip, const Rooms &rooms) {
    const uint8_t code = static_cast<uint8_t>(update.domains[row]);
    const int64_t base = update.count, count = strip.count;
    if (update.form == Update::REPLACE) {
        load(in.at[row], in.types[row], at, count, rooms.delta);
        replace(strip, code, rooms.delta, update.scale);
        return;
    }
    load_difference(in.at[row], in.types[row], in.at[base], in.types[base], at, count, rooms.less, rooms.delta);
    if (update.form == Update::ADD) {
        add(strip, code, rooms.delta, update.scale);
        return;
    }
    const int64_t *key = update.keys + 2 * row;
    fill(static_cast<uint32_t>(key[0]), static_cast<uint32_t>(key[1]), index, count, rooms.draws);
    add_kept(strip, code, rooms.delta, update.scale, rooms.draws, update.below);
}

Merged admit(const Update &update, const int64_t *edges, const uint8_t *owner, int64_t first, int64_t last,
             const Source *members, int64_t count, int64_t tiles, const Source &target) {
    Scratch all;
    Sink out(all, target, edges[last] - edges[first]);
    const int64_t anchor = update.count + 1;
    float *values = all.floats(STRIP);
    Rooms rooms = {all.floats(STRIP), all.floats(STRIP), all.words(STRIP)};
    // The members that are read: the domains that own anything, the reference, the anchor.
    Source *read = static_cast<Source *>(all.bytes((update.count + 2) * static_cast<int64_t>(sizeof(Source))));
    bool fine = true, stored = true;
    for (int64_t tile = first; tile < last; tile++) {
        Scratch scratch;
        for (int64_t row = 0; row < update.count; row++) read[row] = members[update.domains[row] * tiles + tile];
        read[anchor] = members[(count - 1) * tiles + tile];
        read[update.count] = update.form == Update::REPLACE ? Source{F32, MEMORY, 0} : members[(count - 2) * tiles + tile];
        const int64_t begin = edges[tile], size = edges[tile + 1] - begin;
        Reader in(scratch, read, update.count + 2, size);
        for (int64_t at = 0; at < size; at += STRIP) {
            Strip strip = {values, owner + begin + at, least(STRIP, size - at)};
            in.need(at, at + strip.count);
            fine = load(in.at[anchor], in.types[anchor], at, strip.count, values) && fine;
            for (int64_t row = 0; row < update.count; row++)
                take_update(update, row, in, at, begin + at, strip, rooms);
            const int64_t place = begin - edges[first] + at;
            stored = save(values, strip.count, out.at, out.type, place) && stored;
            if (target.descriptor != MEMORY && !(fine && stored)) return {fine, false, out.checksum};
            out.drain(place + strip.count);
        }
    }
    return {fine, stored, out.checksum};
}

}  // namespace

extern const Claim claims;
const Claim claims = {count_high, count_low, mark, settle, tally, admit};

}  // namespace sm::SM_ISA
