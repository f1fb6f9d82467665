// Which instruction set the tables of `core` are for.
#pragma once

namespace sm {

constexpr int ISAS = 4;
extern const char *const isa_names[ISAS];  // from the oldest on; null where this build has fewer
bool isa_runs(int isa);                    // whether this build and this processor have it
void isa_use(int isa);
int isa_used();
bool isa_choose();  // the newest there is, or SIGMERGE_ISA; false if there is none

}  // namespace sm
