// A checksum of bytes at the speed of memory, to detect accidents: truncated, zeroed, mixed up.
//
// NH, the inner part of UMAC: the two halves of every 64-bit word, each with a number added that
// depends on the word's position, are multiplied, and the products are added modulo 2^64. Equal
// sums of different bytes are a matter of chance, 2^-32 at worst. It is no protection against a
// forger.
#include "families.hpp"
#include "load.hpp"

namespace sm::SM_ISA {

namespace {

constexpr int AT_ONCE = 64;  // words that are added to sums of their own
constexpr uint64_t EVEN = 0x9E3779B1, ODD = 0x85EBCA77, HALF = 0xFFFFFFFF;

SM_INLINE uint64_t product(uint64_t word, uint64_t low_key, uint64_t high_key) {
    return ((word + low_key) & HALF) * (((word >> 32) + high_key) & HALF);
}

SM_INLINE uint64_t word_at(const uint8_t *words, int64_t i) {
    uint64_t word;
    __builtin_memcpy(&word, words + 8 * i, 8);
    return word;
}

uint64_t sum_words(const void *given, int64_t count, uint64_t first, uint64_t total) {
    const uint8_t *words = static_cast<const uint8_t *>(given);
    // The numbers of AT_ONCE words are made once: those of the next are more by one number.
    uint64_t low[AT_ONCE], high[AT_ONCE], sums[AT_ONCE] = {};
    for (int i = 0; i < AT_ONCE; i++) {
        low[i] = (static_cast<uint64_t>(i) + 1) * EVEN;
        high[i] = (static_cast<uint64_t>(i) + 1) * ODD + EVEN;
    }
    int64_t done = 0;
    for (; done + AT_ONCE <= count; done += AT_ONCE) {
        uint64_t place = first + static_cast<uint64_t>(done), more_low = place * EVEN, more_high = place * ODD;
        for (int i = 0; i < AT_ONCE; i++)
            sums[i] += product(word_at(words, done + i), low[i] + more_low, high[i] + more_high);
    }
    for (int i = 0; i < AT_ONCE; i++) total += sums[i];
    for (; done < count; done++) {
        uint64_t at = first + static_cast<uint64_t>(done) + 1;
        total += product(word_at(words, done), at * EVEN, at * ODD + EVEN);
    }
    return total;
}

}  // namespace

extern const Checksum checksums;
const Checksum checksums = {sum_words};

}  // namespace sm::SM_ISA
