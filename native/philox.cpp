// Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11).
//
// A draw depends on (key, index) alone, so any tile of any tensor can be drawn anywhere in any
// order and gives the same bits. Index i is lane i mod 4 of counter i div 4.
#include "families.hpp"
#include "load.hpp"

namespace sm::SM_ISA {

namespace {

constexpr int COUNTERS = 16;             // that are drawn from together
constexpr int64_t DRAWS = 4 * COUNTERS;  // of one block

// The draws of COUNTERS counters from `first` on, of which all have the same high word.
void fill_block(uint32_t k0, uint32_t k1, uint64_t first, uint32_t *SM_RESTRICT out) {
    // A word is the low half of 64 bits, where the products of two words have room.
    uint64_t c0[COUNTERS], c1[COUNTERS], c2[COUNTERS], c3[COUNTERS];
    for (int i = 0; i < COUNTERS; i++) {
        c0[i] = (first + static_cast<uint64_t>(i)) & 0xFFFFFFFF;
        c1[i] = first >> 32;
        c2[i] = c3[i] = 0;
    }
    for (int turn = 0; turn < 10; turn++) {
        for (int i = 0; i < COUNTERS; i++) {
            uint64_t one = (c0[i] & 0xFFFFFFFF) * 0xD2511F53, other = (c2[i] & 0xFFFFFFFF) * 0xCD9E8D57;
            c0[i] = (other >> 32) ^ c1[i] ^ k0;
            c2[i] = (one >> 32) ^ c3[i] ^ k1;
            c1[i] = other;
            c3[i] = one;
        }
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    for (int i = 0; i < COUNTERS; i++) {
        out[4 * i] = static_cast<uint32_t>(c0[i]);
        out[4 * i + 1] = static_cast<uint32_t>(c1[i]);
        out[4 * i + 2] = static_cast<uint32_t>(c2[i]);
        out[4 * i + 3] = static_cast<uint32_t>(c3[i]);
    }
}

}  // namespace

void fill(uint32_t k0, uint32_t k1, int64_t start, int64_t count, uint32_t *out) {
    uint32_t block[DRAWS];
    for (int64_t done = 0; done < count;) {
        int64_t skip = (start + done) % DRAWS, some = least(DRAWS - skip, count - done);
        uint64_t first = static_cast<uint64_t>((start + done) / DRAWS) * COUNTERS;
        fill_block(k0, k1, first, some == DRAWS ? out + done : block);
        if (some < DRAWS) __builtin_memcpy(out + done, block + skip, static_cast<size_t>(some) * 4);
        done += some;
    }
}

extern const Philox philox;
const Philox philox = {fill};

}  // namespace sm::SM_ISA
