// Counter-based random numbers: Philox4x32-10 (Salmon et al., SC'11).
//
// A draw depends on (key, index) alone, so any tile of any tensor can be drawn anywhere in any
// order and gives the same bits. Index i is lane i mod 4 of counter i div 4.
#include "families.hpp"
#include "load.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

namespace sm::SM_ISA {

namespace {

// Words in the low halves of 64-bit lanes, where the products of two words have room. What the high
// halves hold does not matter.
#if defined(__AVX512F__)
constexpr int WIDTH = 8;
using Wide = __m512i;
SM_INLINE Wide every(uint64_t word) { return _mm512_set1_epi64(static_cast<int64_t>(word)); }
SM_INLINE Wide product(Wide a, Wide b) { return _mm512_mul_epu32(a, b); }
SM_INLINE Wide exclusive(Wide a, Wide b) { return _mm512_xor_si512(a, b); }
SM_INLINE Wide high_half(Wide a) { return _mm512_srli_epi64(a, 32); }
SM_INLINE Wide paired(Wide a, Wide b) { return _mm512_mask_shuffle_epi32(a, 0xAAAA, b, _MM_PERM_CCAA); }
#elif defined(__AVX2__)
constexpr int WIDTH = 4;
using Wide = __m256i;
SM_INLINE Wide every(uint64_t word) { return _mm256_set1_epi64x(static_cast<int64_t>(word)); }
SM_INLINE Wide product(Wide a, Wide b) { return _mm256_mul_epu32(a, b); }
SM_INLINE Wide exclusive(Wide a, Wide b) { return _mm256_xor_si256(a, b); }
SM_INLINE Wide high_half(Wide a) { return _mm256_srli_epi64(a, 32); }
SM_INLINE Wide paired(Wide a, Wide b) { return _mm256_blend_epi32(a, _mm256_slli_epi64(b, 32), 0xAA); }
#elif defined(__x86_64__)
constexpr int WIDTH = 2;
using Wide = __m128i;
SM_INLINE Wide every(uint64_t word) { return _mm_set1_epi64x(static_cast<int64_t>(word)); }
SM_INLINE Wide product(Wide a, Wide b) { return _mm_mul_epu32(a, b); }
SM_INLINE Wide exclusive(Wide a, Wide b) { return _mm_xor_si128(a, b); }
SM_INLINE Wide high_half(Wide a) { return _mm_srli_epi64(a, 32); }
SM_INLINE Wide paired(Wide a, Wide b) { return _mm_blend_epi16(a, _mm_slli_epi64(b, 32), 0xCC); }
#else
constexpr int WIDTH = 2;
using Wide = uint64x2_t;
SM_INLINE Wide every(uint64_t word) { return vdupq_n_u64(word); }
SM_INLINE Wide product(Wide a, Wide b) { return vmull_u32(vmovn_u64(a), vmovn_u64(b)); }
SM_INLINE Wide exclusive(Wide a, Wide b) { return veorq_u64(a, b); }
SM_INLINE Wide high_half(Wide a) { return vshrq_n_u64(a, 32); }
SM_INLINE Wide paired(Wide a, Wide b) { return vbslq_u64(vdupq_n_u64(0xFFFFFFFF), a, vshlq_n_u64(b, 32)); }
#endif

constexpr int AT_ONCE = 4;               // vectors that do not wait for one another
constexpr int COUNTERS = AT_ONCE * WIDTH;  // that are drawn from together
constexpr int64_t DRAWS = 4 * COUNTERS;  // of one block

// The draws of COUNTERS counters from `first` on, of which all have the same high word.
void fill_block(uint32_t k0, uint32_t k1, uint64_t first, uint32_t *SM_RESTRICT out) {
    const Wide even = every(0xD2511F53), odd = every(0xCD9E8D57);
    uint64_t front[COUNTERS], back[COUNTERS];  // the first two draws of each counter, the other two
    for (int i = 0; i < COUNTERS; i++) front[i] = first + static_cast<uint64_t>(i);
    Wide c0[AT_ONCE], c1[AT_ONCE], c2[AT_ONCE], c3[AT_ONCE];
    for (int i = 0; i < AT_ONCE; i++) {
        __builtin_memcpy(&c0[i], &front[i * WIDTH], sizeof(Wide));
        c1[i] = every(first >> 32);
        c2[i] = c3[i] = every(0);
    }
    uint32_t key0 = k0, key1 = k1;
    for (int turn = 0; turn < 10; turn++) {
        const Wide own0 = every(key0), own1 = every(key1);
        for (int i = 0; i < AT_ONCE; i++) {
            const Wide one = product(c0[i], even), other = product(c2[i], odd);
            c0[i] = exclusive(exclusive(high_half(other), c1[i]), own0);
            c2[i] = exclusive(exclusive(high_half(one), c3[i]), own1);
            c1[i] = other;
            c3[i] = one;
        }
        key0 += 0x9E3779B9;
        key1 += 0xBB67AE85;
    }
    for (int i = 0; i < AT_ONCE; i++) {
        const Wide some = paired(c0[i], c1[i]), others = paired(c2[i], c3[i]);
        __builtin_memcpy(&front[i * WIDTH], &some, sizeof(Wide));
        __builtin_memcpy(&back[i * WIDTH], &others, sizeof(Wide));
    }
    for (int i = 0; i < COUNTERS; i++) {
        __builtin_memcpy(out + 4 * i, front + i, 8);
        __builtin_memcpy(out + 4 * i + 2, back + i, 8);
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
