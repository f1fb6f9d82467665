#include "dispatch.hpp"

#include <stdlib.h>
#include <string.h>

#include "families.hpp"

namespace sm {

Core core;

#define SM_EXTERN(Family, name) extern const Family name;
#define SM_TABLE(Family, name) &name,
#define SM_TABLES(isa) \
    namespace isa { \
    SM_FAMILIES(SM_EXTERN) \
    static const Core tables = {SM_FAMILIES(SM_TABLE)}; \
    }

#if defined(__x86_64__)

const char *const isa_names[ISAS] = {"v2", "v3", "v4", nullptr};
#ifdef SM_ONLY  // built for one of them
SM_TABLES(SM_ONLY)
#define SM_TEXT(name) #name
#define SM_NAME(name) SM_TEXT(name)
static bool built(int isa) { return !strcmp(isa_names[isa], SM_NAME(SM_ONLY)); }
static const Core *const all[ISAS] = {&SM_ONLY::tables, &SM_ONLY::tables, &SM_ONLY::tables, nullptr};
#else
SM_TABLES(v2)
SM_TABLES(v3)
SM_TABLES(v4)
static bool built(int) { return true; }
static const Core *const all[ISAS] = {&v2::tables, &v3::tables, &v4::tables, nullptr};
#endif

#include <cpuid.h>

// What the system keeps of the registers when it switches threads.
static uint64_t kept_registers() {
    uint32_t low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low | static_cast<uint64_t>(high) << 32;
}

static bool has(uint32_t found, uint32_t wanted) { return (found & wanted) == wanted; }

bool isa_runs(int isa) {
    uint32_t a, b, c, d, features = 0, more_b = 0, extended = 0;
    if (isa < 0 || isa > 2 || !built(isa) || !__get_cpuid(1, &a, &b, &features, &d)) return false;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) more_b = b;
    if (__get_cpuid(0x80000001, &a, &b, &c, &d)) extended = c;
    // SSE3, SSSE3, CMPXCHG16B, SSE4.1, SSE4.2, POPCNT; LAHF
    if (!has(features, 1u | 1u << 9 | 1u << 13 | 1u << 19 | 1u << 20 | 1u << 23)) return false;
    if (isa == 0) return has(extended, 1u);
    // FMA, MOVBE, XSAVE, OSXSAVE, AVX, F16C; LZCNT; BMI1, AVX2, BMI2
    bool v3 = has(features, 1u << 12 | 1u << 22 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 29) &&
              has(extended, 1u << 5) && has(more_b, 1u << 3 | 1u << 5 | 1u << 8) &&
              (kept_registers() & 0x6) == 0x6;
    if (isa == 1) return v3;
    // AVX512F, DQ, CD, BW, VL
    return v3 && has(more_b, 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31) &&
           (kept_registers() & 0xE6) == 0xE6;
}

#else

SM_TABLES(baseline)
const char *const isa_names[ISAS] = {"baseline", nullptr, nullptr, nullptr};
static const Core *const all[ISAS] = {&baseline::tables, nullptr, nullptr, nullptr};

bool isa_runs(int isa) { return isa == 0; }

#endif

static int used = 0;

int isa_used() { return used; }

void isa_use(int isa) {
    core = *all[isa];
    used = isa;
}

bool isa_choose() {
    const char *wanted = getenv("SIGMERGE_ISA");
    bool found = false;
    for (int isa = 0; isa < ISAS; isa++)
        if (isa_names[isa] && isa_runs(isa) && (!wanted || !*wanted || !strcmp(wanted, isa_names[isa]))) {
            isa_use(isa);
            found = true;
        }
    return found;
}

}  // namespace sm
