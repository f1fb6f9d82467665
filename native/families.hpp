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

#define SM_FAMILIES(X) \
    X(Convert, convert) \
    X(Checksum, checksums) \
    X(Philox, philox)

// The chosen tables: core.convert->widen(…).
struct Core {
#define SM_MEMBER(Family, name) const Family *name;
    SM_FAMILIES(SM_MEMBER)
#undef SM_MEMBER
};
extern Core core;

}  // namespace sm
